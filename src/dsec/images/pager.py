"""The control protocol of a node's pager, as its client. One request a connection: a pager that was started anew is found again by itself.

A frame is a u32 (little endian) and that many bytes of msgpack, a map: `{"op", "id", ...}`, answered by `{"id", "ok"}` or `{"id", "error"}`.
"""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from dsec.model.errors import (
    Conflict,
    DeadlineExceeded,
    DSecError,
    ImageUnavailable,
    NotFound,
    RuntimeFailure,
    Unavailable,
    Unsupported,
)
from dsec.model.loading import ChunkRange, LayerReads, Mechanism
from dsec.model.stores import StoreOptions

__all__ = ["Attached", "Hello", "Pager"]

_ANSWER_BYTES = 64 << 20
_REQUEST_BYTES = 32 << 20
_SECONDS = 10.0
_TRIES, _PAUSE = 5, 0.1
_ALL = (0, 2**32 - 1)
_KINDS: dict[str, type[DSecError]] = {
    "unknown_layer": NotFound, "bad_layer": ImageUnavailable, "bad_store": ImageUnavailable, "busy": Conflict,
    "unsupported": Unsupported, "local": Unavailable,
}  # fmt: skip
_T = TypeVar("_T")


class Hello(Struct, frozen=True):
    """What a pager says of itself: `pid` of its worker, `restarts` of that, and the `mechanisms` that its kernel let it open."""

    version: int
    pid: int = 0
    restarts: int = 0
    mechanisms: tuple[str, ...] = ()


class Attached(Struct, frozen=True):
    """`data_path`: the file to mount. `whole`: all of the layer is here, and nothing of it is served."""

    data_path: str
    whole: bool


class _Problem(Struct, frozen=True):
    code: str
    detail: str = ""


class _Answer(Struct, frozen=True):
    id: int
    ok: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: _Problem | None = None


class _Stats(Struct, frozen=True):
    layers: dict[str, LayerReads]


class _Trace(Struct, frozen=True):
    chunks: tuple[int, ...]


class _Evicted(Struct, frozen=True):
    bytes: int


class Pager:
    """The pager that listens at `socket`. `seconds`: how long an answer may take, where a method says nothing else.

    Every method raises Unavailable where no pager answers, DeadlineExceeded, and what the pager refuses as an error of its code.
    """

    def __init__(self, socket: Path, seconds: float = _SECONDS) -> None:
        self._socket = socket
        self._seconds = seconds
        self._numbers = itertools.count(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._answers = msgspec.msgpack.Decoder(_Answer)

    async def hello(self) -> Hello:
        """Who is there."""
        return await self._ask(Hello, "hello", version=1)

    async def attach(
        self, layer: str, directory: Path, store: StoreOptions, mechanism: Mechanism, wait_seconds: float
    ) -> Attached:
        """Serves the layer (64 hex digits) whose files are in the absolute `directory`; one that is attached stays so. Reads wait `wait_seconds` for the
        store at most."""
        return await self._ask(
            Attached, "attach", layer=layer, directory=str(directory), store=_wire(store), mechanism=str(mechanism),
            limits={"wait_seconds": wait_seconds},
        )  # fmt: skip

    async def detach(self, layer: str) -> None:
        """Ends serving a layer; one that is not attached is well. Raises Conflict where it is still mounted somewhere."""
        try:
            await self._ask(None, "detach", layer=layer)
        except NotFound:
            return

    async def stats(self, layer: str | None = None) -> list[LayerReads]:
        """What was counted of one layer, or of all that are attached. Raises NotFound for one that is not."""
        found = await self._ask(_Stats, "stats", layer=layer)
        return [replace(reads, layer=name) for name, reads in found.layers.items()]

    async def prefetch(self, layer: str, ranges: Sequence[ChunkRange]) -> None:
        """Begins to fetch `ranges` in their order; what a reader waits for goes before them."""
        await self._ask(None, "prefetch", layer=layer, chunks=ranges)

    async def fill(self, layer: str) -> None:
        """Begins to fetch all of the layer in the background."""
        await self._ask(None, "fill", layer=layer)

    async def trace(self, layer: str, on: bool) -> tuple[int, ...]:
        """Chunks in the order of their first touch since the trace was turned on, and turns it on or off."""
        return (await self._ask(_Trace, "trace", layer=layer, on=on)).chunks

    async def evict(self, layer: str, *, quiet_seconds: float) -> int:
        """Takes the layer's chunks off the disk, where it is mounted but for those asked for within `quiet_seconds`; the next read fetches
        them again. The
        bytes that came free. Raises Conflict where the kernel would not ask for them, as it was whole when it was mounted."""
        answer = await self._ask(
            _Evicted, "evict", seconds=120.0, layer=layer, ranges=[_ALL], mounted=True, quiet_seconds=quiet_seconds
        )
        return answer.bytes

    async def stop(self, *, force: bool = False) -> None:
        """Ends the pager; refused as Conflict while layers are attached, but for `force`."""
        await self._ask(None, "stop", force=force)

    async def _ask(self, kind: type[_T] | None, op: str, *, seconds: float | None = None, **fields: Any) -> _T:
        number = next(self._numbers)
        asked = self._encoder.encode({"op": op, "id": number, **fields})
        if len(asked) > _REQUEST_BYTES:
            raise RuntimeFailure(f"a request of {len(asked)} bytes to the pager: {op}")
        try:
            async with asyncio.timeout(self._seconds if seconds is None else seconds):
                answer = await self._exchanged(asked, op)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the pager did not answer {op} in time", op=op) from error
        if answer.id != number:
            raise RuntimeFailure(f"the pager answered {answer.id} to request {number}: {op}")
        if answer.error is not None:
            raise _error(answer.error)
        if kind is None:
            return None  # type: ignore[return-value]
        try:
            return msgspec.msgpack.decode(answer.ok, type=kind)
        except msgspec.DecodeError as error:
            raise RuntimeFailure(f"the pager answered {op} with something else: {error}") from error

    async def _exchanged(self, asked: bytes, op: str) -> _Answer:
        """One request, sent again where the pager ended meanwhile: each may be repeated, and another takes its place at once."""
        for tries_left in reversed(range(_TRIES)):
            try:
                return await self._exchange(asked)
            except (OSError, asyncio.IncompleteReadError) as error:
                if not tries_left or isinstance(error, FileNotFoundError):
                    raise Unavailable(f"no pager answers at {self._socket}: {op}: {error}") from error
            except msgspec.DecodeError as error:
                raise RuntimeFailure(f"the pager does not speak as it should: {op}: {error}") from error
            await asyncio.sleep(_PAUSE)  # nothing tells when its successor listens
        raise AssertionError("unreachable")

    async def _exchange(self, asked: bytes) -> _Answer:
        reader, writer = await asyncio.open_unix_connection(str(self._socket))
        try:
            writer.write(len(asked).to_bytes(4, "little") + asked)
            await writer.drain()
            size = int.from_bytes(await reader.readexactly(4), "little")
            if size > _ANSWER_BYTES:
                raise msgspec.DecodeError(f"an answer of {size} bytes")
            return self._answers.decode(await reader.readexactly(size))
        finally:
            writer.close()


def _error(problem: _Problem) -> DSecError:
    kind = _KINDS.get(problem.code, RuntimeFailure)
    return kind(f"the pager: {problem.code}: {problem.detail}")


def _wire(store: StoreOptions) -> dict[str, object]:
    """A store's options as the pager takes them: what is not set is left out, and what it has no use for."""
    return {name: value for name, value in asdict(store).items() if value and name != "keys"}
