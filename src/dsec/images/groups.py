"""Task groups whose failure is one error: the first, which is the reason that the others were cancelled."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["first_failure"]


@contextmanager
def first_failure() -> Iterator[None]:
    """Around a task group: raises the first of its failures instead of the group of all."""
    try:
        yield
    except ExceptionGroup as several:
        raise several.exceptions[0] from several
