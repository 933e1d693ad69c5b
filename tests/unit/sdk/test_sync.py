"""The blocking client at work."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec
import dsec.sync
from apifake import KEY, Server, serving_aside


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Server]:
    with serving_aside(tmp_path) as server:
        yield server


@pytest.fixture
def client(fake: Server) -> Iterator[dsec.sync.DSecClient]:
    with dsec.sync.DSecClient(fake.url, KEY) as made:
        yield made


ARGS = dsec.DSecContainerRunArgs(container_image="python-3.11", job="j")


def test_a_whole_life(fake: Server, client: dsec.sync.DSecClient, tmp_path: Path) -> None:
    with client.run_container(ARGS) as box:
        assert isinstance(box, dsec.sync.Sandbox)
        assert box.exec(["echo", "x"]).text == "x\n"
        with pytest.raises(dsec.CommandFailed):
            box.run_shell("exit 1", check=True)
        with box.open_session() as session:
            assert box.run_shell("echo s", session=session).text == "s\n"
        process = box.start(["cat"], keep_stdin=True)
        process.write(b"to and fro")
        process.close_stdin()
        assert b"".join(piece.data for piece in process.stream()) == b"to and fro"
        assert process.wait().exit_code == 0
        assert isinstance(box.attach(process.id), dsec.sync.Process)
        assert box.files.write("/w/a", [b"1", b"2", b"3"]).size == 3
        assert b"".join(box.files.read_stream("/w/a")) == b"123"
        assert box.files.download("/w/a", tmp_path / "out").size == 3
        assert [view.path for view in box.files.list("/w")] == ["/w/a"]
    assert fake.sandboxes[box.id].state is dsec.SandboxState.GONE


def test_batch_and_lists(fake: Server, client: dsec.sync.DSecClient) -> None:
    fake.faults.refuse_batch = {1}
    items = list(client.run_containers(ARGS, 4))
    assert sum(isinstance(item, dsec.sync.Sandbox) for item in items) == 3
    assert sum(isinstance(item, dsec.SandboxFailed) for item in items) == 1
    assert all(isinstance(box, dsec.sync.Sandbox) for box in client.sandboxes(job="j"))
    assert len(client.stop_many(job="j")) == 3


def test_leaving_a_loop_early_lets_go(fake: Server, client: dsec.sync.DSecClient) -> None:
    box = client.run_container(ARGS)
    process = box.start(["sh", "-c", "echo a; exec sleep 60"])
    for piece in process.stream():
        assert piece.data == b"a\n"
        break
    assert process.info().running
    process.stop()


def test_pending_names_are_unsupported(client: dsec.sync.DSecClient) -> None:
    with pytest.raises(dsec.Unsupported):
        client.run_container(ARGS).pause()
    with pytest.raises(dsec.Unsupported):
        client.run_microvm(ARGS)


def test_not_open_and_forked_clients_are_refused(fake: Server) -> None:
    client = dsec.sync.DSecClient(fake.url, KEY)
    with pytest.raises(dsec.InvalidArgument, match="not open"):
        client.me()
    client.close()
    with client:
        child = os.fork()
        if child == 0:
            try:
                client.me()
            except dsec.InvalidArgument:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert client.me().principal == "root"
    with client:  # it can be opened again
        assert client.me().principal == "root"


def test_an_interrupt_cancels_the_command(fake: Server, client: dsec.sync.DSecClient) -> None:
    box = client.run_container(ARGS)

    def interrupt() -> None:
        while not fake.executed:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        box.exec(["sleep", "60"])
    thread.join()
    for _ in range(1000):
        if fake.cancelled:
            break
        box.info()
    assert fake.cancelled == 1
