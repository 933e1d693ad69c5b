"""libdsec and its command line against a real node: nothing faked."""

import asyncio
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest

import dsec
import dsec.sync
from bench.rootfs import make_rootfs
from dsec import DSecClient, DSecContainerRunArgs
from dsec.testing.node import Node

pytestmark = pytest.mark.root

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "python-3.11:official"
APPLETS = (
    "seq",
    "head",
    "tr",
    "kill",
    "ps",
    "httpd",
    "stty",
    "pwd",
    "id",
    "env",
    "touch",
    "ln",
    "mkfifo",
    "mknod",
    "mv",
    "dd",
)


@contextmanager
def _made(folder: Path) -> Iterator[Node]:
    if shutil.which("busybox") is None:
        pytest.skip("busybox-static is not installed")
    root = make_rootfs(folder / "rootfs")
    for applet in APPLETS:
        (root / "bin" / applet).symlink_to("busybox")
    with Node(folder / "s", DSEC_CONTAINER_POOL_BYTES=str(1 << 30)) as made:
        made.dsec("image", "import", IMAGE, str(root))
        made.dsec("image", "tag", IMAGE, "python-3.11")
        yield made


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with _made(tmp_path_factory.mktemp("n")) as made:
        with dsec.sync.DSecClient(made.url, made.api_key) as client:
            # the image is mounted once a node: before the first test, which would be told that it left a mount
            client.run_container(dsec.DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=64)).stop()
        yield made


@pytest.fixture
async def client(node: Node) -> AsyncIterator[dsec.DSecClient]:
    async with dsec.DSecClient(node.url, node.api_key) as made:
        yield made


@pytest.fixture
async def box(client: dsec.DSecClient) -> AsyncIterator[dsec.Sandbox]:
    async with await client.run_container(
        dsec.DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=128)
    ) as made:
        yield made


async def test_the_published_listing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_URL", node.url)
    monkeypatch.setenv("DSEC_API_KEY", node.api_key)
    client = DSecClient()
    await client.open()
    args = DSecContainerRunArgs(container_image="python-3.11:official", memory_limit_mb=4096,
        cpu_cores_limit=4, ttl_running_stop=300, network_rules={"npm": False, "pypi": False}, init_user="root")  # fmt: skip
    sandbox = await client.run_container(args, timeout=120)
    result = await sandbox.run_shell("echo hello world")
    await sandbox.stop()
    assert (result.text, result.exit_code, result.outcome) == ("hello world\n", 0, dsec.Outcome.EXITED)
    assert sandbox.view.state is dsec.SandboxState.GONE
    await sandbox.stop()
    with pytest.raises(dsec.SandboxLost):
        await sandbox.run_shell("true")
    await client.close()


def test_the_guides_examples_run(tmp_path: Path) -> None:
    """On a node of their own: the images that they make stay mounted for a while."""
    with _made(tmp_path) as node:
        _run_examples(node)


def _run_examples(node: Node) -> None:
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs/sdk.md").read_text(), re.DOTALL)
    # This node has no network; tests/network runs what needs one, on a fake internet.
    examples = [code for code in found if "network_" not in code]
    assert len(examples) >= 5
    env = {**os.environ, "DSEC_URL": node.url, "DSEC_API_KEY": node.api_key}
    for code in examples:
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, ""), code
    with dsec.sync.DSecClient(node.url, node.api_key) as client:
        assert client.sandboxes(state="running") == [], "each stops what it started"


async def test_refusals_are_named(client: dsec.DSecClient) -> None:
    with pytest.raises(dsec.Unsupported):
        await client.run_container(dsec.DSecContainerRunArgs(container_image=IMAGE, network_rules={"pypi": True}))
    with pytest.raises(dsec.NotFound):
        await client.run_container(dsec.DSecContainerRunArgs(container_image="no-such-image"))
    with pytest.raises(dsec.NotFound):
        await client.get("s" + "a" * 31)  # no id of this platform: its tag is wrong
    async with dsec.DSecClient(client._transport._endpoint.url, "wrong-key") as other:
        with pytest.raises(dsec.Unauthenticated):
            await other.me()


async def test_a_batch(client: dsec.DSecClient) -> None:
    args = dsec.DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=32, job="batch", labels={"k": "v"})
    boxes = [item async for item in client.run_containers(args, 6, window=3)]
    assert len({box.id for box in boxes if isinstance(box, dsec.Sandbox)}) == 6
    assert boxes[0].phases
    found = await client.sandboxes(job="batch", labels={"k": "v"}, state="running")
    assert {box.id for box in found} == {box.id for box in boxes}
    assert len(await client.stop_many(labels={"k": "v"})) == 6
    assert [box for box in await client.sandboxes(job="batch") if box.view.state is dsec.SandboxState.RUNNING] == []


async def test_commands(box: dsec.Sandbox) -> None:
    result = await box.exec(["/bin/sh", "-c", "cat; echo err >&2; exit 42"], stdin=b"\x00\xff in")
    assert (result.exit_code, result.stdout, result.stderr) == (42, b"\x00\xff in", b"err\n")
    result = await box.run_shell("echo $A; pwd; id -u", env={"A": "b c"}, cwd="/tmp", user="1234:5678")
    assert result.text.split("\n") == ["b c", "/tmp", "1234", ""]
    assert (await box.run_shell("kill -9 $$")).signal == 9
    with pytest.raises(dsec.CommandNotFound):
        await box.exec(["/no/such"])
    with pytest.raises(dsec.CommandFailed) as caught:
        await box.run_shell("echo seen; exit 3", check=True)
    assert caught.value.result.text == "seen\n"
    result = await box.run_shell("seq 1 100000", output_limit=1000)
    assert result.truncated and len(result.stdout) == 1000 and result.stdout_bytes_total == 588895
    first = await box.run_shell("echo $$", request_id="once")
    assert await box.run_shell("echo $$", request_id="once") == first
    with pytest.raises(dsec.Conflict):
        await box.run_shell("echo other", request_id="once")


async def test_timeout_ends_the_tree(box: dsec.Sandbox) -> None:
    began = time.monotonic()
    result = await box.run_shell("(while :; do date >> /tmp/ticks; sleep 0.05; done) & sleep 60", timeout=0.5)
    assert result.outcome is dsec.Outcome.TIMEOUT and time.monotonic() - began < 5
    assert "sleep" not in (await box.run_shell("ps -o args")).text


async def test_cancelling_an_exec_ends_its_tree(box: dsec.Sandbox) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await box.exec(["/bin/sh", "-c", "sleep 987 & sleep 986"])
    async with asyncio.timeout(5):
        while "98" in (await box.run_shell("ps -o args")).text:
            await asyncio.sleep(0.02)


async def test_sessions_keep_state(box: dsec.Sandbox) -> None:
    async with await box.open_session() as session:
        await session.run("cd /tmp; X=kept; f() { echo from $X; }")
        assert (await session.run("pwd; f")).text == "/tmp\nfrom kept\n"
        assert (await box.run_shell("echo $X", session=session.id)).text == "kept\n"
        assert [other.id for other in await box.sessions()] == [session.id]
        assert (await session.run("sh -c 'exit 9'")).exit_code == 9
    assert await box.sessions() == []


async def test_processes_outlive_their_client(node: Node, box: dsec.Sandbox) -> None:
    process = await box.start(
        ["/bin/sh", "-c", "echo one; read x; echo got $x; exit 5"], keep_stdin=True, request_id="p1"
    )
    async with dsec.DSecClient(node.url, node.api_key) as second:
        other = await (await second.get(box.id)).attach("p1", from_offset=2)
        async with aclosing(other.stream()) as pieces:
            assert (await anext(pieces)).data == b"e\n"
    await process.write(b"line\n")
    out = b"".join([piece.data async for piece in process.stream()])
    assert out == b"one\ngot line\n" and process.view.exit_code == 5
    assert [(view.id, view.running) for view in await box.processes()] == [("p1", False)]
    await process.stop()
    with pytest.raises(dsec.NotFound):
        await box.attach("p1")


async def test_input_and_output_of_any_size(box: dsec.Sandbox) -> None:
    data = os.urandom(3 << 20)
    process = await box.start(["/bin/cat"], keep_stdin=True, output_limit=4 << 20)

    async def feed() -> None:
        await process.write(data)
        await process.close_stdin()

    async with asyncio.TaskGroup() as group:
        group.create_task(feed())
        got = b"".join([piece.data async for piece in process.stream()])
    assert got == data


async def test_signals_and_waiting(box: dsec.Sandbox) -> None:
    process = await box.start(["/bin/sleep", "1000"])
    assert (await process.wait(timeout=0.1)).running
    await process.signal(signal.SIGTERM)
    view = await process.wait()
    assert (view.running, view.signal) == (False, signal.SIGTERM)


async def test_a_terminal(box: dsec.Sandbox) -> None:
    process = await box.start(["/bin/sh"], pty=dsec.Pty(100, 40))
    await process.resize(120, 50)
    await process.write(b"stty size; exit 3\n")
    out = b"".join([piece.data async for piece in process.stream()])
    assert b"50 120" in out and process.view.exit_code == 3


async def test_files_and_trees(box: dsec.Sandbox, tmp_path: Path) -> None:
    view = await box.files.write("/tmp/d/a", b"0123456789", mode=0o640)
    assert (view.size, view.mode, view.kind) == (10, 0o640, "file")
    assert await box.files.read("/tmp/d/a", offset=3, length=4) == b"3456"
    await box.files.write("/tmp/d/a", b"+", append=True)
    assert await box.files.read_text("/tmp/d/a") == "0123456789+"
    assert [entry.path.rsplit("/", 1)[-1] for entry in await box.files.list("/tmp/d")] == ["a"]
    await box.files.mkdir("/tmp/d/x/y")
    await box.files.move("/tmp/d/a", "/tmp/d/x/b")
    assert await box.files.exists("/tmp/d/x/b") and not await box.files.exists("/tmp/d/a")
    await box.files.remove("/tmp/d", recursive=True)
    with pytest.raises(dsec.NotFound):
        await box.files.read("/tmp/d/x/b")
    tree = tmp_path / "tree"
    (tree / "sub/empty").mkdir(parents=True)
    (tree / "sub/big").write_bytes(os.urandom(2_000_001))
    (tree / "run").write_bytes(b"#!/bin/sh\necho ran\n")
    (tree / "run").chmod(0o755)
    (tree / os.fsdecode(b"raw\xff")).write_bytes(b"raw")
    os.link(tree / "run", tree / "same")
    os.symlink("sub/big", tree / "soft")
    sent = await box.files.upload(tree, "/tmp/up/here")
    assert sent.refused == () and (await box.exec(["/tmp/up/here/run"])).text == "ran\n"
    got = await box.files.download("/tmp/up/here", tmp_path / "down")
    assert (got.entries, got.size, got.refused) == (sent.entries, sent.size, ())
    listing = sorted(str(path.relative_to(tree)) for path in tree.rglob("*"))
    assert sorted(str(path.relative_to(tmp_path / "down")) for path in (tmp_path / "down").rglob("*")) == listing
    for name in ("sub/big", "run", os.fsdecode(b"raw\xff")):
        assert (tmp_path / "down" / name).read_bytes() == (tree / name).read_bytes()
        assert (tmp_path / "down" / name).stat().st_mode == (tree / name).stat().st_mode
    assert (tmp_path / "down/run").stat().st_ino == (tmp_path / "down/same").stat().st_ino


async def test_a_hostile_tree_stays_below_the_target(box: dsec.Sandbox, tmp_path: Path) -> None:
    await box.run_shell(
        "mkdir -p /tmp/h/d; cd /tmp/h; echo x > d/f; ln -s /etc/passwd out; ln -s ../../.. up; ln -s /tmp/h/d/f in; mkfifo pipe",
        check=True,
    )
    got = await box.files.download("/tmp/h", tmp_path / "got")
    assert sorted(refusal.path for refusal in got.refused) == ["out", "pipe", "up"]
    assert (tmp_path / "got/in").read_text() == "x\n" and os.listdir(tmp_path) == ["got"]


async def test_watching(box: dsec.Sandbox) -> None:
    await box.files.mkdir("/tmp/w")
    async with aclosing(box.files.watch("/tmp/w")) as events:
        first = asyncio.get_running_loop().create_task(anext(events))
        while not first.done():  # the watch stands at some moment after it was asked for
            await box.run_shell("touch /tmp/w/new$$")
            await asyncio.sleep(0.02)
        assert first.result().path.startswith("/tmp/w/new")


async def test_http_into_the_sandbox(box: dsec.Sandbox) -> None:
    await box.files.write("/tmp/www/index.html", b"<p>inside")
    server = await box.start(["/bin/httpd", "-f", "-p", "127.0.0.1:8000", "-h", "/tmp/www"])
    async with asyncio.timeout(5):
        while True:
            try:
                answer = await box.http(8000, "GET", "/index.html")
                break
            except dsec.NotFound:
                await asyncio.sleep(0.02)
    assert (answer.status, answer.content) == (200, b"<p>inside")
    assert (await box.http(8000, "GET", "/none")).status == 404, "its own answer, not the platform's"
    with pytest.raises(dsec.NotFound):
        await box.http(9, "GET", "/")
    await server.stop()


async def test_info_metrics_and_renew(box: dsec.Sandbox) -> None:
    usage = await box.metrics()
    assert usage.memory_limit_bytes == 128 << 20
    renewed = await box.renew(1000)
    assert renewed.idle_deadline > time.time() + 900
    assert len({event.event for event in await box.events()}) > 1


def test_the_blocking_client(node: Node, tmp_path: Path) -> None:
    with dsec.sync.DSecClient(node.url, node.api_key) as client:
        with client.run_container(dsec.DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=64)) as box:
            assert box.run_shell("echo blocking").text == "blocking\n"
            box.files.write("/tmp/a", [b"1", b"2"])
            assert box.files.download("/tmp/a", tmp_path / "a").size == 2
            process = box.start(["/bin/cat"], keep_stdin=True)
            process.write(b"x")
            process.close_stdin()
            assert [piece.data for piece in process.stream()] == [b"x"]
            sandbox_id = box.id
        assert client.get(sandbox_id).view.state is dsec.SandboxState.GONE


def cli(node: Node, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "DSEC_URL": node.url, "DSEC_API_KEY": node.api_key}
    return subprocess.run(
        [sys.executable, "-m", "dsec", *words], env=env, input=stdin, capture_output=True, check=False, timeout=60
    )


@pytest.fixture
def box_id(node: Node) -> Iterator[str]:
    made = cli(node, "run", "--image", IMAGE, "--memory", "64", "--job", "cli")
    assert made.returncode == 0, made.stderr
    yield made.stdout.decode().strip()
    assert cli(node, "stop", made.stdout.decode().strip()).returncode == 0


def test_the_command_line(node: Node, box_id: str, tmp_path: Path) -> None:
    box = box_id
    for script, status in (("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)):
        assert cli(node, "exec", box, "sh", "-c", script).returncode == status
    assert cli(node, "exec", "--timeout", "0.3", box, "sleep", "60").returncode == 124
    assert cli(node, "exec", box, "no-such-command").returncode == 127
    assert cli(node, "exec", "-i", box, "cat", stdin=b"piped\xff").stdout == b"piped\xff"
    record = json.loads(cli(node, "exec", "--json", box, "echo", "x").stdout)
    assert (record["stdout"], record["outcome"]) == ("x\n", "exited")
    (tmp_path / "f").write_bytes(b"copied")
    assert cli(node, "cp", str(tmp_path / "f"), f"{box}:/tmp/").returncode == 0
    assert cli(node, "cp", f"{box}:/tmp/f", str(tmp_path / "g")).returncode == 0
    assert (tmp_path / "g").read_bytes() == b"copied"
    assert box in cli(node, "ps", "--job", "cli").stdout.decode()
    assert json.loads(cli(node, "inspect", box).stdout)[0]["usage"]["memory_limit_bytes"] == 64 << 20
    with dsec.sync.DSecClient(node.url, node.api_key) as client:
        client.get(box).start(["/bin/sh", "-c", "echo logged"], request_id="p").wait()
    assert cli(node, "logs", box, "p").stdout == b"logged\n"
    assert cli(node, "run", "--rm", "--image", IMAGE, "--memory", "64", "--", "sh", "-c", "exit 6").returncode == 6
    assert cli(node, "stop", "--job", "cli").stdout.decode().strip() == box


def test_an_interactive_shell(node: Node, box_id: str) -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "DSEC_URL": node.url, "DSEC_API_KEY": node.api_key}
    words = [sys.executable, "-m", "dsec", "shell", box_id]
    process = subprocess.Popen(words, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    os.write(ours, b"echo $((6*7)); exit 4\n")
    seen = b""
    try:
        while b"\n42" not in seen:
            seen += os.read(ours, 1000)
    finally:
        assert process.wait(timeout=30) == 4, seen
        os.close(ours)
