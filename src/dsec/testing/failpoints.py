"""Places at which a server can be made to die, fail or hang, by name, without a line for it in what is tested.

`python -m dsec.testing.failpoints WORDS` is `dsec WORDS` with its places wrapped from outside, before the command begins:

| name | what is wrapped |
| --- | --- |
| `journal.METHOD.before`, `.after` | every method of the edge's journal that writes |
| `iam.METHOD.before`, `.after` | the same of IAM |
| `native.FUNCTION.before`, `.after` | every function of the native module |
| `native.launch.at.K` | a launch, K * 25 us after it began; see `_Launch` |
| `os.ROOM.MODULE.FUNCTION.CALL` | before a call that changes something, made in `kernel`, `images` or a backend: the interpreter's audit hook tells of each |
| `answer.METHOD.PATH.before`, `.head`, `.body` | an answer of HTTP: nothing, its head, all of it was handed to the socket |
| `stream.PATH.before`, `.after` | each message of a websocket |

What is written in the code becomes a place by itself: methods and functions are listed from the classes, calls by the hook.
DSEC_FAILPOINT is `NAME[:NTH[:ACTION]]`: the NTH time (1 if left out) that NAME is reached, ACTION is taken: `kill` (SIGKILL
to itself), `hang` (this thread waits for ever), or an errno's name, which is raised as the kernel's refusal. DSEC_FAILPOINT_CONTROL
is a descriptor of a socket over which a test sets the next one and asks which were reached (`FailingNode`).
DSEC_FAILPOINT_TRACE is a file for the latter, written at the command's end.
"""

import ctypes
import errno
import functools
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from inspect import iscoroutinefunction
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from dsec.testing.node import START_SECONDS, STOP_SECONDS, Node, NodeFailed

__all__ = ["FailingNode", "declared", "main"]

READS = {
    "journal": frozenset({"close", "living", "events", "row", "asked", "page", "story", "operation", "last_sequence", "result", "network", "preview", "previews"}),
    "iam": frozenset({"close", "authenticate", "authorise", "held", "me"}),
}  # fmt: skip
"""Methods that write nothing; every other public one is a place."""
CLASSES = {"journal": ("dsec.edge.journal", "Journal"), "iam": ("dsec.cluster.iam", "SqlIam")}
LAUNCH_PARTS = 48
LAUNCH_STEP = 25e-6
_NATIVE = "dsec._native"
_AUDITED = frozenset({
    "os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.symlink", "os.chown", "os.chmod", "os.truncate",
    "fcntl.flock", "socket.bind", "subprocess.Popen", "signal.pthread_kill",
})  # fmt: skip
_ACTING = ("dsec.kernel.", "dsec.images.", "dsec.edge.backends.")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _methods(kind: str) -> list[str]:
    module, name = CLASSES[kind]
    made = getattr(importlib.import_module(module), name)
    return sorted(n for n, f in vars(made).items() if callable(f) and not n.startswith("_") and n not in READS[kind])


def declared() -> list[str]:
    """Every place that the code names; those of the audit hook and of answers are found by running it."""
    found = [f"{kind}.{name}.{side}" for kind in CLASSES for name in _methods(kind) for side in ("before", "after")]
    native = importlib.import_module(_NATIVE).__all__
    found += [f"native.{name}.{side}" for name in native for side in ("before", "after")]
    return found + [f"native.launch.at.{k}" for k in range(LAUNCH_PARTS)]


class _Places:
    """What was reached how often, and what is to happen where."""

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()
        self._wanted, self._left, self._action = "", 0, "kill"

    def arm(self, text: str) -> None:
        name, _, rest = text.partition(":")
        nth, _, action = rest.partition(":")
        self._left, self._action = int(nth or 1), action or "kill"
        self._wanted = name

    def wants(self, name: str) -> bool:
        return name == self._wanted

    def reach(self, name: str) -> None:
        self.reached[name] += 1
        if name != self._wanted:
            return
        self._left -= 1
        if self._left > 0:
            return
        if self._action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        self._wanted = ""
        if self._action == "hang":
            threading.Event().wait()
        number = getattr(errno, self._action)
        raise OSError(number, "failpoint", name)


_places = _Places()


def _wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    if iscoroutinefunction(call):

        @functools.wraps(call)
        async def later(*args: Any, **kwargs: Any) -> Any:
            _places.reach(f"{name}.before")
            result = await call(*args, **kwargs)
            _places.reach(f"{name}.after")
            return result

        return later

    @functools.wraps(call)
    def now(*args: Any, **kwargs: Any) -> Any:
        _places.reach(f"{name}.before")
        result = call(*args, **kwargs)
        if isinstance(result, AbstractContextManager):
            return _held(name, result)
        _places.reach(f"{name}.after")
        return result

    return now


@contextmanager
def _held(name: str, inner: AbstractContextManager[Any]) -> Any:
    with inner as value:
        yield value
    _places.reach(f"{name}.after")


class _Launch:
    """Stops the first process of a sandbox in the middle of its steps, and kills the server then.

    The steps run in native code, in a process that shares the server's memory and outlives it. A thread beside the launch
    freezes the sandbox's group some microseconds after the launch began and then kills the server: the process stays at
    the step that it had reached, as if the machine had been slow, until somebody ends it. The program under test has no part in it.
    """

    def __init__(self, launch: Callable[[bytes], Any]) -> None:
        self._launch = launch

    def __call__(self, cell: bytes) -> Any:
        for k in range(LAUNCH_PARTS):
            if _places.wants(f"native.launch.at.{k}"):
                home = msgspec.msgpack.decode(cell)["home_fd"]
                threading.Thread(target=self._strike, args=(k, home), daemon=True).start()
                break
        return self._launch(cell)

    @staticmethod
    def _strike(k: int, home: int) -> None:
        ends = time.perf_counter() + k * LAUNCH_STEP
        freeze = os.open("cgroup.freeze", os.O_WRONLY, dir_fd=home)
        while time.perf_counter() < ends:
            continue
        os.write(freeze, b"1")
        while not _apart(home):
            # It would hold the server's locks until it is ended; a process that nobody stops does so for a microsecond.
            os.write(freeze, b"0")
            time.sleep(LAUNCH_STEP)
            os.write(freeze, b"1")
        _places.reach(f"native.launch.at.{k}")


def _apart(home: int) -> bool:
    """Whether the process in the cgroup `home` has descriptors of its own by now. Raises OSError."""
    procs = os.open("cgroup.procs", os.O_RDONLY, dir_fd=home)
    try:
        pids = os.read(procs, 4096).split()
    finally:
        os.close(procs)
    compared = [_kcmp(int(pid), os.getpid()) for pid in pids]
    return bool(pids) and 0 not in compared


def _kcmp(one: int, other: int) -> int:
    """0 where both processes have one table of descriptors (kcmp(2), KCMP_FILES); -1 where one of them is gone."""
    number = {"x86_64": 312, "aarch64": 272}[os.uname().machine]
    return int(ctypes.CDLL(None).syscall(number, one, other, 2, 0, 0))


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        if not isinstance(args[2], int) or not args[2] & _WRITING:
            return
    elif event not in _AUDITED:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_ACTING):
            where = module.removeprefix("dsec.").removeprefix("edge.")
            _places.reach(f"os.{where}.{frame.f_code.co_name.strip('<>')}.{event.rpartition('.')[2]}")
            return
        if module.startswith(("dsec.", "threading")):
            return
        frame = frame.f_back


def _path_name(path: str) -> str:
    """A path with what differs from call to call left out."""
    words = path.strip("/").split("/")
    for at, word in enumerate(words):
        if at and words[at - 1] in ("sandboxes", "processes", "sessions", "http") and word not in ("batch", "stop"):
            words[at] = "*"
    return "/".join(words[1:])


def _answering(app: Any) -> Any:
    async def call(self: Any, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            name = f"answer.{scope['method']}.{_path_name(scope['path'])}"
        elif scope["type"] == "websocket":
            name = f"stream.{_path_name(scope['path'])}"
        else:
            await app(self, scope, receive, send)
            return

        async def told(message: Any) -> None:
            kind = message["type"]
            if kind.startswith("websocket"):
                _places.reach(f"{name}.before")
                await send(message)
                _places.reach(f"{name}.after")
                return
            if kind == "http.response.start":
                _places.reach(f"{name}.before")
            await send(message)
            if kind == "http.response.start":
                _places.reach(f"{name}.head")
            elif kind == "http.response.body" and not message.get("more_body"):
                _places.reach(f"{name}.body")

        await app(self, scope, receive, told)

    return call


def _wrap_all() -> None:
    for kind, (module, class_name) in CLASSES.items():
        made = getattr(importlib.import_module(module), class_name)
        for name in _methods(kind):
            setattr(made, name, _wrapped(f"{kind}.{name}", getattr(made, name)))
    native = importlib.import_module(_NATIVE)
    for name in native.__all__:
        call = getattr(native, name)
        setattr(native, name, _wrapped(f"native.{name}", _Launch(call) if name == "launch" else call))
    api = importlib.import_module("dsec.cluster.apiserver").ApiServer
    api.__call__ = _answering(api.__call__)
    sys.addaudithook(_audit)


def _obey(control: socket.socket) -> None:
    """Answers `arm NAME...` with `ok` and `reached` with the counts, until the other end is closed."""
    with control, control.makefile("rw") as lines:
        for line in lines:
            word, _, rest = line.strip().partition(" ")
            if word == "arm":
                _places.arm(rest)
                answer = "ok"
            else:
                answer = msgspec.json.encode(dict(_places.reached)).decode()
            lines.write(answer + "\n")
            lines.flush()


class FailingNode(Node):
    """A node whose server runs with its places wrapped, and dies where it is told to."""

    program = (sys.executable, "-m", "dsec.testing.failpoints")

    def __init__(self, state: Path, **settings: str) -> None:
        super().__init__(state, **settings)
        self._control: socket.socket | None = None

    def start(self) -> None:
        self.start_at("")

    def start_at(self, place: str) -> None:
        """Starts the server, which meets `place` on its way up. Raises NodeFailed where that ends it."""
        own, theirs = socket.socketpair()
        own.settimeout(START_SECONDS)
        self._forget()
        self._control = own
        with theirs:
            more = {"DSEC_FAILPOINT": place, "DSEC_FAILPOINT_CONTROL": str(theirs.fileno())}
            self._start(more, (theirs.fileno(),))

    def arm(self, place: str) -> None:
        """What is to happen in the running server from now on; "" nothing."""
        self._ask(f"arm {place}")

    def reached(self) -> dict[str, int]:
        """How often each place was reached since the server began."""
        return msgspec.json.decode(self._ask("reached"), type=dict[str, int])

    def _ask(self, line: str) -> bytes:
        if self._control is None:
            raise NodeFailed("the node is not running")
        self._control.sendall(line.encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            piece = self._control.recv(1 << 16)
            if not piece:
                raise NodeFailed("the server is gone")
            answer += piece
        return answer

    def kill(self) -> None:
        super().kill()
        self._forget()

    def stop(self) -> None:
        super().stop()
        self._forget()

    def dsec_at(self, place: str, *words: str, trace: Path | None = None) -> int:
        """Runs a `dsec` command on this node's state that meets `place`; answers its exit status."""
        more = {"DSEC_FAILPOINT": place, "DSEC_FAILPOINT_TRACE": str(trace or "")}
        done = subprocess.run(
            [*self.program, *words], env=self._environ | more, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=STOP_SECONDS, check=False,
        )  # fmt: skip
        return done.returncode

    def _forget(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None


def main() -> None:
    """`dsec`, wrapped."""
    taken = [os.environ.pop(name, "") for name in ("DSEC_FAILPOINT", "DSEC_FAILPOINT_CONTROL", "DSEC_FAILPOINT_TRACE")]  # noqa: TID251
    wanted, control, trace = taken
    _wrap_all()
    _places.arm(wanted)
    if control:
        end = socket.socket(fileno=int(control))
        end.set_inheritable(False)
        threading.Thread(target=_obey, args=(end,), daemon=True).start()
    try:
        runpy.run_module("dsec", run_name="__main__", alter_sys=True)
    finally:
        if trace:
            Path(trace).write_bytes(msgspec.json.encode(dict(_places.reached)))


if __name__ == "__main__":
    main()
