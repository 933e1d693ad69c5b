"""What all four backends share. Values cross it, never implementations."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from dsec.model.plan import Capabilities, Handle, Life, Plan, Usage
from dsec.ports.agent import Agent

__all__ = ["Backend", "BackendFailure", "Started", "TellKills"]

from msgspec import Struct

from dsec.model.outcome import End
from dsec.model.plan import Aftermath

TellKills = Callable[[int, float], None]
"""Told the out-of-memory kills in a sandbox since its start, and when the last ones came (monotonic seconds)."""


class Started(Struct, frozen=True):
    """A started sandbox: seconds of each phase of the start, in order."""

    phases: dict[str, float]


class BackendFailure(Exception):
    """A backend could not do it. `aftermath` says what is left; `end` is the class of the sandbox's end."""

    def __init__(self, detail: str, *, aftermath: Aftermath, end: End) -> None:
        super().__init__(detail)
        self.detail = detail
        self.aftermath = aftermath
        self.end = end


class Backend(Protocol):
    """One kind of sandbox on one node.

    `reserve` names everything that `start` will make, and makes nothing but that claim: its Handle is journalled before
    `start`, so that the undo is owed before anything exists. `stop` takes a handle in any state, any number of times, and
    leaves nothing. `adopt` asks the kernel, not memory, after the edge was away. `agent` speaks to the sandbox's aether.
    `slot` is the host-wide number by which the node's network knows the sandbox, None where it has none.
    `wait_end` returns when the sandbox has died by itself, and says how. `tell_kills`: from now on, and at the end before `stop` is
    done. `changes` holds, while its context is open, a directory with all that the sandbox has written, as of one moment and no longer
    changing; the sandbox runs on. All raise BackendFailure only.
    """

    @property
    def offers(self) -> Capabilities: ...
    async def open(self) -> None: ...
    async def close(self) -> None: ...
    def reserve(self, plan: Plan) -> Handle: ...
    def slot(self, handle: Handle) -> int | None: ...
    async def start(self, plan: Plan, handle: Handle) -> Started: ...
    async def adopt(self, handle: Handle) -> Life: ...
    def agent(self, handle: Handle) -> Agent: ...
    async def wait_end(self, handle: Handle) -> tuple[End, str]: ...
    def tell_kills(self, handle: Handle, tell: TellKills) -> None: ...
    async def stop(self, handle: Handle) -> None: ...
    async def usage(self, handle: Handle) -> Usage: ...
    def changes(self, handle: Handle) -> AbstractAsyncContextManager[str]: ...
