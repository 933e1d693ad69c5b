"""How a setting is declared: a field of a frozen dataclass beside the code that it sets, with its meaning for people."""

from dataclasses import field
from typing import Any

from dsec.model.errors import InvalidArgument

__all__ = ["check_positive", "setting"]


def setting(default: Any, meaning: str) -> Any:
    """A field with its default and what it means, units included; `dsec config explain` and docs/configuration.md show both.

    The default is a value or, for one that cannot be shared, a function without arguments that makes it.
    """
    if callable(default):
        return field(default_factory=default, metadata={"meaning": meaning})
    return field(default=default, metadata={"meaning": meaning})


def check_positive(settings: object, *names: str) -> None:
    """Raises InvalidArgument unless each of the named settings is above zero; for a settings class's __post_init__."""
    for name in names:
        if not getattr(settings, name) > 0:
            raise InvalidArgument(f"{name} must be above zero", field=name)
