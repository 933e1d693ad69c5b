"""A node that loads on demand: images that it never saw, kills of server and pager, stores that go away, eviction and repair."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec.model.errors import ImageUnavailable, InvalidArgument, NotFound, SandboxLost
from dsec.sync import DSecClient
from dsec.testing.node import Node, NodeFailed
from loading.library import SIZE, Library, gauge, layer_file, pager_group, pager_kill, sandbox, seen, stats, until

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
Start = Callable[..., Node]


@pytest.mark.parametrize("mechanism", ["fanotify", "fuse"])
def test_an_image_that_the_node_never_saw_starts_and_only_what_is_touched_comes(
    start: Start, library: Library, mechanism: str
) -> None:
    node = start(mechanism=mechanism)
    assert not node.has("box")
    with sandbox(node) as box:
        assert box.exec(["cat", "/data/hello"]).text == "hello\n"
        assert node.has("box")
        seen = stats(node)
        assert (seen["load"], seen["served"], seen["mechanism"]) == ("on-demand", True, mechanism)
        assert 0 < seen["share"] < 0.5 and 0 < seen["bytes_present"] < SIZE // 2
        assert layer_file(node, library, "data").stat().st_blocks * 512 < SIZE // 2
        assert box.exec(["sha256sum", "/data/big"]).text.split()[0] == library.big
        after = stats(node)
        assert after["bytes_present"] > SIZE and after["errors"] == after["wrong_bytes"] == 0
    until(lambda: gauge(node, "dsec_images_bytes_filled") >= SIZE)
    assert gauge(node, "dsec_images_on_demand") == 1
    assert node.dsec("cache", "fsck").endswith(": sound\n")


def test_what_is_in_no_store_is_not_found_and_a_tenant_can_name_no_store(start: Start, library: Library) -> None:
    node = start()
    for name, error in (
        ("nothing", NotFound),
        (f"file://{library.store}/box", InvalidArgument),
        ("s3://bucket/box", InvalidArgument),
        ("oci://127.0.0.1:1/box", InvalidArgument),
        ("../box", InvalidArgument),
    ):
        with pytest.raises(error), sandbox(node, name):
            raise AssertionError("it started")
    assert not node.images()


def test_sandboxes_read_on_while_the_server_is_dead_and_are_taken_over(start: Start, library: Library) -> None:
    node = start()
    with sandbox(node) as box:
        box.start(["sh", "-c", "sleep 1; sha256sum /data/big > /data/sum"])
        node.kill()
        pids = pager_group(node).processes()
        assert pids, "the pager ended with its server"

        def read() -> bool:
            return layer_file(node, library, "data").stat().st_blocks * 512 > SIZE

        until(read)
        node.restart()
        assert pager_group(node).processes() == pids, "another pager was started"
    with sandbox(node) as again:
        assert again.exec(["sha256sum", "/data/big"]).text.split()[0] == library.big
    assert gauge(node, "dsec_images_pager_starts") == 0


def test_a_live_sandbox_is_adopted_with_its_layers(start: Start, library: Library) -> None:
    node = start()
    with sandbox(node) as box:
        assert box.exec(["cat", "/data/hello"]).ok
        node.kill()
        node.restart()
        with DSecClient(node.url, node.api_key) as client:
            adopted = client.get(box.id)
            assert adopted.exec(["sha256sum", "/data/big"]).text.split()[0] == library.big
            adopted.stop()


def test_a_killed_pager_loses_no_read(start: Start, library: Library) -> None:
    node = start()
    with sandbox(node) as box:
        sums: list[str] = []

        def read() -> None:
            for _ in range(3):
                sums.append(box.exec(["sh", "-c", "cat /data/late /data/big | sha256sum; sha256sum /data/big"]).text)

        reader = threading.Thread(target=read)
        reader.start()
        killed = {pager_kill(node) for _ in range(3)}
        reader.join()
        assert len(sums) == 3 and len(set(sums)) == 1 and library.big in sums[0]
        assert len(killed) == 3, "each was another process"
    assert gauge(node, "dsec_images_read_errors") == 0


def test_a_pager_that_is_gone_with_all_it_held_ends_what_read_through_it(start: Start) -> None:
    node = start()
    with sandbox(node) as box:
        assert box.exec(["cat", "/data/hello"]).ok
        pager_kill(node, all_of_it=True)
        until(lambda: seen(node, box).state == "gone")
        end = seen(node, box).end
        assert end is not None and end.end == "image"
        with pytest.raises(SandboxLost) as lost:
            box.exec(["true"])
        assert lost.value.is_infra_error
    with sandbox(node) as other:
        assert other.exec(["cat", "/data/hello"]).text == "hello\n"
    assert gauge(node, "dsec_images_pager_starts") >= 1


def test_a_store_that_stays_away_is_an_infrastructure_failure(start: Start, library: Library, tmp_path: Path) -> None:
    own = library.copy(tmp_path / "store")
    node = start(store=f"file://{own.store}", wait_seconds=0.5)
    with sandbox(node) as box:
        assert box.exec(["cat", "/data/hello"]).ok
        packs = {path: path.read_bytes() for path in (own.store / "v2/packs").iterdir()}
        for path in packs:
            path.write_bytes(b"")
        failed = box.exec(["sha256sum", "/data/big"])
        assert not failed.ok and failed.infra and b"Input/output error" in failed.stderr
        assert not box.exec(["false"]).infra, "told once"
        assert any(each.fields.get("what") == "image_unreadable" for each in box.events())
        with pytest.raises(NotFound), sandbox(node, "other"):
            raise AssertionError("it started")
        own.store.rename(tmp_path / "away")
        with pytest.raises(ImageUnavailable), sandbox(node, "another"):
            raise AssertionError("it started")
        (tmp_path / "away").rename(own.store)
        for path, raw in packs.items():
            path.write_bytes(raw)
        assert box.exec(["sha256sum", "/data/big"]).text.split()[0] == own.big
    until(lambda: gauge(node, "dsec_images_read_errors") > 0)


def test_a_cache_over_its_mark_gives_back_what_nobody_needs(start: Start, library: Library) -> None:
    node = start(cache_high_mb=1, cache_low_mb=1, cache_interval=0.2)
    long_ago = (1.0, 1.0)

    def here() -> int:
        return layer_file(node, library, "data").stat().st_blocks * 512

    with sandbox(node) as box:
        assert box.exec(["sha256sum", "/data/big"]).text.split()[0] == library.big
        os.utime(layer_file(node, library, "origin.json"), long_ago)
        shown = json.loads(node.dsec("cache", "show", "--json"))
        assert (shown["high_bytes"], shown["layers"][0]["live"]) == (1 << 20, True)
        assert json.loads(node.dsec("cache", "evict", "--json"))["freed_bytes"] == 0, "what a sandbox has stays"
        node.dsec("cache", "pin", "box")
    os.utime(layer_file(node, library, "origin.json"), long_ago)
    assert json.loads(node.dsec("cache", "evict", "--json"))["freed_bytes"] == 0, "what is pinned stays"
    assert here() > SIZE
    node.dsec("cache", "unpin", "box")
    until(lambda: here() < SIZE // 4)
    until(lambda: gauge(node, "dsec_images_evicted_bytes") > SIZE)
    with sandbox(node) as again:
        assert again.exec(["sha256sum", "/data/big"]).text.split()[0] == library.big


def test_eviction_under_a_reader_is_never_seen(start: Start, library: Library) -> None:
    node = start()
    with sandbox(node) as box:
        found: list[str] = []

        def read() -> None:
            for _ in range(4):
                found.append(box.exec(["sha256sum", "/data/big"]).text.split()[0])

        reader = threading.Thread(target=read)
        reader.start()
        while reader.is_alive():
            node.dsec("cache", "evict", "box")
        reader.join()
        assert found == [library.big] * 4


def test_a_damaged_chunk_is_found_and_fetched_again(start: Start, library: Library) -> None:
    node = start(idle_seconds=0.01, idle_mounts=0)
    with sandbox(node) as box:
        box.exec(["sha256sum", "/data/big"])
    data, meta = layer_file(node, library, "data"), layer_file(node, library, "meta.erofs")
    with data.open("r+b") as file:
        at = next(n for n in range(0, SIZE, 4096) if file.seek(n) == n and file.read(16).strip(b"\0"))
        file.seek(at)
        file.write(b"DAMAGED")
    with meta.open("r+b") as file:
        file.seek(2000)
        file.write(b"x" * 100)
    with pytest.raises(NodeFailed, match="damaged"):
        node.dsec("cache", "fsck", "box")
    (found,) = json.loads(node.dsec("cache", "fsck", "--repair", "--json", "box"))
    assert found["files"] == ["meta.erofs"] and len(found["chunks"]) == 1 and found["repaired"]
    assert node.dsec("cache", "fsck").endswith(": sound\n")
    with sandbox(node) as box:
        assert box.exec(["sha256sum", "/data/big"]).text.split()[0] == library.big


def test_what_no_name_reaches_is_collected(start: Start) -> None:
    node = start(idle_mounts=0)
    with sandbox(node) as box:
        box.exec(["true"])
    node.dsec("image", "remove", "box")
    assert len(json.loads(node.dsec("cache", "gc", "--json"))["removed"]) == 1
    assert list((node.state / "layers").glob("?" * 64)) == []


def test_loading_whole_and_pulling(start: Start, library: Library) -> None:
    node = start()
    node.dsec("image", "pull", "--load", "on-demand", "box")
    assert stats(node)["bytes_present"] == 0
    node.dsec("image", "pull", "box")
    assert not layer_file(node, library, "have").exists()
    assert (stats(node)["share"], stats(node)["served"]) == (1.0, False)
    with sandbox(node) as box:
        assert box.exec(["sha256sum", "/data/big"]).text.split()[0] == library.big
        assert stats(node)["events"] == 0
    whole = start(load="whole")
    with sandbox(whole) as box:
        assert box.exec(["cat", "/data/hello"]).ok
        assert (stats(whole)["load"], stats(whole)["share"]) == ("whole", 1.0)


def test_a_recorded_run_is_what_later_starts_fetch_ahead(start: Start, library: Library, tmp_path: Path) -> None:
    own = library.copy(tmp_path / "store")
    node = start(store=f"file://{own.store}", idle_mounts=0)
    node.dsec("image", "pull", "--load", "on-demand", "box")
    for version in (1, 2):
        (kept,) = json.loads(node.dsec("image", "record", "--json", "--push", "box", "cat", "/data/late"))
        assert (kept["version"], kept["runs"]) == (version, version)
        assert kept["touched"] * 256 * 1024 >= SIZE // 4
    other = start(store=f"file://{own.store}")
    with sandbox(other) as box:
        until(lambda: stats(other)["bytes_present"] >= SIZE // 4)
        before = stats(other)["fetches"]
        assert box.exec(["cat", "/data/late"]).ok
        assert stats(other)["fetches"] == before, "all of it was here"


def test_the_credentials_of_a_store_reach_no_sandbox_and_no_log(start: Start, library: Library, tmp_path: Path) -> None:
    secret = "S3cr3t-of-the-store"
    stores = tmp_path / "stores.toml"
    stores.write_text(f'[main]\nurl = "file://{library.store}"\nsecret_key = "{secret}"\n')
    stores.chmod(0o600)
    node = start(store="", stores=stores)
    with sandbox(node) as box:
        inside = box.exec(["sh", "-c", "env; cat /proc/*/environ /proc/*/cmdline /proc/mounts"]).text
        assert "PATH" in inside and secret not in inside
    assert secret not in node.dsec("config", "explain") + node.dsec("images", "stats") + node.log
    places = [path for path in node.state.rglob("*") if path.is_file() and path.name not in ("pool.img", "data")]
    assert len(places) > 10
    assert [path for path in places if secret.encode() in path.read_bytes()] == []


def test_nothing_is_left_after_down(start: Start, tmp_path: Path) -> None:
    node = start()
    with sandbox(node) as box:
        box.exec(["true"])
    node.stop()
    assert pager_group(node).processes() == []
    assert str(node.state) not in Path("/proc/self/mountinfo").read_text()
    shutil.rmtree(node.state)
