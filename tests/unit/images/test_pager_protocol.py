"""The client of the pager's control protocol: frames, ids, errors by their codes, bounds, and a pager that is started anew."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.images.pager import Pager
from dsec.model.errors import (
    Conflict,
    DeadlineExceeded,
    DSecError,
    ImageUnavailable,
    RuntimeFailure,
    Unavailable,
    Unsupported,
)
from dsec.model.loading import Mechanism
from dsec.model.stores import StoreOptions

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def frame(value: object) -> bytes:
    raw = msgspec.msgpack.encode(value)
    return len(raw).to_bytes(4, "little") + raw


@asynccontextmanager
async def listening(place: Path, answer: Answer) -> AsyncIterator[list[dict[str, Any]]]:
    asked: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(4), "little")
        asked.append(msgspec.msgpack.decode(await reader.readexactly(size)))
        await answer(asked[-1], writer)
        writer.close()

    server = await asyncio.start_unix_server(serve, place)
    async with server:
        yield asked


def saying(make: Callable[[dict[str, Any]], object]) -> Answer:
    async def answer(asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(frame(make(asked)))
        await writer.drain()

    return answer


async def test_a_request_and_its_answer(tmp_path: Path) -> None:
    place = tmp_path / "p"
    store = StoreOptions(url="s3://b/p", secret_key="x", keys=("ed25519:a",), allow_http=True)
    said = saying(lambda asked: {"id": asked["id"], "ok": {"data_path": "/d", "whole": False, "later": 1}})
    async with listening(place, said) as asked:
        found = await Pager(place).attach("ab", tmp_path, store, Mechanism.FUSE, 2.5)
    assert (found.data_path, found.whole) == ("/d", False)
    assert asked[0]["op"] == "attach" and asked[0]["layer"] == "ab" and asked[0]["mechanism"] == "fuse"
    assert asked[0]["store"] == {"url": "s3://b/p", "secret_key": "x", "allow_http": True}
    assert asked[0]["limits"] == {"wait_seconds": 2.5}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("busy", Conflict),
        ("bad_layer", ImageUnavailable),
        ("unsupported", Unsupported),
        ("local", Unavailable),
        ("odd", RuntimeFailure),
    ],
)
async def test_a_refusal_is_the_error_of_its_code(tmp_path: Path, code: str, kind: type[DSecError]) -> None:
    said = saying(lambda asked: {"id": asked["id"], "error": {"code": code, "detail": "why"}})
    async with listening(tmp_path / "p", said):
        with pytest.raises(kind, match="why"):
            await Pager(tmp_path / "p").detach("ab")


@pytest.mark.parametrize(
    "raw",
    [
        frame({"id": 7, "ok": {}}),
        frame([1, 2]),
        frame({"id": 1, "ok": {"layers": "none"}}),
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
    ],
)
async def test_what_is_no_answer_is_said_to_be_none(tmp_path: Path, raw: bytes) -> None:
    async def answer(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()

    async with listening(tmp_path / "p", answer):
        with pytest.raises(RuntimeFailure):
            await Pager(tmp_path / "p").stats()


async def test_an_answer_that_does_not_come_is_waited_for_no_longer_than_was_said(tmp_path: Path) -> None:
    done = asyncio.Event()

    async def answer(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await done.wait()

    async with listening(tmp_path / "p", answer):
        with pytest.raises(DeadlineExceeded):
            await Pager(tmp_path / "p", seconds=0.05).hello()
        done.set()
        await asyncio.sleep(0)  # the server's end of it is closed


async def test_a_pager_that_ends_while_it_is_asked_is_asked_again(tmp_path: Path) -> None:
    ends = 2

    async def answer(asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal ends
        if ends:
            ends -= 1
            return
        await saying(lambda asked: {"id": asked["id"], "ok": {"version": 1}})(asked, writer)

    async with listening(tmp_path / "p", answer) as asked:
        assert (await Pager(tmp_path / "p").hello()).version == 1
    assert [each["op"] for each in asked] == ["hello"] * 3


async def test_what_was_counted(tmp_path: Path) -> None:
    numbers = {"bytes": 8192, "chunks": 2, "present": 1, "bytes_present": 4096, "errors": 3, "later": 1}
    said = saying(lambda asked: {"id": asked["id"], "ok": {"layers": {"ab": numbers}, "totals": {}}})
    async with listening(tmp_path / "p", said):
        (reads,) = await Pager(tmp_path / "p").stats()
    assert (reads.layer, reads.size, reads.share, reads.errors) == ("ab", 8192, 0.5, 3)


async def test_to_detach_what_is_not_attached_is_well(tmp_path: Path) -> None:
    said = saying(lambda asked: {"id": asked["id"], "error": {"code": "unknown_layer", "detail": "ab"}})
    async with listening(tmp_path / "p", said):
        await Pager(tmp_path / "p").detach("ab")


async def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        await Pager(tmp_path / "nothing").hello()
