"""The state directory: one server at a time."""

import subprocess
import sys
from pathlib import Path

import pytest

from dsec.cluster.state import Credentials, StateDirectory
from dsec.model.errors import Conflict
from unit.cluster.fakes import RealClock


@pytest.fixture
def state(tmp_path: Path) -> StateDirectory:
    state = StateDirectory(tmp_path / "state")
    state.make()
    return state


def test_two_servers_never_share_a_state(state: StateDirectory) -> None:
    assert state.holder() is None
    hold = "import sys; from pathlib import Path; from dsec.cluster.state import StateDirectory\nwith StateDirectory(Path(sys.argv[1])).locked():\n    print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(state.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == b"held\n"
        assert state.holder() == other.pid
        with pytest.raises(Conflict, match=str(other.pid)), state.locked():
            pytest.fail("locked twice")
        other.stdin.close()
    assert state.holder() is None
    with state.locked():
        pass


def test_a_dead_server_holds_nothing(state: StateDirectory) -> None:
    die = "import os, sys; from pathlib import Path; from dsec.cluster.state import StateDirectory\nwith StateDirectory(Path(sys.argv[1])).locked():\n    os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", die, str(state.path)], check=False).returncode == -9
    assert state.holder() is None


def test_a_child_left_behind_does_not_hold_the_directory(state: StateDirectory) -> None:
    fork = (
        "import os, sys; from pathlib import Path; from dsec.cluster.state import StateDirectory\n"
        "with StateDirectory(Path(sys.argv[1])).locked():\n"
        "    if os.fork() == 0:\n        sys.stdin.read(); os._exit(0)\n"
        "    os.kill(os.getpid(), 9)"
    )
    with subprocess.Popen([sys.executable, "-c", fork, str(state.path)], stdin=subprocess.PIPE) as server:
        while server.poll() is None:
            server.wait(10)
        assert state.holder() is None
        with state.locked():
            pass
        assert server.stdin is not None
        server.stdin.close()


def test_secrets_are_for_the_owner_alone_and_last(state: StateDirectory) -> None:
    assert state.path.stat().st_mode & 0o777 == 0o700
    key = state.id_key(RealClock())
    assert len(key) == 32 and state.id_key(RealClock()) == key
    assert state.credentials() is None
    kept = Credentials(url="https://x", api_key="dsec_", ca_file="/c")
    state.keep_credentials(kept)
    assert state.credentials() == kept
    for name in ("id.key", "credentials.json"):
        assert (state.path / name).stat().st_mode & 0o777 == 0o600
