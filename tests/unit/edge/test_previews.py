"""Preview links: who has one gets in, to one port, for a while; what the page says does not reach the API's origin."""

from typing import Any

import pytest

from dsec.cluster.links import link_of
from dsec.testing.asgi import AsgiClient
from unit.edge.rig import Rig

PAGE = (
    b"HTTP/1.1 200 OK\r\nset-cookie: a=b; Path=/\r\nset-cookie: c=d; Domain=example.test\r\nservice-worker-allowed: /\r\n"
    b"clear-site-data: *\r\ncontent-length: 2\r\nx-mine: 1\r\n\r\nhi"
)


async def opened(rig: Rig, seconds: float = 60.0) -> tuple[Any, dict[str, Any], list[bytes]]:
    box = await rig.create()
    heard: list[bytes] = []

    def answer(data: bytes) -> bytes:
        heard.append(data)
        return PAGE if data.endswith(b"\r\n\r\n") else b""

    rig.agent(box).listeners[8000] = answer
    made = await rig.call(box, "POST", "/previews", json={"port": 8000, "seconds": seconds})
    assert made.status == 201, made.json()
    return box, made.json(), heard


async def test_a_link_needs_no_key_and_carries_none(rig: Rig) -> None:
    box, link, heard = await opened(rig)
    visitor = AsgiClient(rig.node.api)
    headers = {"Authorization": "Bearer secret", "Cookie": "ours=1", "X-Theirs": "2"}
    answer = await visitor.request("GET", f"/p/{link['id']}/some/page", headers=headers, q="1")
    assert (answer.status, answer.body) == (200, b"hi")
    assert heard[-1].startswith(b"GET /some/page?q=1 HTTP/1.1\r\n") and b"x-theirs: 2" in heard[-1].lower()
    assert b"secret" not in heard[-1] and b"ours" not in heard[-1]
    assert (
        answer.headers["content-security-policy"].startswith("sandbox ")
        and "allow-same-origin" not in answer.headers["content-security-policy"]
    )
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["x-mine"] == "1"
    assert not {"set-cookie", "clear-site-data", "service-worker-allowed"} & set(answer.headers)
    worker = await visitor.request("GET", f"/p/{link['id']}/sw.js", headers={"Service-Worker": "script"})
    assert worker.status == 404
    assert (await rig.call(box, "GET", "/previews")).json() == [link]


async def test_a_link_ends(rig: Rig) -> None:
    box, link, _ = await opened(rig)
    visitor, path = AsgiClient(rig.node.api), f"/p/{link['id']}/"
    assert (await visitor.request("GET", path)).status == 200
    assert (await rig.call(box, "DELETE", f"/previews/{link['id']}")).status == 204
    assert (await visitor.request("GET", path)).status == 404
    _, short, _ = await opened(rig, seconds=5.0)
    await rig.advance(6.0)
    assert (await visitor.request("GET", f"/p/{short['id']}/")).status == 404
    other, last, _ = await opened(rig)
    await rig.call(other, "DELETE")
    assert (await visitor.request("GET", f"/p/{last['id']}/")).status == 404


@pytest.mark.parametrize("wrong", ["p" + "a" * 31, "x", "s" + "a" * 31])
async def test_forged_links_are_none(rig: Rig, wrong: str) -> None:
    await opened(rig)
    assert (await AsgiClient(rig.node.api).request("GET", f"/p/{wrong}/")).status == 404


async def test_a_link_is_asked_at_a_bounded_rate(rig: Rig) -> None:
    _, link, _ = await opened(rig)
    visitor = AsgiClient(rig.node.api)
    answers = [(await visitor.request("GET", f"/p/{link['id']}/")).status for _ in range(210)]
    assert answers.count(200) == 200 and answers[-1] == 503
    await rig.advance(1.0)
    assert (await visitor.request("GET", f"/p/{link['id']}/")).status == 200


@pytest.mark.parametrize(
    "asked", [{"port": 0}, {"port": 70000}, {"port": 80, "seconds": 0}, {"port": 80, "seconds": 1e9}]
)
async def test_impossible_links(rig: Rig, asked: dict[str, Any]) -> None:
    box = await rig.create()
    assert (await rig.call(box, "POST", "/previews", json=asked)).status == 400


async def test_the_links_own_host_has_an_origin_of_its_own(rig: Rig) -> None:
    _, link, heard = await opened(rig)
    scope: dict[str, Any] = {
        "path": "/x",
        "raw_path": b"/x",
        "headers": [(b"host", f"8000-{link['id']}.box.example.test:443".encode())],
    }
    assert link_of(scope, "box.example.test") == link["id"]
    assert scope["path"] == f"/p/{link['id']}/x" and scope["dsec.preview_host"] is True
    answer = await AsgiClient(rig.node.api).request("GET", scope["path"], headers={"Cookie": "theirs=1"})
    assert "content-security-policy" in answer.headers, "by path it is shut in"
    for host, found in (("api.box.example.test", "p" + "a" * 31), ("example.test", None), ("box.example.test", None)):
        plain: dict[str, Any] = {"path": "/v1/me", "raw_path": b"/v1/me", "headers": [(b"host", host.encode())]}
        assert link_of(plain, "box.example.test") == found, "on a name below the domain nothing of the API is served"
    assert heard
