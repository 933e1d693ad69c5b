"""DSec: sandboxes for training and evaluating language-model agents.

The names of the SDK are here, loaded when first used, so that no part of the platform loads another by its import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsec import sync as sync
    from dsec.model.errors import Busy as Busy
    from dsec.model.errors import CommandFailed as CommandFailed
    from dsec.model.errors import CommandNotExecutable as CommandNotExecutable
    from dsec.model.errors import CommandNotFound as CommandNotFound
    from dsec.model.errors import Conflict as Conflict
    from dsec.model.errors import DeadlineExceeded as DeadlineExceeded
    from dsec.model.errors import DSecError as DSecError
    from dsec.model.errors import ImageUnavailable as ImageUnavailable
    from dsec.model.errors import InfraError as InfraError
    from dsec.model.errors import Interrupted as Interrupted
    from dsec.model.errors import InvalidArgument as InvalidArgument
    from dsec.model.errors import LimitReached as LimitReached
    from dsec.model.errors import NotFound as NotFound
    from dsec.model.errors import PermissionDenied as PermissionDenied
    from dsec.model.errors import QuotaExceeded as QuotaExceeded
    from dsec.model.errors import RequestError as RequestError
    from dsec.model.errors import RuntimeFailure as RuntimeFailure
    from dsec.model.errors import SandboxLost as SandboxLost
    from dsec.model.errors import TaskError as TaskError
    from dsec.model.errors import TooLarge as TooLarge
    from dsec.model.errors import Unauthenticated as Unauthenticated
    from dsec.model.errors import Unavailable as Unavailable
    from dsec.model.errors import Unsupported as Unsupported
    from dsec.model.layers import ImageConfig as ImageConfig
    from dsec.model.network import Flow as Flow
    from dsec.model.network import NetLimits as NetLimits
    from dsec.model.network import NetworkRule as NetworkRule
    from dsec.model.network import NetworkView as NetworkView
    from dsec.model.outcome import End as End
    from dsec.model.outcome import ExecResult as Result
    from dsec.model.outcome import Outcome as Outcome
    from dsec.model.outcome import SandboxEnd as SandboxEnd
    from dsec.model.plan import Usage as Usage
    from dsec.model.spec import MountSpec as MountSpec
    from dsec.model.views import CommitReport as CommitReport
    from dsec.model.views import FileEvent as FileEvent
    from dsec.model.views import FileView as FileView
    from dsec.model.views import ImageView as ImageView
    from dsec.model.views import Me as Me
    from dsec.model.views import PreviewView as PreviewView
    from dsec.model.views import ProcessView as ProcessView
    from dsec.model.views import PtySize as Pty
    from dsec.model.views import SandboxEvent as SandboxEvent
    from dsec.model.views import SandboxState as SandboxState
    from dsec.model.views import SandboxView as SandboxView
    from dsec.model.views import SessionView as SessionView
    from dsec.sdk._async.client import DSecClient as DSecClient
    from dsec.sdk._async.files import Files as Files
    from dsec.sdk._async.process import Process as Process
    from dsec.sdk._async.sandbox import Sandbox as Sandbox
    from dsec.sdk._async.session import Session as Session
    from dsec.sdk._async.tunnel import Tunnel as Tunnel
    from dsec.sdk.arguments import DSecContainerRunArgs as DSecContainerRunArgs
    from dsec.sdk.records import HttpResponse as HttpResponse
    from dsec.sdk.records import Output as Output
    from dsec.sdk.records import Refusal as Refusal
    from dsec.sdk.records import SandboxFailed as SandboxFailed
    from dsec.sdk.records import Transfer as Transfer

_ERRORS = (
    "Busy", "CommandFailed", "CommandNotExecutable", "CommandNotFound", "Conflict", "DSecError", "DeadlineExceeded",
    "ImageUnavailable", "InfraError", "Interrupted", "InvalidArgument", "LimitReached", "NotFound", "PermissionDenied", "QuotaExceeded",
    "RequestError", "RuntimeFailure", "SandboxLost", "TaskError", "TooLarge", "Unauthenticated", "Unavailable",
    "Unsupported",
)  # fmt: skip

_HOMES = {
    "dsec.model.errors": _ERRORS,
    "dsec.model.layers": ("ImageConfig",),
    "dsec.model.network": ("Flow", "NetLimits", "NetworkRule", "NetworkView"),
    "dsec.model.outcome": ("End", "Outcome", "SandboxEnd"),
    "dsec.model.plan": ("Usage",),
    "dsec.model.spec": ("MountSpec",),
    "dsec.model.views": (
        "CommitReport", "FileEvent", "FileView", "ImageView", "Me", "PreviewView", "ProcessView", "SandboxEvent", "SandboxState", "SandboxView", "SessionView",
    ),
    "dsec.sdk._async.client": ("DSecClient",),
    "dsec.sdk._async.files": ("Files",),
    "dsec.sdk._async.process": ("Process",),
    "dsec.sdk._async.sandbox": ("Sandbox",),
    "dsec.sdk._async.session": ("Session",),
    "dsec.sdk._async.tunnel": ("Tunnel",),
    "dsec.sdk.arguments": ("DSecContainerRunArgs",),
    "dsec.sdk.records": ("HttpResponse", "Output", "Refusal", "SandboxFailed", "Transfer"),
}  # fmt: skip

_SOURCES = {name: (home, name) for home, names in _HOMES.items() for name in names} | {
    "Pty": ("dsec.model.views", "PtySize"),
    "Result": ("dsec.model.outcome", "ExecResult"),
    "sync": ("dsec.sync", ""),
}

# Published, and refused by name when called.
_PENDING = ("DSecFnCallArgs", "DSecFullVMRunArgs", "DSecMicroVMRunArgs")

__all__ = [
    "Busy", "CommandFailed", "CommandNotExecutable", "CommandNotFound", "CommitReport", "Conflict", "DSecClient", "DSecContainerRunArgs",
    "DSecError", "DeadlineExceeded", "End", "FileEvent", "FileView", "Files", "Flow", "HttpResponse", "ImageConfig", "ImageUnavailable",
    "ImageView", "InfraError", "Interrupted", "InvalidArgument", "LimitReached", "Me", "MountSpec", "NetLimits", "NetworkRule", "NetworkView", "NotFound", "Outcome", "Output",
    "PermissionDenied", "PreviewView", "Process", "ProcessView", "Pty", "QuotaExceeded", "Refusal", "RequestError", "Result",
    "RuntimeFailure", "Sandbox", "SandboxEnd", "SandboxEvent", "SandboxFailed", "SandboxLost", "SandboxState", "SandboxView", "Session",
    "SessionView", "TaskError", "TooLarge", "Transfer", "Tunnel", "Unauthenticated", "Unavailable", "Unsupported", "Usage", "sync",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _PENDING:
        pending = import_module("dsec.sdk.pending")
        return pending.refusing(pending.PENDING_ARGUMENTS, "dsec", name)
    if name not in _SOURCES:
        raise AttributeError(f"module 'dsec' has no attribute {name!r}")
    home, attribute = _SOURCES[name]
    module = import_module(home)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
