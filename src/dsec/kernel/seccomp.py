"""The seccomp filter that every command in a sandbox runs under, compiled from schema/seccomp.toml at build time."""

from dsec import _native
from dsec.kernel.errors import from_kernel

__all__ = ["command_filter"]


def command_filter() -> bytes:
    """The program for this machine's architecture. Raises KernelError where there is none for it."""
    return from_kernel(_native.seccomp_program)()
