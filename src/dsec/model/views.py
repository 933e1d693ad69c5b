"""What the API answers: records for people and programs, the same over HTTP and in the SDK."""

from enum import StrEnum
from typing import Literal

from msgspec import Struct

from dsec.model.layers import ImageConfig
from dsec.model.outcome import Outcome, SandboxEnd
from dsec.model.spec import SandboxSpec

__all__ = [
    "BatchItem", "CommitReport", "CommitRequest", "DirEntry", "ExecRequest", "FileEvent", "FileView", "ImageView", "LayerView",
    "ListQuery", "Me", "Page", "PreviewSpec", "PreviewView",
    "Portion", "Problem", "ProcessView", "PtySize", "SandboxEvent", "SandboxState", "SandboxView", "SessionRequest", "SessionRun", "SessionView",
    "StopMany", "Stopped", "StreamEvent", "TreeWritten",
]  # fmt: skip


class SandboxState(StrEnum):
    """States of a sandbox as callers see them."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    GONE = "gone"


class SandboxView(Struct, frozen=True, kw_only=True):
    """A sandbox as the platform sees it. Times are Unix seconds; `phases` are the seconds of each part of its creation."""

    id: str
    state: SandboxState
    spec: SandboxSpec
    project: str
    created: float
    idle_deadline: float | None = None
    absolute_deadline: float | None = None
    phases: dict[str, float] = {}
    end: SandboxEnd | None = None


class Problem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error over HTTP (RFC 9457): `code` is from schema/errors.toml, `fields` are its values. Never a class name."""

    type: str
    title: str
    status: int
    code: str
    detail: str = ""
    retryable: bool = False
    fields: dict[str, str | int | float | bool | None] = {}


class BatchItem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a batch's answer: the sandbox at `index`, or why it failed."""

    index: int
    sandbox: SandboxView | None = None
    problem: Problem | None = None


class PtySize(Struct, frozen=True):
    """A terminal's size in characters, 1..1000 each."""

    cols: int = 80
    rows: int = 24


class ExecRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A command. Give `argv`, or `shell` (text for /bin/sh -c). Times in seconds, `output_limit` in bytes a stream.

    `user`: name or number, "u:g" too; None means the sandbox's. `cwd` None means the sandbox's. `env` is laid over the
    sandbox's. `timeout` None: no limit of time. `stdin`: all of it. `pty`: run on a terminal (start only).
    `keep_stdin`: leave stdin open for later writes (start only).
    """

    argv: tuple[str, ...] = ()
    shell: str | None = None
    stdin: bytes = b""
    env: dict[str, str] = {}
    cwd: str | None = None
    user: str | None = None
    timeout: float | None = None
    output_limit: int = 1 << 20
    pty: PtySize | None = None
    keep_stdin: bool = False


class ProcessView(Struct, frozen=True, kw_only=True):
    """A process started through the API. `pid` is its number inside. The totals count all bytes each stream has carried."""

    id: str
    argv: tuple[str, ...]
    pid: int
    running: bool
    started: float
    pty: bool = False
    outcome: Outcome | None = None
    exit_code: int | None = None
    signal: int | None = None
    stdout_bytes_total: int = 0
    stderr_bytes_total: int = 0
    duration: float | None = None


class StreamEvent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A text frame of a process stream. From the server: started, ended, lost (`offset`: where output begins again).
    From the client: stdin_close, resize, signal."""

    event: Literal["started", "ended", "lost", "stdin_close", "resize", "signal", "problem"]
    process: ProcessView | None = None
    stream: Literal["stdout", "stderr"] | None = None
    offset: int | None = None
    signal: int | None = None
    size: PtySize | None = None
    problem: Problem | None = None


class SessionRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A shell that keeps its state between commands. `shell`: path; None means /bin/bash, else /bin/sh."""

    shell: str | None = None
    env: dict[str, str] = {}
    cwd: str | None = None
    user: str | None = None


class SessionRun(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A command for a session, run after the one before it has ended."""

    command: str
    timeout: float | None = None
    output_limit: int = 1 << 20


class SessionView(Struct, frozen=True, kw_only=True):
    """A shell session. `busy`: a command of it is running."""

    id: str
    shell: str
    running: bool
    busy: bool
    started: float


class FileView(Struct, frozen=True, kw_only=True):
    """A file's attributes, as inside. `kind`: what it is; `mtime` Unix seconds; `mode` permission bits only."""

    path: str
    kind: Literal["file", "dir", "symlink", "fifo", "socket", "char", "block"]
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: str | None = None
    sha256: str | None = None


class DirEntry(Struct, frozen=True, kw_only=True):
    """One line of a listing; `path` is relative to the listed directory."""

    path: str
    kind: str
    size: int


class TreeWritten(Struct, frozen=True, kw_only=True):
    """A tar stream that was taken: its bytes and their sha256 in hex."""

    size: int
    sha256: str


class FileEvent(Struct, frozen=True, kw_only=True):
    """A change under a watched path. overflow: events were lost, list again."""

    event: Literal["created", "modified", "removed", "moved_from", "moved_to", "attributes", "overflow"]
    path: str


class PreviewSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A link to `port` that is to last `seconds`, 1 s to 7 days."""

    port: int
    seconds: float = 3600.0


class PreviewView(Struct, frozen=True, kw_only=True):
    """A link: whoever has it sees `port` of the sandbox until `expires` (Unix seconds). Its path on the server is `/p/ID/`; `url` is where the
    client that made it reaches that, and empty over HTTP."""

    id: str
    sandbox_id: str
    port: int
    expires: float
    url: str = ""


class SandboxEvent(Struct, frozen=True, kw_only=True):
    """One line of a sandbox's story: a transition of its life, or an operation in it. `at`: Unix seconds."""

    at: float
    event: str
    fields: dict[str, str | int | float | bool | None] = {}


class StopMany(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stop all live sandboxes of `job` and with all `labels`; at least one of the two must be given."""

    job: str | None = None
    labels: dict[str, str] = {}


class Stopped(Struct, frozen=True, kw_only=True):
    """Ids of the sandboxes that this call stopped."""

    stopped: tuple[str, ...]


class ListQuery(Struct, frozen=True, kw_only=True):
    """Which sandboxes: of `project` and those below it, and of `job`, `labels` and `states` where given. `limit` 1..1000."""

    project: str
    job: str | None = None
    labels: dict[str, str] = {}
    states: tuple[SandboxState, ...] = ()
    cursor: str | None = None
    limit: int = 100


class Page(Struct, frozen=True, kw_only=True):
    """A page of sandboxes, newest first; pass `next_cursor` to get the next."""

    items: tuple[SandboxView, ...]
    next_cursor: str | None = None


class LayerView(Struct, frozen=True, kw_only=True):
    """A layer in the store: its digest and kind; entries and bytes are those of the layers that it lies on, too."""

    digest: str
    kind: str
    entries: int
    content_bytes: int
    stored_bytes: int
    origin: str


class ImageView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A name in the store and the (topmost) layer it stands for. `project`: whose it is; "" is everyone's."""

    name: str
    layer: LayerView
    project: str = ""


class CommitRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A sandbox's changes to become the image `name`. `scrub` and `keep`: patterns of paths to leave out and to keep whatever is left out
    (`*`, `?`, `[a-z]`, `**`); `defaults`: whether what is of use to one sandbox only (docs/images.md) is left out too. `config`: of
    the image; None: that of the sandbox's own."""

    name: str
    scrub: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    defaults: bool = True
    config: ImageConfig | None = None


class Portion(Struct, frozen=True, kw_only=True):
    """A part of what was changed: how many paths, and the bytes of their files. `what`: a path, or the rule that scrubbed it."""

    what: str
    entries: int
    bytes: int


class CommitReport(Struct, frozen=True, kw_only=True):
    """What a commit made. `layers`: the image's, lowest first, the new one last. `entries` and `bytes` of the new one, `whiteouts` of
    them deletions. `kept`: by the first two names of paths, the largest 50; `scrubbed`: by rule; `notes`: what else was left out.
    `phases`: seconds of each part."""

    name: str
    digest: str
    layers: tuple[str, ...]
    entries: int
    bytes: int
    whiteouts: int
    kept: tuple[Portion, ...] = ()
    scrubbed: tuple[Portion, ...] = ()
    notes: tuple[str, ...] = ()
    phases: dict[str, float] = {}


class Me(Struct, frozen=True, kw_only=True):
    """Who the caller is. `permissions`: what it may do in `project`."""

    principal: str
    project: str
    permissions: tuple[str, ...]
