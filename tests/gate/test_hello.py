"""The ClientHello reader: real ones of OpenSSL however they are cut, made ones for every refusal, and garbage."""

import ssl

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsec.gate.hello import LONGEST_HELLO, HelloReader
from dsec.gate.refusal import Refused


def openssl_hello(name: str | None) -> bytes:
    """What OpenSSL sends first to `name`."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    out = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


def vector(size: int, data: bytes) -> bytes:
    return len(data).to_bytes(size, "big") + data


def server_name(*names: bytes) -> tuple[int, bytes]:
    return 0, vector(2, b"".join(b"\0" + vector(2, name) for name in names))


def hello(*extensions: tuple[int, bytes], tail: bytes = b"") -> bytes:
    listed = b"".join(kind.to_bytes(2, "big") + vector(2, content) for kind, content in extensions)
    body = b"\x03\x03" + bytes(32) + vector(1, b"") + vector(2, b"\x13\x01") + vector(1, b"\0")
    return b"\x01" + vector(3, body + vector(2, listed) + tail)


def records(message: bytes, size: int = 1 << 14) -> bytes:
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + vector(2, piece) for piece in pieces)


def read(data: bytes, step: int = 1 << 20) -> str | None:
    reader = HelloReader()
    for at in range(0, len(data), step):
        if (name := reader.feed(data[at : at + step])) is not None:
            return name
    return None


def refusal(data: bytes) -> str:
    with pytest.raises(Refused) as caught:
        read(data)
    return caught.value.reason


REAL = openssl_hello("a.test")


@given(st.integers(1, 600), st.integers(1, 600))
def test_any_cut_into_records_and_segments_reads_the_same(record: int, segment: int) -> None:
    assert read(records(REAL[5:], record), segment) == "a.test"


def test_a_part_of_a_hello_is_no_answer_yet() -> None:
    reader = HelloReader()
    for at in range(len(REAL) - 1):
        assert reader.feed(REAL[at : at + 1]) is None
    assert reader.feed(REAL[-1:]) == "a.test"


def test_names_are_compared_in_one_form() -> None:
    assert read(records(hello(server_name(b"A.TEST")))) == "a.test"
    assert read(records(hello(server_name(b"a.test.")))) == "a.test"
    assert read(openssl_hello("b\xfccher.test")) == "xn--bcher-kva.test"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (openssl_hello(None), "no_sni"),
        (records(hello((0xFE0D, b"\0\0\1"), server_name(b"a.test"))), "ech"),
        (records(hello((0xFFCE, b""), server_name(b"a.test"))), "ech"),
        (records(hello(server_name(b"a.test", b"b.test"))), "not_tls"),
        (records(hello(server_name(b"a.test"), server_name(b"b.test"))), "not_tls"),
        (records(hello((0, vector(2, b"\1" + vector(2, b"a.test"))))), "not_tls"),
        (records(hello((0, b""))), "not_tls"),
        (records(hello(server_name(b""))), "bad_name"),
        (records(hello(server_name(b"a.test\0.b.test"))), "bad_name"),
        (records(hello(server_name(b"a.test b.test"))), "bad_name"),
        (records(hello(server_name("\u0430.test".encode()))), "bad_name"),
        (records(hello(server_name(b"203.0.113.7"))), "address"),
        (records(hello(server_name(b"0x7f000001"))), "address"),
        (records(hello(server_name(b"a" * 64 + b".test"))), "bad_name"),
        (records(hello(server_name(b".".join([b"a" * 60] * 5)))), "bad_name"),
        (records(hello(server_name(b"a.test"), tail=b"x")), "not_tls"),
        (records(hello(server_name(b"a.test")) + b"\x01"), "not_tls"),
        (records(b"\x02" + vector(3, bytes(40))), "not_tls"),
        (records(b"\x01" + (LONGEST_HELLO + 1).to_bytes(3, "big")), "not_tls"),
        (b"\x16\x03\x01\0\0" + records(hello(server_name(b"a.test"))), "not_tls"),
        (b"\x16\x03\x01\x40\x01", "not_tls"),
        (b"\x16\x02", "not_tls"),
        (b"\x80\x2e\x01\x03\x01", "not_tls"),
        (b"SSH-2.0-x\r\n", "not_tls"),
    ],
)
def test_what_cannot_be_checked_is_refused(data: bytes, reason: str) -> None:
    assert refusal(data) == reason


def test_reserved_extensions_are_passed_over() -> None:
    assert read(records(hello((0x0A0A, b""), server_name(b"a.test"), (0xFAFA, b"\0")))) == "a.test"


def test_a_message_that_never_ends_is_kept_within_its_bound() -> None:
    reader, sent = HelloReader(), 0
    message = b"\x01" + LONGEST_HELLO.to_bytes(3, "big") + bytes(LONGEST_HELLO * 2)
    with pytest.raises(Refused):
        for at in range(0, len(message), 1000):
            reader.feed(records(message[at : at + 1000]))
            sent = at
    assert sent <= LONGEST_HELLO + 1000


@given(st.binary(max_size=400))
def test_garbage_is_refused_or_waited_for(data: bytes) -> None:
    try:
        assert read(data, 7) is None
    except Refused as refused:
        assert refused.reason


@given(st.integers(0, len(REAL) - 1), st.integers(0, 255))
@example(REAL.index(b"a.test"), 0x2E)
def test_a_changed_byte_never_gives_another_way_of_failing(at: int, value: int) -> None:
    changed = REAL[:at] + bytes([value]) + REAL[at + 1 :]
    try:
        name = read(changed)
    except Refused:
        return
    assert name is None or name.encode() in changed.lower()
