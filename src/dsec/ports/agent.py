"""How an edge speaks to the aether of one sandbox: a connection an operation (docs/protocol.md)."""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol, Self

from dsec.model.aether import Reply, Request

__all__ = ["Agent", "Channel", "Frame"]

Frame = tuple[int, bytes] | Reply


class Channel(Protocol):
    """One operation under way. Leaving the context closes the connection, which cancels an operation that is not kept.

    `receive` gives the next reply, or (FRAME_STDOUT | FRAME_STDERR, bytes); it raises SandboxLost when aether is gone and
    RuntimeFailure when aether breaks the protocol. `send` waits while the other side is slow (back-pressure). `answered`: a
    frame waits to be received, which during an upload is a refusal, and the rest of it need not be sent.
    """

    @property
    def answered(self) -> bool: ...

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    async def send(self, data: bytes) -> None: ...
    async def end_of_input(self) -> None: ...
    async def receive(self) -> Frame: ...
    def frames(self) -> AsyncIterator[Frame]: ...


class Agent(Protocol):
    """The aether of one sandbox. `begin` connects and sends the request; `call` is begin, one reply, close.

    A `failed` reply is raised as the error it names.
    """

    async def begin(self, request: Request) -> Channel: ...
    async def call(self, request: Request) -> Reply: ...
