"""Backends as data: what the suite may ask of each."""

from dataclasses import dataclass

__all__ = ["BACKENDS", "BackendUnderTest"]


@dataclass(frozen=True, slots=True)
class BackendUnderTest:
    """`name`: as `backend` of a create. `own_kernel`: a sandbox has one, so it is not bound to the host's id map."""

    name: str
    own_kernel: bool


BACKENDS = {each.name: each for each in (BackendUnderTest("container", own_kernel=False),)}
