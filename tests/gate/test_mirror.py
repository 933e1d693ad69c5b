"""Mirrors as of a date, asked by real clients from within sandboxes: pip, uv, npm and go."""

import hashlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.gate.settings import GateSettings, MirrorService
from dsec.model.network import MirrorRule, Policy
from dsec.testing.gatesite import GATEWAY, Site, site_of
from dsec.testing.internet import HOST, NAMESERVERS
from dsec.testing.netservices import Record, Web
from dsec.testing.packageindex import PackageIndex, day, wheel

pytestmark = [
    pytest.mark.root,
    pytest.mark.leaves(
        "connections that the gate keeps open to the fake index, and its process that was started anew, until the module ends"
    ),
]
PYPI, NPM, GO, PLAIN = 3141, 3142, 3143, 3144
INDEX = "http://index.test"
SERVICES = (
    MirrorService(service="pypi", kind="pypi", port=PYPI, upstream=f"{INDEX}/simple"),
    MirrorService(service="npm", kind="npm", port=NPM, upstream=INDEX),
    MirrorService(service="goproxy", kind="goproxy", port=GO, upstream=INDEX),
    MirrorService(service="own", kind="plain", port=PLAIN, upstream=f"{INDEX}/files"),
)
SETTINGS = GateSettings(nameservers=NAMESERVERS[:1], index_seconds=0.001)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def site(cache: Path) -> Iterator[Site]:
    with site_of(cache, SETTINGS, SERVICES) as made:
        yield made


@pytest.fixture(scope="module")
def web(site: Site) -> Web:
    made = site.internet.web(["203.0.113.80"], ["index.test"])
    made.only_pages = True
    site.internet.dns.answer("index.test", Record("A", "203.0.113.80"))
    return made


@pytest.fixture(scope="module")
def index(web: Web) -> PackageIndex:
    made = PackageIndex(web, "index.test")
    for version, at in (("1.0", "2024-01-01"), ("1.1", "2024-06-01"), ("2.0", "2025-01-01")):
        made.add_wheel("tool", version, at)
        made.add_package("left", f"{version}.0", at)
        made.add_module("example.test/mod", f"v{version}.0", at)
    made.add_wheel("undated", "1.0", None)
    made.add_wheel("altered", "1.0", "2024-01-01", b"not the wheel of the index")
    made.add_wheel("altered", "0.9", "2024-01-01")
    made.add_module("example.test/modern", "v1.0.0", "2024-01-01")
    made.add_module("Example.test/Mod", "v1.0.0", "2024-01-01")
    return made


@pytest.fixture(autouse=True)
def ready(site: Site, index: PackageIndex) -> None:
    date(site, "2024-07-01")
    date(site, None, box=1)
    site.flows.clear()
    index.web.forget()


def date(site: Site, before: str | None, box: int = 0, modules: tuple[str, ...] = ()) -> None:
    at = day(before) if before else None
    rules = {
        "pypi": MirrorRule(kind="pypi", port=PYPI, before=at),
        "npm": MirrorRule(kind="npm", port=NPM, before=at),
        "goproxy": MirrorRule(kind="goproxy", port=GO, before=at, modules=modules),
        "own": MirrorRule(kind="plain", port=PLAIN),
    }
    site.policy(Policy(mirrors=rules), box)


def get(site: Site, port: int, path: str, box: int = 0, **headers: str) -> tuple[int, bytes]:
    def ask() -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(GATEWAY[0], port, timeout=10)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    return site.boxes[box].call(ask)


def run(
    site: Site, *words: str, box: int = 0, cwd: Path | None = None, **env: str
) -> "subprocess.CompletedProcess[str]":
    """A program within the sandbox's network, with none of this machine's settings for package tools."""
    kept = {key: os.environ[key] for key in ("PATH", "TMPDIR", "LEAKS_SESSION") if key in os.environ}

    def call() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=cwd,
            env={**kept, "HOME": str(cwd or "/nonexistent"), **env},
        )

    with site.boxes[box].inside():
        return call()


URL = f"http://{GATEWAY[0]}:{PYPI}/simple/"


def test_pip_sees_and_gets_only_what_was_there_at_the_date(site: Site, tmp_path: Path) -> None:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "--disable-pip-version-check",
        "--no-cache-dir",
        "download",
        "--no-deps",
        "--retries",
        "0",
        "-d",
        str(tmp_path),
    ]
    source = ["-i", URL, "--trusted-host", GATEWAY[0]]
    done = run(site, *pip, *source, "tool", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.glob("*.whl")] == ["tool-1.1-py3-none-any.whl"]
    assert run(site, *pip, *source, "tool==2.0", cwd=tmp_path).returncode != 0
    assert run(site, *pip, *source, "undated", cwd=tmp_path).returncode != 0
    assert run(site, *pip, *source, "tool", box=1, cwd=tmp_path).returncode == 0  # this sandbox has no date
    assert (tmp_path / "tool-2.0-py3-none-any.whl").read_bytes() == wheel("tool", "2.0")[1]


def test_uv_gets_the_same(site: Site, tmp_path: Path) -> None:
    uv = Path(sys.executable).parent / "uv"
    words = [
        str(uv),
        "--no-config",
        "--no-cache",
        "pip",
        "install",
        "--no-deps",
        "--target",
        str(tmp_path / "t"),
        "--index-url",
        URL,
        "--python",
        sys.executable,
    ]
    done = run(site, *words, "tool", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "t/tool/__init__.py").read_text() == "VERSION = '1.1'\n"
    assert run(site, *words, "tool==2.0", cwd=tmp_path).returncode != 0


def test_a_direct_address_of_a_newer_file_is_refused_and_told(site: Site) -> None:
    newer, older = wheel("tool", "2.0")[0], wheel("tool", "1.0")[0]
    assert get(site, PYPI, f"/files/tool/{newer}", box=1)[0] == 200  # in the node's cache now
    assert get(site, PYPI, f"/files/tool/{newer}")[0] == 404
    assert site.told("mirror_before").name == f"pypi:{newer}"
    assert get(site, PYPI, f"/files/tool/{older}")[0] == 200
    for path in (
        "/",
        "/simple/",
        "/simple/none-such/",
        f"/files/other/{older}",
        "/files/tool/../../x",
        f"{INDEX}/files/{newer}",
        "/simple/tool/x",
    ):
        assert get(site, PYPI, path)[0] in (404, 405), path


def test_both_forms_of_the_list_say_the_same(site: Site) -> None:
    status, page = get(site, PYPI, "/simple/Tool/")
    assert status == 200
    as_json = json.loads(get(site, PYPI, "/simple/tool/", Accept="application/vnd.pypi.simple.v1+json")[1])
    names = [file["filename"] for file in as_json["files"]]
    assert names == [wheel("tool", version)[0] for version in ("1.0", "1.1")]
    assert all(name.encode() in page for name in names)
    assert page.count(b"<a ") == 2


def test_an_index_without_dates_shows_nothing_to_a_sandbox_of_a_date(site: Site, web: Web) -> None:
    name, content = wheel("plain", "1.0")
    digest = hashlib.sha256(content).hexdigest()
    web.pages["/simple/plain/"] = (
        f'<a href="../../files/{name}#sha256={digest}" data-requires-python="&gt;=3">{name}</a><a href="x-1.0.tar.gz">x</a>'.encode()
    )
    web.types["/simple/plain/"] = "text/html"
    web.pages[f"/files/{name}"] = content
    assert get(site, PYPI, f"/files/plain/{name}")[0] == 404
    assert get(site, PYPI, f"/files/plain/{name}", box=1) == (200, content)
    assert get(site, PYPI, "/simple/plain/", box=1)[1].count(b"<a ") == 1  # what has no hash is not shown


def test_a_file_that_is_not_the_indexs_is_refused_and_not_kept(site: Site, cache: Path) -> None:
    before = sorted(path.name for path in cache.iterdir())
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        status, _ = get(site, PYPI, f"/files/altered/{wheel('altered', '1.0')[0]}")
        raise ConnectionError if status == 502 else AssertionError(status)
    assert sorted(path.name for path in cache.iterdir()) == before
    assert get(site, PYPI, f"/files/altered/{wheel('altered', '0.9')[0]}")[0] == 200


def test_a_download_that_breaks_leaves_nothing_and_is_tried_anew(site: Site, index: PackageIndex, cache: Path) -> None:
    name = index.add_wheel("broken", "1.0", "2024-01-01")
    before = sorted(path.name for path in cache.iterdir())
    index.web.halved.add(f"/files/{name}")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        status, _ = get(site, PYPI, f"/files/broken/{name}")
        raise ConnectionError if status == 502 else AssertionError(status)
    assert sorted(path.name for path in cache.iterdir()) == before
    index.web.halved.clear()
    assert get(site, PYPI, f"/files/broken/{name}") == (200, wheel("broken", "1.0")[1])


def test_many_sandboxes_cause_one_download(site: Site, index: PackageIndex) -> None:
    name = index.add_wheel("large", "1.0", "2024-01-01")
    _, content = wheel("large", "1.0")
    found: list[tuple[int, bytes]] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(get(site, PYPI, f"/files/large/{name}", box=n % 2)))
        for n in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(200, content)] * 12
    assert [request.path for request in index.web.requests].count(f"/files/{name}") == 1


def test_what_is_kept_outlives_the_process_and_half_files_do_not(site: Site, index: PackageIndex, cache: Path) -> None:
    name = wheel("tool", "1.0")[0]
    assert get(site, PYPI, f"/files/tool/{name}")[0] == 200
    (cache / ".half").write_bytes(b"what a killed process leaves")
    starts = site.gate.starts
    os.kill(site.gate.pid or 0, 9)
    site.wait_for(lambda: site.gate.starts > starts, 10)
    site.wait_for(lambda: _alive(site, name), 10)
    assert [request.path for request in index.web.requests].count(f"/files/{name}") <= 1
    assert not (cache / ".half").exists()


def _alive(site: Site, name: str) -> bool:
    try:
        return get(site, PYPI, f"/files/tool/{name}")[0] == 200
    except OSError:
        return False


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npm_gets_what_was_there_at_the_date(site: Site, tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"name": "x", "version": "1.0.0"}')
    words = [
        "npm",
        "install",
        "--no-audit",
        "--no-fund",
        "--no-update-notifier",
        "--registry",
        f"http://{GATEWAY[0]}:{NPM}/",
        "--fetch-retries",
        "0",
    ]
    done = run(site, *words, "left", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "node_modules/left/package.json").read_text())["version"] == "1.1.0"
    assert run(site, *words, "left@2.0.0", cwd=tmp_path).returncode != 0


def test_a_newer_tarball_is_refused_by_its_address(site: Site) -> None:
    assert get(site, NPM, "/left/-/left-1.0.0.tgz")[0] == 200
    assert get(site, NPM, "/left/-/left-2.0.0.tgz")[0] == 404
    assert get(site, NPM, "/left/-/left-2.0.0.tgz", box=1)[0] == 200
    package = json.loads(get(site, NPM, "/left")[1])
    assert package["dist-tags"] == {"latest": "1.1.0"}
    assert set(package["versions"]) == {"1.0.0", "1.1.0"}
    assert "2.0.0" not in json.dumps(package)


@pytest.mark.skipif(shutil.which("go") is None, reason="go is not installed")
def test_go_gets_allowed_modules_alone(site: Site, tmp_path: Path) -> None:
    date(site, "2024-07-01", modules=("example.test/mod",))
    env = {"GOPROXY": f"http://{GATEWAY[0]}:{GO}", "GONOSUMDB": "*", "GONOSUMCHECK": "1", "GOSUMDB": "off", "GOFLAGS": "-modcacherw -mod=mod", "GOPATH": str(tmp_path / "go"),
           "GOCACHE": str(tmp_path / "c"), "GOTOOLCHAIN": "local", "GOTELEMETRY": "off"}  # fmt: skip
    done = run(site, "go", "mod", "download", "-json", "example.test/mod@latest", cwd=tmp_path, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["Version"] == "v1.1.0"
    for name in ("example.test/modern@v1.0.0", "example.test/mod@v2.0.0"):
        assert run(site, "go", "mod", "download", name, cwd=tmp_path, **env).returncode != 0


def test_modules_end_at_path_boundaries_and_keep_their_case(site: Site) -> None:
    date(site, None, modules=("example.test/mod", "Example.test/Mod"))
    assert get(site, GO, "/example.test/mod/@v/list") == (200, b"v1.0.0\nv1.1.0\nv2.0.0\n")
    assert get(site, GO, "/example.test/modern/@v/list")[0] == 403
    assert get(site, GO, "/example.test/mod/../modern/@v/list")[0] == 404
    assert (
        get(site, GO, "/!example.test/!mod/@v/v1.0.0.info")[0] == 404
    )  # allowed, and not there: the fake has it unescaped
    assert get(site, GO, "/Example.test/Mod/@v/v1.0.0.info")[0] == 404
    date(site, "2024-07-01", modules=("example.test",))
    assert get(site, GO, "/example.test/mod/@v/list")[1] == b"v1.0.0\nv1.1.0\n"
    assert json.loads(get(site, GO, "/example.test/mod/@latest")[1])["Version"] == "v1.1.0"
    assert get(site, GO, "/example.test/mod/@v/v2.0.0.zip")[0] == 404
    assert get(site, GO, "/sumdb/sum.test/lookup/example.test/mod@v1.0.0")[0] == 404


def test_a_plain_mirror_passes_on_and_only_reads(site: Site) -> None:
    name, content = wheel("tool", "1.0")
    assert get(site, PLAIN, f"/{name}") == (200, content)
    assert get(site, PLAIN, "/none")[0] == 404


def test_a_switch_of_the_date_cuts_connections_to_the_mirror(site: Site) -> None:
    with site.connect(GATEWAY[0], PYPI) as kept:
        kept.sendall(b"GET /simple/tool/ HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(12) == b"HTTP/1.1 200"
        date(site, "2024-07-01")  # the same
        kept.sendall(b"GET /simple/tool/ HTTP/1.1\r\nHost: x\r\n\r\n")
        while b"HTTP/1.1 200" not in kept.recv(1 << 16):
            pass
        date(site, "2024-02-01")
        site.policy(Policy())
        with pytest.raises(ConnectionResetError):
            while kept.recv(1 << 16):
                pass
            raise ConnectionResetError
    date(site, "2024-02-01")
    assert get(site, PYPI, "/simple/tool/")[1].count(b"<a ") == 1


def test_a_sandbox_without_the_service_gets_nothing(site: Site) -> None:
    site.policy(Policy())
    with pytest.raises(ConnectionResetError):
        get(site, PYPI, "/simple/tool/")


def test_a_file_that_the_index_lists_and_has_not_fails_at_once(site: Site, index: PackageIndex) -> None:
    """Of npm no size is known before the file comes."""
    index.add_package("gone", "1.0.0", "2024-01-01")
    del index.web.pages["/gone/-/gone-1.0.0.tgz"]
    assert get(site, NPM, "/gone/-/gone-1.0.0.tgz")[0] == 502


@pytest.mark.parametrize(
    "path", ["/../simple/tool/", "/%2e%2e/simple/tool/", "/x/%2E./../simple/tool/", "/..%2fsimple/tool/", "/..%5c..;a/simple/tool/", "/..;/x"]
)  # fmt: skip
def test_a_plain_mirror_leads_nowhere_but_below_its_url(site: Site, index: PackageIndex, path: str) -> None:
    assert get(site, PLAIN, path) == (404, b"a path that leads out of the mirror\n")
    assert index.web.requests == []


def test_no_list_sends_the_mirror_to_the_node_or_a_private_network(site: Site, index: PackageIndex) -> None:
    """Whoever publishes a package writes its list in part."""
    dns_server, metadata = site.internet.dns, site.internet.metadata
    dns_server.answer("inner.test", Record("A", "169.254.169.254"))
    dns_server.answer("hosts.test", Record("A", HOST[0]))
    dns_server.answer("private.test", Record("A", "10.0.0.1"))
    for number, host in enumerate(
        ("169.254.169.254", "[fd00:ec2::254]", "inner.test", "hosts.test", "private.test", HOST[0], "10.0.0.1")
    ):
        index.add_package(f"evil{number}", "1.0.0", "2024-01-01")
        package = json.loads(index.web.pages[f"/evil{number}"])
        package["versions"]["1.0.0"]["dist"]["tarball"] = f"http://{host}/evil{number}.tgz"
        index.web.pages[f"/evil{number}"] = json.dumps(package).encode()
        metadata.pages[f"/evil{number}.tgz"] = index.web.pages[f"/evil{number}/-/evil{number}-1.0.0.tgz"]
    metadata.forget()
    listener = site.internet.host.call(lambda: socket.create_server((HOST[0], 80)))
    with listener:
        for number in range(7):
            assert get(site, NPM, f"/evil{number}/-/evil{number}.tgz")[0] == 502
        listener.settimeout(0.05)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert metadata.requests == []
