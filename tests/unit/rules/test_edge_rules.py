"""TTL, admission, the ordered log's decisions, and a command's surroundings."""

from typing import Any

import pytest
from msgspec.structs import replace

from dsec.model.errors import Busy, Conflict, Interrupted, InvalidArgument, Unsupported
from dsec.model.layers import ImageConfig
from dsec.model.network import NetworkRule
from dsec.model.outcome import End
from dsec.model.plan import Capabilities
from dsec.model.spec import MountSpec, SandboxSpec
from dsec.rules import lifecycle as table
from dsec.rules import ttl
from dsec.rules.admit import MIB, Committed, Room, admit, check
from dsec.rules.environ import DEFAULT_PATH, surroundings, within
from dsec.rules.oplog import Decision, Operation, Phase, Retention, decide

SPEC = SandboxSpec(container_image="base")


def test_idle_end_moves_with_activity_and_renewal_only() -> None:
    ends = ttl.begin(10.0, 100.0, 0.0)
    assert ttl.due(ends, busy=False) == 10.0
    assert ttl.verdict(ends, False, 9.9) is None
    assert ttl.verdict(ends, False, 10.0) is End.IDLE
    assert ttl.verdict(ends, True, 50.0) is None
    ends = ttl.active(ends, 5.0)
    assert ends.idle == 15.0
    ends = ttl.renewed(ends, 60.0, 5.0)
    assert ttl.active(ends, 6.0).idle == 65.0, "activity does not shorten what a renewal gave"
    assert ttl.renewed(ends, 1.0, 6.0).idle == 7.0, "a renewal may shorten"
    assert ttl.renewed(ends, None, 6.0).idle == 16.0
    assert ends.absolute == 100.0
    assert ttl.verdict(ends, True, 100.0) is End.EXPIRED


def test_no_idle_end_stays_none() -> None:
    ends = ttl.begin(None, None, 0.0)
    assert ttl.renewed(ends, 5.0, 1.0) == ends == ttl.active(ends, 9.0)
    assert ttl.due(ends, False) is None and ttl.verdict(ends, False, 1e12) is None


def test_a_restart_grants_what_may_be_unrecorded() -> None:
    ends = ttl.begin(10.0, None, 0.0)
    assert ttl.restored(ends, 4.0, 99.0).idle == 4.0 + ttl.FLUSH_SECONDS + 10.0
    assert ttl.restored(ends, 4.0, 4.5).idle == 4.5 + 10.0, "what was active after now?"
    assert ttl.restored(ends, ttl.ATTACHED, 99.0).idle == 99.0 + 10.0
    assert ttl.restored(ends, None, 99.0) == ends


def test_stop_before_anything_was_asked() -> None:
    life, actions = table.step(table.SandboxLife(), table.StopAsked(), 1.0)
    assert (life.state, life.end, actions) == (table.State.GONE, End.STOPPED, ())


def test_undo_is_retried_with_growing_waits() -> None:
    life, _ = table.step(table.SandboxLife(), table.Requested(None, None), 0.0)
    for event in (table.Mounted(1), table.Started(1), table.StopAsked()):
        life, actions = table.step(life, event, 0.0)
    assert [type(action) for action in actions] == [table.Kill]
    waits = []
    now = 0.0
    for _ in range(12):
        life, _ = table.step(life, table.Stuck(1, "no"), now)
        assert life.retry_at is not None
        waits.append(life.retry_at - now)
        assert table.step(life, table.Woken(1), now)[1] == ()
        now = life.retry_at
        life, actions = table.step(life, table.Woken(1), now)
        assert [type(action) for action in actions] == [table.Kill]
    assert waits == sorted(waits) and waits[0] == table.RETRY_FIRST and waits[-1] == pytest.approx(table.RETRY_MOST)
    life, actions = table.step(life, table.Killed(1), now)
    assert [type(action) for action in actions] == [table.Unmount]
    life, _ = table.step(life, table.Unmounted(1), now)
    assert life.state is table.State.GONE


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("container_image", {"container_image": ""}),
        ("memory_limit_mb", {"memory_limit_mb": 0}),
        ("cpu_cores_limit", {"cpu_cores_limit": -1.0}),
        ("cpu_cores_limit", {"cpu_cores_limit": float("nan")}),
        ("pids_limit", {"pids_limit": 1}),
        ("ttl_running_stop", {"ttl_running_stop": 0.0}),
        ("ttl_absolute", {"ttl_absolute": 1e12}),
        ("env.A=B", {"env": {"A=B": "c"}}),
        ("env.A", {"env": {"A": "a\0b"}}),
        ("labels", {"labels": {"a": "x" * 300}}),
        ("hostname", {"hostname": "-a"}),
        ("cwd", {"cwd": "w"}),
        ("init_user", {"init_user": "a\nb"}),
        ("mounts[0]", {"mounts": (MountSpec(target="/a"),)}),
        ("mounts[0].target", {"mounts": (MountSpec(target="/a/../b", volume="v"),)}),
        ("mounts[0].target", {"mounts": (MountSpec(target="/", volume="v"),)}),
    ],
)
def test_impossible_values_are_named(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as error:
        check(replace(SPEC, **change))
    assert error.value.fields["field"] == field


def test_network_is_refused_by_name() -> None:
    offers = {"container": Capabilities(backend="container", available=True, why_not={"network": "no BPF"})}
    room, none = Room(memory_bytes=1 << 40), Committed(sandboxes=0, memory_bytes=0, memory_available=1 << 40)
    admit(replace(SPEC, network_rules={"npm": False}), offers, room, none)
    for change, feature in (
        ({"network_rules": {"npm": False, "pypi": True}}, "network_rules.pypi"),
        ({"network_phases": {"setup": {"npm": NetworkRule(before="2024-05-01")}}}, "network_phases.setup.npm"),
        ({"network_group": "task"}, "network_group"),
    ):
        with pytest.raises(Unsupported, match="no BPF") as error:
            admit(replace(SPEC, **change), offers, room, none)
        assert error.value.fields["feature"] == feature


def test_admission() -> None:
    backends = {
        "container": Capabilities(backend="container", available=True),
        "microvm": Capabilities(backend="microvm", available=False, why_not={"kvm": "no /dev/kvm"}),
    }
    room = Room(memory_bytes=4096 * MIB, memory_overcommit=2.0, sandboxes=3)
    free = Committed(sandboxes=0, memory_bytes=0, memory_available=4096 * MIB)
    admit(SPEC, backends, room, free)
    admit(SPEC, backends, room, replace(free, sandboxes=2, memory_bytes=6144 * MIB))
    for spec, feature in (
        (replace(SPEC, backend="fullvm"), "backend.fullvm"),
        (replace(SPEC, backend="microvm"), "backend.microvm"),
        (replace(SPEC, memory_limit_mb=8193), "memory_limit_mb"),
    ):
        with pytest.raises(Unsupported) as refused:
            admit(spec, backends, room, free)
        assert refused.value.fields["feature"] == feature
    for committed, limit in (
        (replace(free, sandboxes=3), "sandboxes"),
        (replace(free, memory_bytes=6145 * MIB), "memory"),
        (replace(free, memory_available=MIB), "memory_available"),
    ):
        with pytest.raises(Busy) as busy:
            admit(SPEC, backends, room, committed)
        assert (busy.value.fields["limit"], busy.value.fields["retry_after"]) == (limit, 1.0)


def test_the_ordered_log_never_runs_twice() -> None:
    kept = Retention(seconds=10.0)
    known = Operation(1, "r", "exec", b"f", Phase.ENDED, 100.0, kept=True)

    def decided(
        known: Operation | None, *, kind: str = "exec", mark: bytes = b"f", running: bool = False, now: float = 101.0
    ) -> Decision:
        return decide(known, kind, mark, running=running, now=now, retention=kept)

    assert decided(None) is Decision.RUN
    assert decided(known) is Decision.REPLAY
    assert decided(replace(known, phase=Phase.BEGUN), running=True) is Decision.WAIT
    for refused in (
        lambda: decided(known, mark=b"g"),
        lambda: decided(known, kind="process"),
        lambda: decided(known, now=110.0),
        lambda: decided(replace(known, kept=False)),
        lambda: decided(replace(known, phase=Phase.CANCELLED)),
        lambda: decided(replace(known, phase=Phase.BEGUN), mark=b"g", running=True),
    ):
        with pytest.raises(Conflict):
            refused()
    with pytest.raises(Interrupted) as interrupted:
        decided(replace(known, phase=Phase.BEGUN))
    assert not interrupted.value.retryable, "asking again gives the same answer"


def test_surroundings_image_then_sandbox_then_call() -> None:
    config = ImageConfig(env=("PATH=/opt/x:/bin", "A=b c", "B=image"), user="1234:5678", working_dir="/w")
    base = surroundings(config, replace(SPEC, env={"B": "spec"}))
    assert base.flat == ("PATH=/opt/x:/bin", "A=b c", "B=spec")
    assert within(base, {}, None, None) == (base.flat, "/w", True, "1234:5678")
    env, cwd, make, user = within(base, {"B": "call", "C": "d"}, "/tmp", "root")
    assert set(env) == {"PATH=/opt/x:/bin", "A=b c", "B=call", "C=d", "HOME=/root"}
    assert (cwd, make, user) == ("/tmp", False, "root")
    plain = surroundings(ImageConfig(), SPEC)
    assert plain.env == {"PATH": DEFAULT_PATH, "HOME": "/root"} and (plain.cwd, plain.user) == ("/", "0")
    assert "HOME=/root" not in within(plain, {}, None, "nobody")[0]
    for bad, field in ((({"": "x"}, None, None), "env."), (({}, "rel", None), "cwd"), (({}, None, ""), "user")):
        with pytest.raises(InvalidArgument) as error:
            within(plain, *bad)
        assert error.value.fields["field"] == field


def test_shared_memory_is_never_without_a_bound() -> None:
    """A tmpfs of size 0 has none."""
    with pytest.raises(InvalidArgument, match="shm_size_mb: 1 to"):
        check(replace(SPEC, shm_size_mb=0))
