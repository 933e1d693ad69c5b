"""Published names whose backends do not exist yet: calling one is refused by name, nothing pretends."""

from collections.abc import Callable
from typing import NoReturn

from dsec.model.errors import Unsupported

__all__ = ["PENDING_ARGUMENTS", "PENDING_CLIENT", "PENDING_SANDBOX", "refusing"]

PENDING_CLIENT = {
    "run_microvm": "the microvm backend",
    "run_fullvm": "the fullvm backend",
    "fncall": "the fncall backend",
}

PENDING_ARGUMENTS = {
    "DSecMicroVMRunArgs": "the microvm backend",
    "DSecFullVMRunArgs": "the fullvm backend",
    "DSecFnCallArgs": "the fncall backend",
}

PENDING_SANDBOX = {
    "pause": "pause and resume",
    "resume": "pause and resume",
    "snapshot": "snapshots",
    "fork": "forks",
}


def refusing(table: dict[str, str], owner: str, name: str) -> Callable[..., NoReturn]:
    """For an attribute of `table`, a call that raises Unsupported; AttributeError for any other, as Python has it."""
    if name not in table:
        raise AttributeError(f"{owner!r} object has no attribute {name!r}")

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise Unsupported(f"{name}: {table[name]} is not part of this version", what=name)

    return refuse
