"""A real node on the fake host, its client there, and a Python image from which sandboxes probe."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import dsec
import dsec.sync
from dsec.testing.internet import HOST, NAMESERVERS, Internet
from dsec.testing.netservices import Echo, Record, Web
from dsec.testing.node import Node

__all__ = ["IMAGE", "PYTHON", "Place", "make_python_root"]

IMAGE = "prober"
PYTHON = "/opt/python/bin/python3"
PROBES = Path(__file__).with_name("probes.py").read_text()
SHARED = ("203.0.113.10", "2001:db8:113::10")
PLAIN = ("203.0.113.20", "2001:db8:113::20")
MOVING = ("203.0.113.31", "203.0.113.32")
_LEFT_OUT = (
    "test",
    "idlelib",
    "tkinter",
    "turtledemo",
    "lib2to3",
    "ensurepip",
    "__pycache__",
    "config-*",
    "site-packages",
    "*.a",
)


def _libraries(files: Iterable[Path]) -> set[Path]:
    told = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False, timeout=60).stdout
    return {Path(found) for found in re.findall(r"(/\S+\.so\S*) \(0x", told)}


def make_python_root(target: Path) -> Path:
    """A root with this interpreter, the libraries that it needs, and busybox."""
    source = Path(sys.base_prefix)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    inside = target / "opt/python"
    (inside / "bin").mkdir(parents=True)
    shutil.copy2(source / "bin" / version, inside / "bin/python3")
    shutil.copytree(source / "lib" / version, inside / "lib" / version, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    (inside / "lib" / version / "site-packages").mkdir()
    pip = source / "lib" / version / "site-packages/pip"
    shutil.copytree(pip, inside / "lib" / version / "site-packages/pip", ignore=shutil.ignore_patterns("__pycache__"))
    programs = [source / "bin" / version, *(source / "lib" / version / "lib-dynload").glob("*.so")]
    for library in _libraries(programs):
        kept = target / str(library).lstrip("/")
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library.resolve(), kept)
    for name in ("etc", "tmp", "root", "bin", "usr/bin"):
        (target / name).mkdir(parents=True, exist_ok=True)
    busybox = shutil.which("busybox")
    assert busybox is not None, "busybox-static is needed"
    shutil.copy2(busybox, target / "bin/busybox")
    for applet in ("sh", "cat", "sleep", "ping", "wget", "hostname", "ip", "nc", "id", "true"):
        (target / "bin" / applet).symlink_to("busybox")
    (target / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/tmp:/bin/sh\n")
    # As an image may come: what is there names another machine.
    (target / "etc/resolv.conf").symlink_to("/nowhere")
    (target / "etc/hosts").write_text("192.0.2.99\told\n")
    return target


class Place:
    """A context manager: the fake internet, a node on its host, and a blocking client there."""

    def __init__(self, folder: Path, root: Path, **settings: str) -> None:
        self.folder = folder
        self._root = root
        self._stack = ExitStack()
        self._settings = settings

    def __enter__(self) -> "Place":
        with ExitStack() as stack:
            self.internet = stack.enter_context(Internet())
            self.web: Web = self.internet.web(SHARED, ["a.test", "b.test", "x.a.test"])
            self.moving: Web = self.internet.web(MOVING, ["m.test"])
            self.echo: Echo = self.internet.echo(PLAIN, 7)
            self.on_host: Echo = self.internet.echo(HOST, 80, self.internet.host)
            for name in ("a.test", "b.test", "x.a.test"):
                self.points(name, *SHARED)
            self.points("echo.test", *PLAIN)
            config = self.folder / "config.toml"
            config.write_text(
                f"[gate]\nnameservers = {json.dumps(list(NAMESERVERS))}\n"
                "[container]\npool_bytes = 2147483648\nahead_low = 2\nahead_high = 4\n"
            )
            self.node = Node(
                self.folder / "state", DSEC_CONFIG=str(config), DSEC_NETWORK_ENABLED="true", **self._settings
            )
            stack.enter_context(self.internet.host.inside())
            stack.enter_context(self.node)
            self.node.dsec("image", "import", IMAGE, str(self._root))
            self.client = dsec.sync.DSecClient(self.node.url, self.node.api_key)
            with self.client, self.box():  # the image is mounted from now on
                pass
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def points(self, name: str, *addresses: str, ttl: int = 5) -> None:
        """From now on `name` has these addresses."""
        self.internet.dns.answer(name, *(Record("AAAA" if ":" in text else "A", text, ttl) for text in addresses))

    def end_flows(self) -> None:
        """Ends what the echo still holds of flows that were cut without its hearing of it."""
        self.echo.stop()
        self.echo.start()

    def box(self, rules: Any = None, **more: Any) -> dsec.sync.Sandbox:
        """A sandbox with these rules; use it as a context manager."""
        args = dsec.DSecContainerRunArgs(
            container_image=IMAGE, network_rules=rules, memory_limit_mb=256, cpu_cores_limit=2, ttl_running_stop=600, **more
        )  # fmt: skip
        return self.client.run_container(args, timeout=60)

    def restart(self) -> None:
        """The server dies at once, and comes back: at another address, with the same key."""
        self.client.close()
        self.node.kill()
        self.node.start()
        self.client = dsec.sync.DSecClient(self.node.url, self.node.api_key)
        self.client.open()


def probe(box: dsec.sync.Sandbox, *probes: Any, user: str | None = None) -> list[str]:
    """What came of each probe, all tried at once from inside."""
    return [told for told, _ in timed(box, *probes, user=user)]


def timed(box: dsec.sync.Sandbox, *probes: Any, user: str | None = None) -> list[tuple[str, float]]:
    """As `probe`, with the seconds that each took."""
    done = box.exec([PYTHON, "-c", PROBES], stdin=json.dumps(probes).encode(), timeout=60, user=user)
    assert done.exit_code == 0, done.stderr
    return [(str(told), float(seconds)) for told, seconds in json.loads(done.stdout)]
