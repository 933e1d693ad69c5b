"""Placement engine: the watcher's view, with its own placements laid over what the view does not show yet (paper, layer 3)."""

from collections import defaultdict, deque
from dataclasses import dataclass

from dsec.model.settings import check_positive, setting
from dsec.model.spec import SandboxSpec
from dsec.ports.clock import Clock
from dsec.ports.cluster import EdgeStatus, Watcher
from dsec.rules import placement as rules

__all__ = ["PlacementSettings", "SamplingPlacement"]

_RECENT_MAX = 1 << 16


@dataclass(frozen=True)
class PlacementSettings:
    """Settings of placement."""

    sample: int = setting(2, "how many edges with room are drawn at random; the least loaded of them is taken")
    retry_after: float = setting(1.0, "seconds after which a client refused for lack of room is told to try again")

    def __post_init__(self) -> None:
        check_positive(self, "sample", "retry_after")


class SamplingPlacement:
    """The Placement port. Keeps no durable state: after a restart the watcher's view is all it knows."""

    def __init__(self, watcher: Watcher, clock: Clock, settings: PlacementSettings) -> None:
        self._watcher = watcher
        self._clock = clock
        self._settings = settings
        self._recent: dict[int, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=_RECENT_MAX))

    def choose(self, spec: SandboxSpec, exclude: frozenset[int] = frozenset()) -> int:
        """The number of the edge to ask. Raises Unsupported and Busy (rules.placement)."""
        candidates = [self._candidate(status) for status in self._watcher.view() if status.edge not in exclude]
        nonce = int.from_bytes(self._clock.random(8), "big")
        return rules.choose(
            candidates, spec, k=self._settings.sample, nonce=nonce, retry_after=self._settings.retry_after
        )  # fmt: skip

    def placed(self, edge: int, spec: SandboxSpec) -> None:
        """Count a sandbox against `edge` until a report that was asked for later arrives."""
        self._recent[edge].append((self._clock.monotonic(), spec.memory_limit_mb << 20))

    def _candidate(self, status: EdgeStatus) -> rules.Candidate:
        recent = self._recent[status.edge]
        asked = self._watcher.asked(status.edge)
        while recent and recent[0][0] <= asked:
            recent.popleft()
        candidate = rules.Candidate(
            edge=status.edge,
            healthy=status.healthy,
            backends=status.backends,
            sandboxes=status.sandboxes,
            sandbox_capacity=status.sandbox_capacity,
            memory_bytes=status.memory_bytes,
            memory_committed=status.memory_committed,
        )
        return rules.with_recent(candidate, (size for _, size in recent))
