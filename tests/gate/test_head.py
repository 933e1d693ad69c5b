"""Heads and bodies of HTTP/1.x: what is let through reads the same for another parser (h11); what two could read apart is refused."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.gate.body import BodyReader
from dsec.gate.head import LONGEST_HEAD, Head, HeadReader, parse_head, parse_status
from dsec.gate.refusal import Refused


def head(*lines: str, first: str = "GET / HTTP/1.1") -> bytes:
    return "\r\n".join([first, *lines]).encode("latin-1")


def refusal(data: bytes) -> str:
    with pytest.raises(Refused) as caught:
        parse_head(data)
    return caught.value.reason


def test_a_request_as_programs_send_it() -> None:
    request = parse_head(head("Host: A.test.:8080", "Accept: */*", first="GET /x?y HTTP/1.1"))
    assert (request.method, request.target, request.host, request.port, request.length) == (
        "GET",
        b"/x?y",
        "a.test",
        8080,
        0,
    )
    assert request.encode() == b"GET /x?y HTTP/1.1\r\nHost: A.test.:8080\r\nAccept: */*\r\n\r\n"


def test_an_absolute_target_names_the_same_host_and_goes_on_in_origin_form() -> None:
    assert parse_head(head("Host: a.test", first="GET http://A.TEST/x HTTP/1.1")).target == b"/x"
    assert parse_head(head("Host: a.test", first="GET HTTP://a.test?x HTTP/1.1")).target == b"/?x"
    assert refusal(head("Host: a.test", first="GET http://b.test/ HTTP/1.1")) == "bad_http"
    assert refusal(head("Host: a.test", first="GET http://a.test@b.test/ HTTP/1.1")) == "bad_http"
    assert refusal(head("Host: a.test", first="GET https://a.test/ HTTP/1.1")) == "bad_http"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (head(), "no_host"),
        (head("Host: a.test", "Host: a.test"), "no_host"),
        (head("Host: a.test", "host: b.test"), "no_host"),
        (head("Host : a.test"), "bad_http"),
        (head(" Host: a.test"), "bad_http"),
        (head("Host: a.test", " folded"), "bad_http"),
        (head("Host: a.test", "\tfolded: x"), "bad_http"),
        (head("X: y\nHost: b.test", "Host: a.test"), "bad_http"),
        (head("X: y\rHost: b.test", "Host: a.test"), "bad_http"),
        (head("X: \0", "Host: a.test"), "bad_http"),
        (head("no colon", "Host: a.test"), "bad_http"),
        (head("Host: a.test, b.test"), "bad_name"),
        (head("Host: a.test/b.test"), "bad_name"),
        (head("Host: "), "bad_name"),
        (head("Host: a.test:0"), "bad_name"),
        (head("Host: a.test:80:80"), "bad_name"),
        (head("Host: 203.0.113.7"), "address"),
        (head("Host: [2001:db8::1]"), "address"),
        (head("Host: 2130706433"), "address"),
        (head("Host: a.test", first="CONNECT a.test:443 HTTP/1.1"), "method"),
        (head("Host: a.test", first="TRACE / HTTP/1.1"), "method"),
        (head("Host: a.test", first="PRI * HTTP/2.0"), "bad_http"),
        (head("Host: a.test", first="GET / HTTP/0.9"), "bad_http"),
        (head("Host: a.test", first="GET /"), "bad_http"),
        (head("Host: a.test", first="GET  / HTTP/1.1"), "bad_http"),
        (head("Host: a.test", first="GET\t/ HTTP/1.1"), "bad_http"),
        (head("Host: a.test", first="get / HTTP/1.1"), "bad_http"),
        (head("Host: a.test", first="GET * HTTP/1.1"), "bad_http"),
        (head("Host: a.test", "Content-Length: 5", "Transfer-Encoding: chunked"), "bad_http"),
        (head("Host: a.test", "Content-Length: 5", "Content-Length: 5"), "bad_http"),
        (head("Host: a.test", "Content-Length: 5, 5"), "bad_http"),
        (head("Host: a.test", "Content-Length: +5"), "bad_http"),
        (head("Host: a.test", "Content-Length: 0x5"), "bad_http"),
        (head("Host: a.test", "Transfer-Encoding: gzip, chunked"), "bad_http"),
        (head("Host: a.test", "Transfer-Encoding: xchunked"), "bad_http"),
        (head("Host: a.test", "Transfer-Encoding: chunked", "Transfer-Encoding: identity"), "bad_http"),
        (head("Host: a.test", "Transfer-Encoding:\x0bchunked"), "bad_http"),
        (head("Host: a.test", "Transfer-Encoding: chunked", first="POST / HTTP/1.0"), "bad_http"),
        (head("Host: a.test", *["X: y"] * 200), "bad_http"),
        (head("Host: a.test", "Upgrade: websocket", "Connection: upgrade", "Content-Length: 3"), "bad_http"),
    ],
)
def test_forms_that_two_servers_could_read_apart_are_refused(data: bytes, reason: str) -> None:
    assert refusal(data) == reason


def test_only_websocket_is_an_upgrade_and_other_offers_are_taken_out() -> None:
    offered = head("Host: a.test", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMA")
    request = parse_head(offered)
    assert not request.upgrade
    assert request.encode() == b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"
    request = parse_head(head("Host: a.test", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"))
    assert request.upgrade
    assert b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" in request.encode()


def test_a_replaced_field_takes_the_place_of_the_clients() -> None:
    request = parse_head(head("Host: a.test", "authorization: mine", "Connection: authorization"))
    sent = request.encode(((b"Authorization", b"theirs"),))
    assert b"mine" not in sent
    assert sent.count(b"uthorization") == 1


def test_the_head_reader_finds_heads_however_they_are_cut() -> None:
    stream = b"\r\nGET / HTTP/1.1\r\nHost: a.test\r\n\r\nrest"
    reader = HeadReader()
    found = [piece for at in range(len(stream)) if (piece := reader.feed(stream[at : at + 1])) is not None]
    assert found == [b"GET / HTTP/1.1\r\nHost: a.test"]
    assert reader.rest() == b"rest"


def test_a_head_without_end_is_kept_within_its_bound() -> None:
    reader, sent = HeadReader(), 0
    with pytest.raises(Refused):
        while sent < 2 * LONGEST_HEAD:
            assert reader.feed(b"x" * 1000) is None
            sent += 1000
    assert sent <= LONGEST_HEAD


def test_statuses() -> None:
    assert parse_status(b"HTTP/1.1 101 Switching Protocols\r\nX: y") == 101
    assert parse_status(b"HTTP/1.0 200") == 200
    for wrong in (b"HTTP/2 200", b"HTTP/1.1 2000 x", b"SSH-2.0", b"HTTP/1.1  200"):
        with pytest.raises(Refused):
            parse_status(wrong)


TOKEN = st.text("abcxyzHOST-connection", min_size=1, max_size=12)
LINES = st.lists(
    st.one_of(
        st.just("Host: a.test"),
        st.just("Host: b.test"),
        st.just("Transfer-Encoding: chunked"),
        st.integers(0, 99).map(lambda n: f"Content-Length: {n}"),
        st.tuples(
            TOKEN, st.sampled_from([": ", ":", " :", ":\t"]), st.text(st.characters(max_codepoint=255), max_size=20)
        ).map("".join),
        st.text(st.characters(max_codepoint=255), max_size=20),
    ),
    max_size=6,
)


@given(LINES, st.sampled_from(["GET / HTTP/1.1", "POST /x HTTP/1.1", "GET http://a.test/ HTTP/1.1", "GET / HTTP/1.0"]))
def test_what_is_let_through_reads_the_same_for_another_parser(lines: list[str], first: str) -> None:
    try:
        request = parse_head(head(*lines, first=first))
    except Refused:
        return
    server = h11.Connection(h11.SERVER)
    server.receive_data(request.encode())
    event = server.next_event()
    assert isinstance(event, h11.Request)
    fields = dict(event.headers)
    assert fields[b"host"].lower() == request.host.encode()
    assert event.target == request.target
    assert (b"transfer-encoding" in fields) == (request.length is None)
    assert int(fields.get(b"content-length", b"0")) == (request.length or 0)
    assert sum(name == b"host" for name, _ in event.headers) == 1


@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    try:
        assert isinstance(parse_head(data), Head)
    except Refused as refused:
        assert refused.reason


def chunked(pieces: list[bytes], trailer: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces if p) + b"0\r\n" + trailer + b"\r\n"


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(1, 50), st.sampled_from([b"", b"X-Sum: 1\r\n"]))
def test_a_chunked_body_ends_where_it_ends(pieces: list[bytes], step: int, trailer: bytes) -> None:
    body = chunked(pieces, trailer)
    stream, reader, taken = body + b"GET / HTTP/1.1", BodyReader(None), 0
    while not reader.done:
        taken += reader.feed(stream[taken : taken + step])
    assert taken == len(body)


@given(st.integers(0, 100), st.integers(1, 50))
def test_a_counted_body_ends_where_it_ends(length: int, step: int) -> None:
    stream, reader, taken = bytes(200), BodyReader(length), 0
    while not reader.done:
        taken += reader.feed(stream[taken : taken + step])
    assert taken == length


@pytest.mark.parametrize(
    "body",
    [b"5\nhello\r\n", b"5;x=y\r\n", b"-5\r\n", b"0x5\r\n", b" 5\r\n", b"5 \r\n", b"5\r\nhelloX\r\n", b"1" * 17 + b"\r\n", b"0\r\n X\r\n", b"x" * 9000,
     b"0\r\n" + b"A: b\r\n" * 2000],
)  # fmt: skip
def test_chunks_that_two_servers_could_read_apart_are_refused(body: bytes) -> None:
    with pytest.raises(Refused):
        BodyReader(None).feed(body)


@given(st.binary(max_size=100))
def test_garbage_in_chunks_is_refused_or_waited_for(data: bytes) -> None:
    reader = BodyReader(None)
    try:
        assert 0 <= reader.feed(data) <= len(data)
    except Refused:
        assert not reader.done
