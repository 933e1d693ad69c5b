"""Builds on a real node: what the steps make, what is used again, and what is left of one that fails: nothing."""

import bz2
import gzip
import io
import lzma
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec
from conformance.boxes import Boxes
from conformance.site import OwnNode
from dsec.cli.image_build import Limits, SandboxRunner, Shown
from dsec.images.building import Builder, BuildOptions, expire
from dsec.images.collect import collect
from dsec.images.importing import Quiet
from dsec.model.layers import ImageConfig
from dsec.rules.dockerfile import parse_dockerfile
from imagekit import CLOCK, Shelf

pytestmark = pytest.mark.root

LIMITS = Limits(memory_mb=256, cpus=2.0, disk_mb=256, pids=128, network=(), timeout=60)


class Told(Shown):
    """What was said of the steps: how each was done."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.how: list[str] = []

    def end(self, how: str, digest: str) -> None:
        self.how.append(how)


class Place:
    """A build context on the node's own store."""

    def __init__(self, node: OwnNode, client: dsec.DSecClient, context: Path) -> None:
        self.shelf = Shelf(node.state)
        self.context = context
        self._client = client
        context.mkdir()

    def write(self, name: str, content: str | bytes = "x", mode: int = 0o644) -> None:
        path = self.context / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(mode)

    async def build(self, name: str, text: str, **options: object) -> list[str]:
        """Builds it; how each step was done."""
        given = options.get("arguments", {})
        file = parse_dockerfile(text, "Dockerfile", given, {})  # type: ignore[arg-type]
        told = Told()
        runner = SandboxRunner(self._client, LIMITS, told)
        shelf = self.shelf
        builder = Builder(shelf.layers, shelf.names, shelf.importer, CLOCK, runner, told, Quiet())
        await builder.build(name, file, BuildOptions(context=self.context, **options))  # type: ignore[arg-type]
        return told.how

    def config(self, name: str) -> ImageConfig:
        return self.shelf.layers.manifest(self.shelf.names.record(name).digest).config


@pytest.fixture
def place(node: OwnNode, client: dsec.DSecClient, tmp_path: Path) -> Iterator[Place]:
    found = Place(node, client, tmp_path / "context")
    names, layers = found.shelf.names, found.shelf.layers
    before = {record.name for record in names.all()}
    yield found
    for record in names.all():
        if record.name not in before:
            names.remove(record.name)
    collect(node.state, layers, names)
    assert os.listdir(node.state / "pool/frozen") == []


STAGES = """
ARG BASE=box:1
FROM ${BASE} AS made
WORKDIR /app
COPY --chown=1000:1000 src/ ./src/
ARG WHO=world
RUN echo "hello $WHO" > said && id -u > uid && mkdir -p /tmp/kept && ln said linked
USER 1000:1000
RUN id -u >> src/uid; env | grep -c ^WHO= >> src/uid
FROM made AS unused
RUN exit 1
FROM box:1
COPY --from=made /app/ /final/
COPY <<one <<'two' /docs/
$WHO none
one
$WHO kept
two
ENV A="b c" PATH=/final:$PATH
LABEL l=v
EXPOSE 80
ENTRYPOINT ["/bin/sh"]
CMD ["-c", "x"]
USER 7
"""


async def test_stages_become_an_image_and_its_config(place: Place, boxes: Boxes) -> None:
    place.write("src/a.py", "print(1)", 0o755)
    place.write("src/sub/b", "b")
    how = await place.build("stages:1", STAGES, arguments={"WHO": "there"})
    assert how == ["made"] * 6
    box = await boxes.make("stages:1")
    text = "cat /final/said /final/uid /final/src/uid /docs/one /docs/two; stat -c '%n %a %u' /final/src/a.py; ls /tmp; id -u; echo $A"
    expected = "hello there\n0\n1000\n1\n none\n$WHO kept\n/final/src/a.py 755 0\n7\nb c\n"
    assert (await box.run_shell(text, check=True)).text == expected
    config = place.config("stages:1")
    assert (config.entrypoint, config.cmd, config.user, config.labels) == (("/bin/sh",), ("-c", "x"), "7", {"l": "v"})
    assert config.exposed_ports == ("80/tcp",)
    assert (await place.build("stages:2", STAGES, arguments={"WHO": "there"})) == ["cached"] * 6
    assert place.shelf.names.record("stages:2").digest == place.shelf.names.record("stages:1").digest


async def test_what_changes_is_made_anew_and_what_does_not_is_not(place: Place) -> None:
    text = "FROM box:1\nRUN echo a > /a\nCOPY in /in\nRUN cat /in > /out\n"
    place.write("in", "1")
    assert await place.build("c:1", text) == ["made", "made", "made"]
    place.write("in", "1", 0o644)
    os.utime(place.context / "in", (5, 5))
    assert await place.build("c:1", text) == ["cached", "cached", "cached"]
    place.write("in", "2")
    assert await place.build("c:1", text) == ["cached", "made", "made"]
    assert await place.build("c:1", text, cache=False) == ["made", "made", "made"]
    assert await place.build("c:1", text, rules=("pypi",)) == ["made", "made", "made"]
    assert await place.build("c:2", text + "LABEL x=y\n") == ["cached", "cached", "cached"]


async def test_steps_live_as_long_as_builds_use_them(place: Place, node: OwnNode) -> None:
    text = "FROM box:1\nRUN echo keep > /kept\n"
    await place.build("k:1", text)
    layers, names = place.shelf.layers, place.shelf.names
    assert "dsec-build/" not in "".join(view.name for view in names.views())
    assert expire(names, CLOCK.now() - 3600) == 0
    names.remove("k:1")
    collect(node.state, layers, names)
    assert await place.build("k:2", text) == ["cached"]
    assert expire(names, CLOCK.now() + 1) == 1
    collect(node.state, layers, names)  # the layer is the image's too, and stays
    assert await place.build("k:2", text) == ["made"]


async def test_a_run_that_fails_says_so_and_leaves_nothing(place: Place, client: dsec.DSecClient) -> None:
    before = set(place.shelf.layers.digests())
    names = {record.name for record in place.shelf.names.all()}
    with pytest.raises(dsec.CommandFailed) as raised:
        await place.build("bad:1", "FROM box:1\n\nRUN echo one; echo two >&2; touch /x; exit 3\n")
    assert "line 3" in str(raised.value)
    assert raised.value.exit_code == 3
    assert set(place.shelf.layers.digests()) == before
    assert {record.name for record in place.shelf.names.all()} == names
    assert await client.sandboxes(job="dsec-image-build", state="running") == []


async def test_a_run_has_no_network_unless_the_build_states_rules(place: Place) -> None:
    await place.build("n:1", "FROM box:1\nRUN ! ip addr show eth0 2>/dev/null && ip addr | grep -q lo\n")


async def test_archives_are_unpacked_by_add_alone(place: Place, boxes: Boxes) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo("d/it")
        member.size, member.uid, member.mode = 2, 42, 0o640
        tar.addfile(member, io.BytesIO(b"in"))
    raw = packed.getvalue()
    for name, data in (
        ("t.tar", raw),
        ("t.tar.gz", gzip.compress(raw)),
        ("t.tar.bz2", bz2.compress(raw)),
        ("t.tar.xz", lzma.compress(raw)),
    ):
        place.write(name, data)
    place.write("plain.gz", gzip.compress(b"no tar" * 200))
    text = "FROM box:1\nADD t.tar /1/\nADD t.tar.gz /2\nADD t.tar.bz2 t.tar.xz /3/\nADD plain.gz /4/\nCOPY t.tar /5/\n"
    await place.build("add:1", text)
    box = await boxes.make("add:1")
    said = await box.run_shell("stat -c '%n %a %u %s' /1/d/it /2/d/it /3/d/it /4/* /5/*", check=True)
    size = len(gzip.compress(b"no tar" * 200))
    assert (
        said.text
        == f"/1/d/it 640 42 2\n/2/d/it 640 42 2\n/3/d/it 640 42 2\n/4/plain.gz 644 0 {size}\n/5/t.tar 644 0 {len(raw)}\n"
    )
    place.write("t.tar.gz", gzip.compress(raw)[:60] + b"broken")
    with pytest.raises(dsec.InvalidArgument, match="Dockerfile:2"):
        await place.build("add:2", "FROM box:1\nADD t.tar.gz /1/\n")


async def test_the_context_is_without_what_is_ignored_and_nothing_outside(place: Place, boxes: Boxes) -> None:
    for name in (".git/config", "a.pyc", "sub/b.pyc", "sub/keep.pyc", "sub/b.py"):
        place.write(name)
    (place.context / "out").symlink_to("/etc/passwd")
    await place.build("i:1", "FROM box:1\nCOPY . /c/\n", ignore=".git\n**/*.pyc\n!sub/keep.pyc\n")
    box = await boxes.make("i:1")
    assert (await box.run_shell("cd /c && find . | sort")).text.split() == [
        ".",
        "./out",
        "./sub",
        "./sub/b.py",
        "./sub/keep.pyc",
    ]
    assert (await box.run_shell("readlink /c/out")).text == "/etc/passwd\n"
    for text in ("COPY out /x", "COPY ../../../etc/passwd /x", "COPY .git /x"):
        with pytest.raises(dsec.NotFound, match="Dockerfile:2"):
            await place.build("i:2", f"FROM box:1\n{text}\n", ignore=".git\n")


async def test_an_image_begins_from_scratch(place: Place, boxes: Boxes) -> None:
    place.write("f", "x")
    with pytest.raises(dsec.InvalidArgument, match="Dockerfile:2"):
        await place.build("s:1", "FROM scratch\nRUN true\n")
    await place.build("s:1", "FROM box:1 AS b\nFROM scratch\nCOPY --from=b /bin /bin\nCOPY f /f\n")
    box = await boxes.make("s:1")
    assert (await box.run_shell("cat /f", check=True)).text == "x"
    with pytest.raises(dsec.NotFound, match="Dockerfile:1"):
        await place.build("s:2", "FROM gone:1\n")


async def test_names_of_users_are_the_images_own(place: Place, boxes: Boxes) -> None:
    place.write("f")
    text = "FROM box:1\nRUN echo app:x:77:78::/:/bin/sh >> /etc/passwd && echo grp:x:99: >> /etc/group\n"
    await place.build("u:1", text + "COPY --chown=app f /1\nCOPY --chown=app:grp f /2\nUSER app\nWORKDIR /home/app\n")
    box = await boxes.make("u:1")
    said = await box.run_shell("stat -c '%u:%g' /1 /2 /home/app; id -u", check=True)
    assert said.text.split() == ["77:78", "77:99", "77:78", "77"]
    with pytest.raises(dsec.NotFound, match="nobody-knows"):
        await place.build("u:2", "FROM box:1\nCOPY --chown=nobody-knows f /1\n")


def test_the_command_line_builds_and_commits(node: OwnNode, place: Place) -> None:
    place.write("Dockerfile", "FROM box:1\nARG A\nCOPY f /f\nRUN echo $A >> /f\n")
    place.write("f", "1\n")
    said = node.dsec("image", "build", "cli:1", str(place.context), "--build-arg", "A=2", "--progress", "quiet")
    assert said.startswith("cli:1 sha256:")
    name = node.dsec("run", "--image", "cli:1").strip()
    assert node.dsec("exec", name, "cat", "/f") == "1\n2\n"
    assert node.dsec("image", "commit", name, "cli:2").startswith("cli:2 sha256:")
    node.dsec("stop", name)
