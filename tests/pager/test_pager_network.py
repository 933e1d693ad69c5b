"""Stores over a network: an S3 server and a registry as they are, and a registry of our own that is slow, asks who is there, or
knows no ranges."""

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pager.place import Made, Pager, Reader
from storeservers import BUCKET, registry_server, s3_server

pytestmark = pytest.mark.root

REPOSITORY = "team/layers"
TOKEN = "a-token-of-the-test"


def _send(url: str, method: str, data: bytes = b"") -> str:
    request = urllib.request.Request(url, data=data, method=method)
    request.add_header("Content-Type", "application/octet-stream")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.headers.get("Location", ""))


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry_server(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture
def bucket(made: Made, endpoint: str, tmp_path: Path) -> dict[str, object]:
    prefix = f"some/{tmp_path.name}"  # the server lets nobody without a signature write an object again
    for pack in made.packs():
        _send(f"{endpoint}/{BUCKET}/{prefix}/v2/packs/{pack.name}", "PUT", pack.read_bytes())
    keys = {"access_key": "test", "secret_key": "test", "region": "us-east-1"}
    return {"url": f"s3://{BUCKET}/{prefix}", "endpoint": endpoint, "allow_http": True, **keys}


@pytest.fixture
def registry(made: Made, host: str) -> dict[str, object]:
    for pack in made.packs():
        place = _send(f"http://{host}/v2/{REPOSITORY}/blobs/uploads/", "POST")
        _send(f"{place}&digest=sha256:{pack.name}", "PUT", pack.read_bytes())
    return {"url": f"oci://{host}/{REPOSITORY}"}


def _reads_all(pager: Pager, made: Made, store: dict[str, object]) -> None:
    target = pager.mount(made, store=store)
    for name, content in made.files.items():
        assert (target / name).read_bytes() == content, name
    stats = pager.stats(made)
    assert stats["errors"] == stats["store_errors"] == stats["wrong_bytes"] == 0
    assert 0 < stats["bytes_fetched"] < stats["bytes_filled"]


def test_packs_are_read_from_a_bucket(pager: Pager, made: Made, bucket: dict[str, object]) -> None:
    _reads_all(pager, made, bucket)


def test_packs_are_read_from_a_registry(pager: Pager, made: Made, registry: dict[str, object]) -> None:
    _reads_all(pager, made, registry)


def test_a_bucket_without_the_pack_is_an_error(pager: Pager, made: Made, bucket: dict[str, object]) -> None:
    wrong = {**bucket, "url": f"s3://{BUCKET}/elsewhere"}
    target = pager.mount(made, store=wrong, limits={"wait_seconds": 2.0})
    assert isinstance(Reader(target / "small1").result(), OSError)
    pager.ask("store", layer=made.hex, store=bucket)
    assert (target / "small1").read_bytes() == made.files["small1"]


class Manners:
    """How our registry behaves, and what it saw."""

    def __init__(self, made: Made) -> None:
        self.packs = {pack.name: pack.read_bytes() for pack in made.packs()}
        self.seconds = 0.0
        self.asks_who = False
        self.knows_ranges = True
        self.breaks = 0
        self.asked: list[str] = []


@contextmanager
def _our_registry(manners: Manners) -> Iterator[str]:
    class Blobs(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            manners.asked.append(self.path)

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            time.sleep(manners.seconds)
            host = self.headers["Host"]
            if self.path.startswith("/token?"):
                assert f"scope=repository%3A{REPOSITORY.replace('/', '%2F')}%3Apull" in self.path
                self._answer(200, json.dumps({"token": TOKEN}).encode(), {})
            elif manners.asks_who and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                challenge = f'Bearer realm="http://{host}/token",service="ours"'
                self._answer(401, b"", {"WWW-Authenticate": challenge})
            elif manners.breaks > 0:
                manners.breaks -= 1
                self._answer(503, b"", {})
            else:
                self._blob()

        def _blob(self) -> None:
            pack = manners.packs[self.path.rsplit("sha256:", 1)[1]]
            if not manners.knows_ranges:
                self._answer(200, pack, {})
                return
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            self._answer(206, pack[int(first) : int(last) + 1], {})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Blobs)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"oci://127.0.0.1:{server.server_port}/{REPOSITORY}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_registry_that_asks_who_is_there_is_told_once(pager: Pager, made: Made) -> None:
    manners = Manners(made)
    manners.asks_who = True
    with _our_registry(manners) as url:
        _reads_all(pager, made, {"url": url, "username": "me", "password": "secret"})
        assert sum(path.startswith("/token?") for path in manners.asked) <= 4
        pager.retire()


def test_a_registry_without_ranges_is_read_all_the_same(pager: Pager, made: Made) -> None:
    manners = Manners(made)
    manners.knows_ranges = False
    with _our_registry(manners) as url:
        _reads_all(pager, made, {"url": url})
        pager.retire()


def test_a_store_that_stumbles_is_asked_again(pager: Pager, made: Made) -> None:
    manners = Manners(made)
    manners.breaks = 3
    with _our_registry(manners) as url:
        target = pager.mount(made, store={"url": url})
        assert (target / "odd").read_bytes() == made.files["odd"]
        stats = pager.stats(made)
        assert stats["store_errors"] == 3
        assert stats["errors"] == 0
        pager.retire()


def test_a_far_store_is_read_ahead_of_a_stream_and_a_near_one_is_not(pager: Pager, made: Made, store: Path) -> None:
    manners = Manners(made)
    manners.seconds = 0.03
    target = pager.mount(made)
    assert (target / "large").read_bytes() == made.files["large"]
    near = pager.stats(made)
    assert near["ideal_request"] == 0
    assert near["chunks_filled"] == len(made.chunks_of("large"))
    pager.retire()
    with _our_registry(manners) as url:
        pager.again()
        target = pager.mount(made, store={"url": url})
        assert (target / "large").read_bytes() == made.files["large"]
        far = pager.stats(made)
        assert far["ideal_request"] >= 64 * 1024
        assert far["fetches"] < near["fetches"]
        assert far["chunks_filled"] <= len(made.lengths)
        pager.retire()
