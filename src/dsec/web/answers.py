"""What a handler may return besides a record: bytes, a stream of bytes, or a stream of records as JSON lines."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from msgspec import Struct

from dsec.web.routes import NDJSON, OCTETS

__all__ = ["Bytes", "Headers", "Stream", "lines"]

Headers = tuple[tuple[bytes, bytes], ...]

_encoder = msgspec.json.Encoder()


class Bytes(Struct, frozen=True, kw_only=True):
    """A whole answer. `media` "" sends no content-type."""

    body: bytes = b""
    status: int = 200
    media: str = OCTETS
    headers: Headers = ()


class Stream(Struct, frozen=True, kw_only=True):
    """An answer in pieces. `chunks` is closed when the client goes; an error in it after the first piece cuts the
    connection, so that a client never takes a part for the whole."""

    chunks: AsyncIterator[bytes]
    status: int = 200
    media: str = OCTETS
    headers: Headers = ()


async def _encoded(items: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    async for item in items:
        yield _encoder.encode(item) + b"\n"


def lines(items: AsyncIterator[Any]) -> Stream:
    """Records as JSON lines, each sent as it comes."""
    return Stream(chunks=_encoded(items), media=NDJSON)
