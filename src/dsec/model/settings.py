"""How a setting is declared: a field of a frozen dataclass beside the code that it sets, with its meaning for people."""

from dataclasses import field
from typing import Any

__all__ = ["setting"]


def setting(default: Any, meaning: str) -> Any:
    """A field with its default and what it means, units included; `dsec config explain` and docs/configuration.md show both.

    The default is a value or, for one that cannot be shared, a function without arguments that makes it.
    """
    if callable(default):
        return field(default_factory=default, metadata={"meaning": meaning})
    return field(default=default, metadata={"meaning": meaning})
