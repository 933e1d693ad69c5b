"""The life of a sandbox: one table. Pure: time comes in as a value, work goes out as values.

What a start acquires is owed from the moment it is asked for (`pending`), and undone in reverse order from `held`. The
shell around `step` (edge/lifecycle.py) writes an event to the journal, carries out the actions, and feeds what came of them.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from dsec.model.outcome import End, is_infra_end
from dsec.rules import ttl

__all__ = [
    "NEEDS", "TABLE", "Abort", "Action", "Died", "Event", "Expired", "Failed", "Kill", "Killed", "Lost", "Mount", "Mounted",
    "Need", "Observed", "Renewed", "Requested", "SandboxLife", "Start", "Started", "State", "StopAsked", "Stuck", "Unmount", "Unmounted",
    "Woken", "acquired", "of_platform", "recover", "released", "step",
]  # fmt: skip

Need = Literal["mounts", "cell"]
NEEDS: tuple[Need, ...] = ("mounts", "cell")

RETRY_FIRST = 0.2
RETRY_MOST = 30.0


class State(StrEnum):
    """new: nothing asked yet; gone: nothing left."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    GONE = "gone"


class SandboxLife(Struct, frozen=True):
    """All that the table knows of one sandbox. `incarnation`: events of an older one are stale. `held`: in order of
    acquisition. `pending`: asked for, not yet answered. `stuck`: undo attempts that failed in a row. `end`: why it ends."""

    state: State = State.NEW
    incarnation: int = 0
    deadlines: ttl.Deadlines = ttl.Deadlines(None, None, None)
    held: tuple[Need, ...] = ()
    pending: Need | None = None
    stuck: int = 0
    retry_at: float | None = None
    end: End | None = None
    reason: str = ""
    incident: str = ""
    ended_at: float | None = None


class Event(Struct, frozen=True, tag=True):
    """Something that happened."""


class Requested(Event, frozen=True):
    """A caller asked for the sandbox. Seconds; None: no such end."""

    idle_seconds: float | None
    absolute_seconds: float | None


class Mounted(Event, frozen=True):
    """Its layers and volumes are available on this node."""

    incarnation: int


class Started(Event, frozen=True):
    """Its cell runs."""

    incarnation: int


class Failed(Event, frozen=True):
    """What was pending did not come about. `left`: something may remain of it, so its undo is still owed. `incident`: id under
    which the log tells of an end that is the platform's fault, here and below."""

    incarnation: int
    left: bool
    end: End
    reason: str
    incident: str = ""


class Died(Event, frozen=True):
    """It ended by itself while it ran."""

    incarnation: int
    end: End
    reason: str
    incident: str = ""


class StopAsked(Event, frozen=True):
    """Someone wants it gone."""

    end: End = End.STOPPED
    reason: str = ""


class Expired(Event, frozen=True):
    """The time of `end` (idle or expired) has come."""

    end: End


class Renewed(Event, frozen=True):
    """A caller moved the idle end. `seconds` None: by the sandbox's own idle time."""

    seconds: float | None


class Killed(Event, frozen=True):
    """Nothing is left of its cell."""

    incarnation: int


class Unmounted(Event, frozen=True):
    """It holds no layer or volume any more."""

    incarnation: int


class Stuck(Event, frozen=True):
    """An undo failed; it will be tried again."""

    incarnation: int
    reason: str


class Woken(Event, frozen=True):
    """The time to try an undo again has come."""

    incarnation: int


class Observed(Event, frozen=True):
    """Something worth telling that changes nothing: `what` is a word such as out_of_memory, `count` how often."""

    what: str
    detail: str = ""
    count: int = 0


class Lost(Event, frozen=True):
    """The edge restarted and could not take the sandbox over: it had not started, or died meanwhile, or is broken."""

    incarnation: int
    end: End
    reason: str
    incident: str = ""


class Action(Struct, frozen=True):
    """Something to be done."""

    incarnation: int


class Mount(Action, frozen=True):
    """Make layers and volumes available; answer Mounted or Failed."""


class Start(Action, frozen=True):
    """Start the cell; answer Started or Failed."""


class Abort(Action, frozen=True):
    """Give up what is pending, soon; it is still answered."""


class Kill(Action, frozen=True):
    """End the cell and remove all of it; answer Killed or Stuck."""


class Unmount(Action, frozen=True):
    """Let go of layers and volumes; answer Unmounted or Stuck."""


Step = tuple[SandboxLife, tuple[Action, ...]]
_Rule = Callable[[SandboxLife, Any, float], Step]

_ACQUIRE: dict[Need, type[Action]] = {"mounts": Mount, "cell": Start}
_RELEASE: dict[Need, type[Action]] = {"mounts": Unmount, "cell": Kill}
_ACQUIRED: dict[type[Event], Need] = {Mounted: "mounts", Started: "cell"}
_RELEASED: dict[type[Event], Need] = {Unmounted: "mounts", Killed: "cell"}


def acquired(need: Need, incarnation: int) -> Event:
    """The event that `need` has been acquired."""
    return Mounted(incarnation) if need == "mounts" else Started(incarnation)


def released(need: Need, incarnation: int) -> Event:
    """The event that `need` has been released."""
    return Unmounted(incarnation) if need == "mounts" else Killed(incarnation)


def _requested(life: SandboxLife, event: Requested, now: float) -> Step:
    incarnation = life.incarnation + 1
    deadlines = ttl.begin(event.idle_seconds, event.absolute_seconds, now)
    life = replace(life, state=State.STARTING, incarnation=incarnation, deadlines=deadlines, pending=NEEDS[0])
    return life, (_ACQUIRE[NEEDS[0]](incarnation),)


def _acquired(life: SandboxLife, event: Event, now: float) -> Step:
    need = _ACQUIRED[type(event)]
    if need != life.pending:
        return life, ()
    held = (*life.held, need)
    if len(held) < len(NEEDS):
        following = NEEDS[len(held)]
        return replace(life, held=held, pending=following), (_ACQUIRE[following](life.incarnation),)
    deadlines = ttl.active(life.deadlines, now)  # the idle time begins when the caller can use it
    return replace(life, state=State.RUNNING, held=held, pending=None, deadlines=deadlines), ()


def _acquired_late(life: SandboxLife, event: Event, now: float) -> Step:
    """It came while stopping: hold it, then undo it."""
    need = _ACQUIRED[type(event)]
    if need != life.pending:
        return life, ()
    return _undo(replace(life, held=(*life.held, need), pending=None))


def _undo(life: SandboxLife) -> Step:
    life = replace(life, stuck=0, retry_at=None)
    if life.held:
        return replace(life, state=State.STOPPING), (_RELEASE[life.held[-1]](life.incarnation),)
    return replace(life, state=State.GONE), ()


def _ending(life: SandboxLife, end: End, reason: str, now: float, incident: str = "") -> Step:
    """Begins the end. What is pending is aborted and waited for: its answer always comes."""
    life = replace(life, state=State.STOPPING, end=end, reason=reason, incident=incident, ended_at=now)
    if life.pending is not None:
        return life, (Abort(life.incarnation),)
    return _undo(life)


def _stop_asked(life: SandboxLife, event: StopAsked, now: float) -> Step:
    return _ending(life, event.end, event.reason, now)


def _stop_before(life: SandboxLife, event: StopAsked, now: float) -> Step:
    return replace(life, state=State.GONE, end=event.end, reason=event.reason, ended_at=now), ()


def _without_pending(life: SandboxLife, event: Failed) -> SandboxLife:
    held = (*life.held, life.pending) if event.left and life.pending is not None else life.held
    return replace(life, held=held, pending=None)


def _failed(life: SandboxLife, event: Failed, now: float) -> Step:
    return _ending(_without_pending(life, event), event.end, event.reason, now, event.incident)


def _failed_late(life: SandboxLife, event: Failed, now: float) -> Step:
    return (life, ()) if life.pending is None else _undo(_without_pending(life, event))


def _died(life: SandboxLife, event: Died, now: float) -> Step:
    return _ending(life, event.end, event.reason, now, event.incident)


def _expired(life: SandboxLife, event: Expired, now: float) -> Step:
    return _ending(life, event.end, "", now)


def _renewed(life: SandboxLife, event: Renewed, now: float) -> Step:
    return replace(life, deadlines=ttl.renewed(life.deadlines, event.seconds, now)), ()


def _released(life: SandboxLife, event: Event, now: float) -> Step:
    if life.held[-1:] != (_RELEASED[type(event)],) or life.pending is not None:
        return life, ()
    return _undo(replace(life, held=life.held[:-1]))


def _stuck(life: SandboxLife, event: Stuck, now: float) -> Step:
    if life.pending is not None or life.retry_at is not None:
        return life, ()
    wait = min(RETRY_MOST, RETRY_FIRST * 2.0 ** min(life.stuck, 16))
    return replace(life, stuck=life.stuck + 1, retry_at=now + wait), ()


def _woken(life: SandboxLife, event: Woken, now: float) -> Step:
    if life.retry_at is None or now < life.retry_at or not life.held:
        return life, ()
    return replace(life, retry_at=None), (_RELEASE[life.held[-1]](life.incarnation),)


def _lost(life: SandboxLife, event: Lost, now: float) -> Step:
    """After a restart: what was pending may be there in part, so it is held and undone."""
    if life.pending is not None:
        life = replace(life, held=(*life.held, life.pending), pending=None)
    if life.state is State.STOPPING:
        return _undo(life)
    return _ending(life, event.end, event.reason, now, event.incident)


TABLE: dict[tuple[State, type[Event]], _Rule] = {
    (State.NEW, Requested): _requested,
    (State.NEW, StopAsked): _stop_before,
    (State.STARTING, Mounted): _acquired,
    (State.STARTING, Started): _acquired,
    (State.STARTING, Failed): _failed,
    (State.STARTING, StopAsked): _stop_asked,
    (State.STARTING, Expired): _expired,
    (State.STARTING, Lost): _lost,
    (State.RUNNING, Died): _died,
    (State.RUNNING, StopAsked): _stop_asked,
    (State.RUNNING, Expired): _expired,
    (State.RUNNING, Renewed): _renewed,
    (State.RUNNING, Lost): _lost,
    (State.STOPPING, Mounted): _acquired_late,
    (State.STOPPING, Started): _acquired_late,
    (State.STOPPING, Failed): _failed_late,
    (State.STOPPING, Killed): _released,
    (State.STOPPING, Unmounted): _released,
    (State.STOPPING, Stuck): _stuck,
    (State.STOPPING, Woken): _woken,
    (State.STOPPING, Lost): _lost,
}
"""What each event does in each state; a pair that is not here does nothing."""


def of_platform(event: Event) -> bool:
    """True for an end that is the platform's fault and has no incident yet."""
    return isinstance(event, Failed | Died | Lost) and is_infra_end(event.end) and not event.incident


def step(life: SandboxLife, event: Event, now: float) -> Step:
    """The life after `event` at `now` (Unix seconds), and what to do. Events of another incarnation do nothing."""
    if getattr(event, "incarnation", life.incarnation) != life.incarnation:
        return life, ()
    rule = TABLE.get((life.state, type(event)))
    return (life, ()) if rule is None else rule(life, event, now)


def recover(life: SandboxLife, alive: bool, *, rebooted: bool = False) -> Event | None:
    """After a restart of the edge: the event to journal and step, None where nothing is to be done.

    `alive`: the kernel says that the cell of a running sandbox runs. A sandbox that had not finished starting is ended, as
    its caller is gone; one that was stopping goes on stopping (releasing what is gone already is allowed). `rebooted`: the host
    was, so nothing of before runs.
    """
    if rebooted and life.state in (State.STARTING, State.RUNNING):
        return Lost(life.incarnation, End.NODE_LOST, "the host was rebooted")
    if life.state is State.STARTING:
        return Lost(life.incarnation, End.INTERNAL, "the edge restarted while this sandbox was starting")
    if life.state is State.RUNNING and not alive:
        return Lost(life.incarnation, End.RUNTIME, "the sandbox died while the edge was away")
    if life.state is State.STOPPING:
        return Lost(life.incarnation, life.end or End.INTERNAL, life.reason)
    return None
