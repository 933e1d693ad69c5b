"""A node of one's own: `dsec up` in a process, with a state directory, for tests, benchmarks and examples. Needs root."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

__all__ = ["Node", "NodeFailed"]

DSEC = (sys.executable, "-m", "dsec")
START_SECONDS = 60.0
STOP_SECONDS = 120.0


class NodeFailed(Exception):
    """The node did not start or stop, or a command on it failed; says what it printed."""


class Node:
    """`dsec up` on `state`, on a free port of the loopback; a context manager that ends it with `dsec down`.

    `state`: directory, made where missing and kept at the end. `settings`: more settings as DSEC_* variables; networks are off unless
    DSEC_NETWORK_ENABLED says otherwise, so that no test touches the machine's own links. The log is `state`/up.log. Raises NodeFailed.
    """

    program: tuple[str, ...] = DSEC
    """What `up` is a word of."""

    def __init__(self, state: Path, **settings: str) -> None:
        self.state = state.absolute()
        self.url, self.api_key = "", ""
        self._process: subprocess.Popen[bytes] | None = None
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DSEC_")}  # noqa: TID251
        self._environ = {**inherited, "DSEC_NETWORK_ENABLED": "false", **settings, "DSEC_NODE_STATE": str(self.state)}

    @property
    def pid(self) -> int:
        """The server's process."""
        if self._process is None:
            raise NodeFailed("the node is not running")
        return self._process.pid

    @property
    def lives(self) -> bool:
        """Whether the server's process has been started and not been ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """The end of what the server printed."""
        try:
            return (self.state / "up.log").read_text(errors="replace")[-4000:]
        except FileNotFoundError:
            return ""

    def dsec(self, *words: str, timeout: float = 600) -> str:
        """Run a `dsec` command on this node's state; answers its standard output."""
        client = {"DSEC_URL": self.url, "DSEC_API_KEY": self.api_key} if self.api_key else {}
        done = subprocess.run(
            [*DSEC, *words],
            env={**self._environ, **client}, capture_output=True, text=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode != 0:
            raise NodeFailed(f"dsec {' '.join(words)}: exit {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def images(self) -> set[str]:
        """Names of images and layers in the store."""
        return {image["name"] for image in json.loads(self.dsec("image", "list", "--json"))}

    def has(self, name: str) -> bool:
        """Whether the store has an image or layer of that name."""
        return name in self.images()

    def start(self) -> None:
        """Start the server and wait until it is ready."""
        self._start({}, ())

    def _start(self, more: dict[str, str], inherited: tuple[int, ...]) -> None:
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        reader, writer = os.pipe()
        words = ["up", "--state", str(self.state), "--listen", "127.0.0.1:0", "--ready-fd", str(writer)]
        with (self.state / "up.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self.program, *words], env=self._environ | more, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True, pass_fds=(writer, *inherited),
            )  # fmt: skip
        os.close(writer)
        with os.fdopen(reader) as pipe:
            said = pipe.read() if select.select([pipe], [], [], START_SECONDS)[0] else ""
        if not said:
            self.kill()
            raise NodeFailed(f"dsec up was not ready within {START_SECONDS:.0f} s: {self.log}")
        credentials: dict[str, str] = json.loads((self.state / "credentials.json").read_text())
        self.url, self.api_key = credentials["url"], credentials["api_key"]

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would: its sandboxes stay."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def kill_only(self) -> None:
        """Send SIGKILL and wait for nothing: for a test that watches the process end. `restart` follows."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)

    def restart(self) -> None:
        """Start the server again after it died. Takes what is left of the dead process."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """`dsec down`: every sandbox ends, nothing of the node stays in the kernel."""
        if self._process is None:
            return
        try:
            self.dsec("down", "--state", str(self.state), timeout=STOP_SECONDS)
            self._process.wait(timeout=STOP_SECONDS)
        finally:
            if self._process.poll() is None:
                self.kill()
            self._process = None

    def __enter__(self) -> "Node":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
