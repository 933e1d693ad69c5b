"""Numbers, sizes and answers that would take the server down if it believed them."""

import pytest
from rig import Rig


@pytest.mark.parametrize(
    ("said", "status", "body"),
    [
        (b"HTTP/1.1 999 X\r\nContent-Length: 2\r\n\r\nhi", 503, None),
        (b"HTTP/1.1 204 No\r\nContent-Length: 5\r\n\r\nhello", 204, b""),
        (b"HTTP/1.1 304 No\r\nContent-Length: 5\r\n\r\n", 304, b""),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            200,
            b"hello",
        ),
        (b"HTTP/1.1 101 Up\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nzz", 503, None),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 3000 + b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi"),
    ],
)
async def test_an_answer_that_does_not_fit_is_not_passed_on(rig: Rig, said: bytes, status: int, body: object) -> None:
    view = await rig.create()
    rig.agent(view).listeners[80] = lambda data: said
    answer = await rig.call(view, "GET", "/http/80/")
    assert (answer.status, answer.whole) == (status, True)
    assert body is None or (answer.body == body and "content-length" not in answer.headers) or status == 200
    assert rig.node.lifecycle.find(view.id).busy == 0 and not rig.agent(view).channels


async def test_connect_is_refused(rig: Rig) -> None:
    """After a CONNECT the answer has no end of HTTP's: the server once waited for it without ever letting go."""
    view = await rig.create()
    rig.agent(view).listeners[80] = lambda data: b"HTTP/1.1 200 OK\r\n\r\nraw"
    answer = await rig.call(view, "CONNECT", "/http/80/")
    assert (answer.status, answer.json()["fields"]["field"]) == (400, "method")


@pytest.mark.parametrize("number", [str(1 << 63), str(1 << 64), "9" * 30, "-1"])
async def test_numbers_beyond_the_protocol_are_refused_by_name(rig: Rig, number: str) -> None:
    view = await rig.create()
    rig.agent(view).files["/f"] = b"x"
    for field in ("offset", "length"):
        answer = await rig.call(view, "GET", "/files", path="/f", **{field: number})
        assert (answer.status, answer.json()["fields"]["field"]) == (400, field)
    for field in ("cols", "rows"):
        size = {"cols": 80, "rows": 24, field: int(number)}
        for rest in ("/processes", "/exec"):
            answer = await rig.call(view, "POST", rest, json={"argv": ["true"], "pty": size})
            assert answer.status == 400, (rest, answer.body)


async def test_a_list_of_long_paths_is_bounded(rig: Rig) -> None:
    view = await rig.create()
    rig.agent(view).files |= {f"/d/{'n' * 100_000}{number}": b"" for number in range(200)}
    answer = await rig.call(view, "GET", "/files/list", path="/d", limit="1000")
    assert (answer.status, answer.json()["code"]) == (413, "too_large")
    assert (await rig.call(view, "GET", "/files/list", path="/d", limit="100")).status == 200


async def test_names_that_are_no_session_are_not_kept(rig: Rig) -> None:
    view = await rig.create()
    for number in range(20):
        answer = await rig.call(view, "POST", f"/sessions/none{number}/run", json={"command": "true"})
        assert answer.status == 404
    assert not rig.node.lifecycle.find(view.id).session_locks


async def test_a_body_nested_too_deeply_is_the_callers_fault(rig: Rig) -> None:
    """It was an incident in the log, with a traceback for each request, and an answer that said to try again."""
    view = await rig.create()
    for rest in ("/exec", "/processes", "/sessions"):
        answer = await rig.call(view, "POST", rest, body=b'{"env":' + b'{"a":' * 5000)
        assert (answer.status, answer.json()["code"]) == (400, "invalid_argument")
