"""What a container's handle says, and what a refusal of the kernel means for a sandbox."""

from errno import EAGAIN, EDQUOT, EMFILE, ENFILE, ENOMEM, ENOSPC, EUSERS

import msgspec

from dsec.kernel.errors import KernelError
from dsec.model.outcome import End
from dsec.model.plan import Aftermath, Handle
from dsec.ports.backend import BackendFailure

__all__ = ["HANDLE_VERSION", "CellState", "encode", "failure_of", "opened"]

HANDLE_VERSION = 1
_FULL = frozenset({EAGAIN, EDQUOT, EMFILE, ENFILE, ENOMEM, ENOSPC, EUSERS})
_IMAGE_OPS = frozenset({"fsconfig", "open_tree", "mount_setattr", "move_mount", "openat"})


class CellState(msgspec.Struct, frozen=True, array_like=True):
    """What a handle says. Every other name follows from `name`: groups, subvolume and socket are called by it. `linked`: the
    fabric has, or may have, something of its slot."""

    version: int
    name: str
    slot: int
    linked: bool = False


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(CellState).decode


def opened(handle: Handle) -> CellState:
    try:
        state = _decode(handle.state)
    except msgspec.DecodeError as error:
        raise BackendFailure("a broken handle", aftermath=Aftermath.BROKEN, end=End.INTERNAL) from error
    if handle.backend != "container" or state.version != HANDLE_VERSION:
        detail = f"a handle of {handle.backend} version {state.version}"
        raise BackendFailure(detail, aftermath=Aftermath.BROKEN, end=End.INTERNAL)
    return state


def failure_of(error: KernelError, aftermath: Aftermath) -> BackendFailure:
    """What a refusal of the kernel means for a sandbox: the one place where errno becomes a class of end."""
    if error.errno in _FULL:
        end = End.CAPACITY
    elif error.op in _IMAGE_OPS:
        end = End.IMAGE
    else:
        end = End.RUNTIME
    return BackendFailure(str(error), aftermath=aftermath, end=end)
