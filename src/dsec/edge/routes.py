"""All that an edge serves below /v1/sandboxes/{id}: a table. The handlers are called like their routes."""

from msgspec import Struct

from dsec.edge import files, processes
from dsec.edge.network import calls
from dsec.model.errors import (
    Busy,
    CommandNotExecutable,
    CommandNotFound,
    Conflict,
    ImageUnavailable,
    LimitReached,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    SandboxLost,
    TooLarge,
    Unavailable,
    Unsupported,
)
from dsec.model.network import Flow, NetworkChange, NetworkView
from dsec.model.outcome import ExecResult
from dsec.model.plan import Usage
from dsec.model.views import (
    CommitReport,
    CommitRequest,
    ExecRequest,
    FileView,
    PreviewSpec,
    PreviewView,
    ProcessView,
    PtySize,
    SandboxEvent,
    SandboxView,
    SessionRequest,
    SessionRun,
    SessionView,
    TreeWritten,
)
from dsec.web import OCTETS, TAR, Route

__all__ = [
    "COMMIT_ROUTES",
    "FILE_ROUTES",
    "NETWORK_ROUTES",
    "PORT_ROUTES",
    "PREVIEW_ROUTES",
    "PROCESS_ROUTES",
    "ROUTES",
    "SANDBOX_ROUTES",
    "SESSION_ROUTES",
    "CancelQuery",
    "RenewQuery",
]

_ID = "/v1/sandboxes/{id}"
_READ = "sandbox.read"
_USE = "sandbox.use"
_GONE = (NotFound, SandboxLost)
_ACTS = (NotFound, SandboxLost, Conflict, Busy)
_COMMAND = (*_ACTS, CommandNotFound, CommandNotExecutable, TooLarge, LimitReached)
_FILES = (*_ACTS, PermissionDenied, LimitReached, Unsupported)
_STDIN_MAX = 64 << 20


class CancelQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`request_id`: of the operation to give up."""

    request_id: str


class RenewQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`ttl`: seconds from now until the idle end; None: the sandbox's own idle time."""

    ttl: float | None = None


SANDBOX_ROUTES = (
    Route(name="get_sandbox", method="GET", path=_ID, summary="Look at a sandbox, gone or not.",
          answer=SandboxView, permission=_READ, errors=(NotFound,)),
    Route(name="delete_sandbox", method="DELETE", path=_ID, summary="End a sandbox; also one that has ended.",
          answer=SandboxView, permission=_USE, errors=(NotFound,), acts=True),
    Route(name="renew_sandbox", method="POST", path=f"{_ID}/renew", summary="Move the idle end.",
          query=RenewQuery, answer=SandboxView, permission=_USE, errors=_GONE, acts=True),
    Route(name="cancel_operation", method="POST", path=f"{_ID}/cancel",
          summary="Give up an operation that nobody waits for any more, and end its process tree; also one that has ended.",
          query=CancelQuery, permission=_USE, errors=_GONE),
    Route(name="sandbox_usage", method="GET", path=f"{_ID}/metrics", summary="What it uses now.",
          answer=Usage, permission=_READ, errors=_GONE),
    Route(name="sandbox_events", method="GET", path=f"{_ID}/events", summary="Its story: transitions and operations.",
          answer=list[SandboxEvent], permission=_READ, errors=(NotFound,)),
    Route(name="exec_command", method="POST", path=f"{_ID}/exec", summary="Run a command and wait for its end.",
          body=ExecRequest, body_limit=_STDIN_MAX, answer=ExecResult, permission=_USE, errors=_COMMAND, acts=True,
          tag="commands"),
)  # fmt: skip

PROCESS_ROUTES = (
    Route(name="start_process", method="POST", path=f"{_ID}/processes", summary="Start a process that outlives the call.",
          body=ExecRequest, body_limit=_STDIN_MAX, answer=ProcessView, status=201, permission=_USE, errors=_COMMAND, acts=True,
          tag="processes"),
    Route(name="list_processes", method="GET", path=f"{_ID}/processes", summary="The processes started.",
          answer=list[ProcessView], permission=_USE, errors=_GONE, tag="processes"),
    Route(name="get_process", method="GET", path=f"{_ID}/processes/{{pid}}", summary="One process.",
          answer=ProcessView, permission=_USE, errors=_GONE, tag="processes"),
    Route(name="end_process", method="DELETE", path=f"{_ID}/processes/{{pid}}", summary="End its tree and forget it.",
          permission=_USE, errors=_ACTS, acts=True, tag="processes"),
    Route(name="wait_process", method="POST", path=f"{_ID}/processes/{{pid}}/wait", summary="Wait for its end.",
          query=processes.WaitQuery, answer=ProcessView, permission=_USE, errors=_GONE, tag="processes"),
    Route(name="signal_process", method="POST", path=f"{_ID}/processes/{{pid}}/signal", summary="Send a signal.",
          query=processes.SignalQuery, permission=_USE, errors=_ACTS, acts=True, tag="processes"),
    Route(name="resize_process", method="POST", path=f"{_ID}/processes/{{pid}}/resize", summary="Resize its terminal.",
          body=PtySize, permission=_USE, errors=_ACTS, acts=True, tag="processes"),
    Route(name="stream_process", method="WS", path=f"{_ID}/processes/{{pid}}/stream", summary="Attach to its streams.",
          query=processes.StreamQuery, permission=_USE, errors=_GONE, tag="processes"),
)  # fmt: skip

SESSION_ROUTES = (
    Route(name="open_session", method="POST", path=f"{_ID}/sessions", summary="Open a shell that keeps its state.",
          body=SessionRequest, answer=SessionView, status=201, permission=_USE, errors=_COMMAND, acts=True, tag="sessions"),
    Route(name="list_sessions", method="GET", path=f"{_ID}/sessions", summary="The open sessions.",
          answer=list[SessionView], permission=_USE, errors=_GONE, tag="sessions"),
    Route(name="run_in_session", method="POST", path=f"{_ID}/sessions/{{sid}}/run", summary="Run a command in a session.",
          body=SessionRun, body_limit=8 << 20, answer=ExecResult, permission=_USE, errors=_COMMAND, acts=True, tag="sessions"),
    Route(name="close_session", method="DELETE", path=f"{_ID}/sessions/{{sid}}", summary="End a session and all in it.",
          permission=_USE, errors=_ACTS, acts=True, tag="sessions"),
)  # fmt: skip

FILE_ROUTES = (
    Route(name="read_file", method="GET", path=f"{_ID}/files", summary="A file's bytes; its FileView in X-Dsec-File.",
          query=files.ReadQuery, answer_media=OCTETS, permission=_USE, errors=_FILES, tag="files"),
    Route(name="write_file", method="PUT", path=f"{_ID}/files", summary="Write a file, whole or not at all.",
          query=files.WriteQuery, body_media=OCTETS, answer=FileView, permission=_USE, errors=_FILES, acts=True, tag="files"),
    Route(name="stat_file", method="GET", path=f"{_ID}/files/stat", summary="A file's attributes.",
          query=files.StatQuery, answer=FileView, permission=_USE, errors=_FILES, tag="files"),
    Route(name="list_files", method="GET", path=f"{_ID}/files/list", summary="What a directory holds.",
          query=files.EntriesQuery, answer=list[FileView], permission=_USE, errors=_FILES, tag="files"),
    Route(name="make_directory", method="POST", path=f"{_ID}/files/mkdir", summary="Make a directory.",
          query=files.MakeQuery, answer=FileView, permission=_USE, errors=_FILES, acts=True, tag="files"),
    Route(name="move_file", method="POST", path=f"{_ID}/files/move", summary="Rename or move.",
          query=files.MoveQuery, answer=FileView, permission=_USE, errors=_FILES, acts=True, tag="files"),
    Route(name="remove_file", method="POST", path=f"{_ID}/files/remove", summary="Remove.",
          query=files.RemoveQuery, permission=_USE, errors=_FILES, acts=True, tag="files"),
    Route(name="read_tree", method="GET", path=f"{_ID}/files/tree", summary="A tree as a tar stream.",
          query=files.PathQuery, answer_media=TAR, permission=_USE, errors=_FILES, tag="files"),
    Route(name="write_tree", method="PUT", path=f"{_ID}/files/tree", summary="Unpack a tar stream below a directory.",
          query=files.PathQuery, body_media=TAR, answer=TreeWritten, permission=_USE, errors=_FILES, acts=True, tag="files"),
    Route(name="watch_files", method="WS", path=f"{_ID}/files/watch", summary="Changes under a path, as they happen.",
          query=files.WatchQuery, permission=_USE, errors=_FILES, tag="files"),
)  # fmt: skip

PORT_ROUTES = (
    Route(name="http_request", method="ANY", path=f"{_ID}/http/{{port}}/{{path:rest}}",
          summary="An HTTP request to a port in the sandbox.", body_media="*/*", answer_media="*/*", permission=_USE,
          errors=(*_GONE, Unavailable), tag="ports"),
    Route(name="http_socket", method="WS", path=f"{_ID}/http/{{port}}/{{path:rest}}",
          summary="A WebSocket of a server in the sandbox.", permission=_USE, errors=(*_GONE, Unavailable), tag="ports"),
    Route(name="tunnel", method="WS", path=f"{_ID}/tunnel/{{port}}", summary="Bytes to and from a port in the sandbox.",
          permission=_USE, errors=_GONE, tag="ports"),
)  # fmt: skip

NETWORK_ROUTES = (
    Route(name="get_network", method="GET", path=f"{_ID}/network", summary="The network rules in force, as asked and as enforced.",
          answer=NetworkView, permission=_READ, errors=(*_GONE, Unavailable), tag="network"),
    Route(name="set_network", method="PUT", path=f"{_ID}/network", summary="Put other rules, or a phase, in force at once.",
          body=NetworkChange, answer=NetworkView, permission=_USE, errors=(*_ACTS, Unsupported, Unavailable), acts=True, tag="network"),
    Route(name="network_log", method="GET", path=f"{_ID}/network/log", summary="The newest allowed and refused flows, oldest first.",
          query=calls.LogQuery, answer=list[Flow], permission=_READ, errors=_GONE, tag="network"),
)  # fmt: skip

PREVIEW_ROUTES = (
    Route(name="create_preview", method="POST", path=f"{_ID}/previews", summary="Make a link to a port, for whoever has it.",
          body=PreviewSpec, answer=PreviewView, status=201, permission=_USE, errors=_ACTS, acts=True, tag="previews"),
    Route(name="list_previews", method="GET", path=f"{_ID}/previews", summary="The links that have not ended.",
          answer=list[PreviewView], permission=_USE, errors=_GONE, tag="previews"),
    Route(name="revoke_preview", method="DELETE", path=f"{_ID}/previews/{{preview}}", summary="End a link, at once.",
          permission=_USE, errors=_GONE, tag="previews"),
    Route(name="preview_request", method="ANY", path="/p/{preview}/{path:rest}", summary="A request by a link, without a key.",
          body_media="*/*", answer_media="*/*", errors=(*_GONE, Busy, Unavailable), tag="previews"),
    Route(name="preview_socket", method="WS", path="/p/{preview}/{path:rest}", summary="A WebSocket by a link, without a key.",
          errors=(*_GONE, Busy, Unavailable), tag="previews"),
)  # fmt: skip

COMMIT_ROUTES = (
    Route(name="commit_sandbox", method="POST", path=f"{_ID}/commit", summary="Make an image of it as it is now; it runs on.",
          body=CommitRequest, answer=CommitReport, permission="image.write",
          errors=(*_ACTS, PermissionDenied, QuotaExceeded, ImageUnavailable), acts=True, tag="images"),
)  # fmt: skip

ROUTES = (
    SANDBOX_ROUTES
    + PROCESS_ROUTES
    + SESSION_ROUTES
    + FILE_ROUTES
    + PORT_ROUTES
    + NETWORK_ROUTES
    + PREVIEW_ROUTES
    + COMMIT_ROUTES
)
