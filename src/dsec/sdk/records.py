"""What the SDK answers beside the model's own views."""

from typing import Literal

import msgspec
from msgspec import Struct

from dsec.model.errors import DSecError

__all__ = ["HttpResponse", "Output", "Refusal", "SandboxFailed", "Transfer"]


class SandboxFailed(Struct, frozen=True, kw_only=True):
    """One sandbox of `run_containers` that could not be made: its place in the batch and why."""

    index: int
    error: DSecError


class Output(Struct, frozen=True, kw_only=True):
    """A piece of a process's output. `offset`: bytes of that stream before it. `lost`: bytes that came before this piece
    and after the one before, and that the sandbox no longer keeps; 0 where nothing is missing. A pty has stdout alone."""

    stream: Literal["stdout", "stderr"]
    data: bytes
    offset: int
    lost: int = 0


class HttpResponse(Struct, frozen=True, kw_only=True):
    """What a server inside the sandbox answered. Header names are in lower case; repeated headers are joined by ", "."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def text(self) -> str:
        """The body as UTF-8; what is not UTF-8 reads as U+FFFD."""
        return self.content.decode("utf-8", "replace")

    def json(self) -> object:
        """The body as JSON. Raises ValueError where it is not."""
        try:
            return msgspec.json.decode(self.content)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(str(error)) from error


class Refusal(Struct, frozen=True, kw_only=True):
    """An entry that a transfer left out, and why. `path` is as it was named: it may hold any character."""

    path: str
    reason: str


class Transfer(Struct, frozen=True, kw_only=True):
    """An upload or a download that ended: entries and bytes of file content moved, and what was refused by name."""

    entries: int
    size: int
    refused: tuple[Refusal, ...] = ()
