"""The lifecycle table against a kernel that may fail, be slow, repeat itself, lose answers, and lose the edge at any point."""

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec import json

from dsec.model.outcome import End
from dsec.rules import lifecycle as table
from dsec.rules.lifecycle import SandboxLife, State

OVER = (State.NEW, State.GONE)


class World(RuleBasedStateMachine):
    """`kernel`: what exists. `todo`: actions under way. `journal`: events as bytes, all that survives a crash."""

    def __init__(self) -> None:
        super().__init__()
        self.life = SandboxLife()
        self.now = 1000.0
        self.todo: list[table.Action] = []
        self.kernel: set[str] = set()
        self.journal: list[tuple[bytes, float]] = []

    def feed(self, event: table.Event) -> None:
        self.journal.append((json.encode(event), self.now))
        self.life, actions = table.step(self.life, event, self.now)
        self.todo += actions

    def carry_out(self, action: table.Action, ok: bool, left: bool) -> table.Event | None:
        n = action.incarnation
        match action:
            case table.Mount() | table.Start():
                need: table.Need = "mounts" if isinstance(action, table.Mount) else "cell"
                if ok or left:
                    self.kernel.add(need)
                return table.acquired(need, n) if ok else table.Failed(n, left, End.RUNTIME, "planted")
            case table.Kill() | table.Unmount():
                need = "cell" if isinstance(action, table.Kill) else "mounts"
                if not ok:
                    return table.Stuck(n, "planted")
                self.kernel.discard(need)
                return table.released(need, n)
        return None

    @initialize(idle=st.none() | st.floats(1, 10), absolute=st.none() | st.floats(1, 10))
    def request(self, idle: float | None, absolute: float | None) -> None:
        self.feed(table.Requested(idle, absolute))

    @precondition(lambda self: self.todo)
    @rule(i=st.integers(0, 9), ok=st.sampled_from([True, True, True, False]), left=st.booleans(), twice=st.booleans())
    def answer(self, i: int, ok: bool, left: bool, twice: bool) -> None:
        event = self.carry_out(self.todo.pop(i % len(self.todo)), ok, left)
        if event is not None:
            self.feed(event)
            if twice:
                self.feed(event)

    @rule()
    def stop(self) -> None:
        self.feed(table.StopAsked())
        assert self.life.state in (State.STOPPING, State.GONE)

    @rule(seconds=st.none() | st.floats(0.1, 20))
    def renew(self, seconds: float | None) -> None:
        absolute = self.life.deadlines.absolute
        self.feed(table.Renewed(seconds))
        assert self.life.deadlines.absolute == absolute

    @rule(end=st.sampled_from([End.IDLE, End.EXPIRED]))
    def expire(self, end: End) -> None:
        self.feed(table.Expired(end))

    @precondition(lambda self: self.life.state is State.RUNNING)
    @rule()
    def die(self) -> None:
        self.feed(table.Died(self.life.incarnation, End.RUNTIME, "planted"))

    @rule(
        stale=st.sampled_from([table.Mounted(99), table.Started(99), table.Killed(99), table.Died(99, End.RUNTIME, "")])
    )
    def old_news(self, stale: table.Event) -> None:
        before = self.life
        self.feed(stale)
        assert self.life == before

    @rule(dt=st.floats(0, 40))
    def wake(self, dt: float) -> None:
        self.now += dt
        self.feed(table.Woken(self.life.incarnation))

    @rule(done=st.lists(st.booleans(), min_size=3, max_size=3), dies=st.booleans())
    def crash(self, done: list[bool], dies: bool) -> None:
        """The edge dies: actions under way either happened unreported or never; the journal and the kernel are left."""
        for action, happened in zip(self.todo, done, strict=False):
            if happened:
                self.carry_out(action, True, False)
        self.todo = []
        if dies:
            self.kernel.discard("cell")
        life = SandboxLife()
        for data, at in self.journal:
            life, _ = table.step(life, json.decode(data, type=_EVENT), at)
        assert life == self.life, "the journal alone must give the same life"
        event = table.recover(life, "cell" in self.kernel)
        if event is not None:
            self.feed(event)

    @invariant()
    def nothing_leaks(self) -> None:
        owed = set(self.life.held) | {self.life.pending} - {None}
        assert self.kernel <= owed, "in the kernel, but nobody owes its undo"
        if self.life.state is State.GONE:
            assert not self.kernel and self.life.end is not None
        if self.life.state is State.RUNNING:
            assert self.life.held == table.NEEDS
        if self.life.state not in OVER and self.life.state is not State.RUNNING:
            assert self.todo or self.life.retry_at is not None, "nothing under way, so it would never end"

    def teardown(self) -> None:
        """Any life, left alone, ends clean."""
        for _ in range(60):
            if self.life.state in OVER:
                break
            if self.todo:
                event = self.carry_out(self.todo.pop(0), True, False)
                if event is not None:
                    self.feed(event)
            elif self.life.retry_at is not None:
                self.now = self.life.retry_at
                self.feed(table.Woken(self.life.incarnation))
            else:
                self.feed(table.StopAsked())
        assert self.life.state in OVER
        assert not self.kernel


_EVENT = (
    table.Requested | table.Mounted | table.Started | table.Failed | table.Died | table.StopAsked | table.Expired
    | table.Renewed | table.Killed | table.Unmounted | table.Stuck | table.Woken | table.Lost | table.Observed
)  # fmt: skip

TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.mark.slow
def test_planted_faults_are_caught() -> None:
    """The machine above is no better than its power to see a broken table: break it, one rule at a time, and look."""
    survivors = []
    quick = settings(
        max_examples=400,
        stateful_step_count=25,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    for pair in [
        (State.STARTING, table.Failed),
        (State.STARTING, table.StopAsked),
        (State.STOPPING, table.Started),
        (State.STOPPING, table.Killed),
        (State.STOPPING, table.Woken),
        (State.STOPPING, table.Stuck),
        (State.STARTING, table.Lost),
        (State.STOPPING, table.Failed),
    ]:
        rule_of = table.TABLE.pop(pair)
        try:
            run_state_machine_as_test(World, settings=quick)
            survivors.append(pair)
        except AssertionError:
            pass
        finally:
            table.TABLE[pair] = rule_of
    assert not survivors
