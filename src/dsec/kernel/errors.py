"""One name for every refusal of the kernel."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["KernelError", "as_kernel_error", "from_kernel", "kernel_op"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class KernelError(Exception):
    """The kernel refused `op` on `path` with `errno`. Only dsec.edge turns it into an error of the platform."""

    def __init__(self, op: str, path: str, errno: int) -> None:
        super().__init__(op, path, errno)
        self.op = op
        self.path = path
        self.errno = errno

    def __str__(self) -> str:
        return f"{self.op} {self.path}: {os.strerror(self.errno)}"


def as_kernel_error(error: OSError, op: str = "", path: str = "") -> KernelError:
    """The same refusal under our name. The native module gives the operation in `strerror` and the object in `filename`."""
    where = path or (str(error.filename) if error.filename is not None else "")
    return KernelError(op or (error.strerror or "call"), where, error.errno or 0)


@contextmanager
def kernel_op(op: str, path: str = "") -> Iterator[None]:
    """Any OSError inside is raised as KernelError of `op` (its object is `path`, else the error's own file name)."""
    try:
        yield
    except OSError as error:
        raise as_kernel_error(error, op, path) from error


def from_kernel(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: an OSError of the native call inside becomes a KernelError with the operation that it names."""

    @wraps(call)
    def named(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return call(*args, **kwargs)
        except OSError as error:
            raise as_kernel_error(error) from error

    return named
