"""Which edge gets a sandbox: filter, sample k at random, take the least loaded (paper, placement engine)."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from dsec.model.errors import Busy, Unsupported
from dsec.model.plan import Capabilities
from dsec.model.spec import SandboxSpec
from dsec.rules.admit import NO_NETWORK
from dsec.rules.netrules import wants_network

__all__ = ["Candidate", "choose", "fits", "with_recent"]

_MIB = 1 << 20


class Candidate(Struct, frozen=True, kw_only=True):
    """An edge as placement weighs it; bytes and counts. `memory_committed`: what admitted sandboxes may use at most."""

    edge: int
    healthy: bool
    backends: tuple[Capabilities, ...]
    sandboxes: int
    sandbox_capacity: int
    memory_bytes: int
    memory_committed: int

    @property
    def load(self) -> float:
        """0.0 empty .. 1.0 full: the scarcer of memory and places."""
        places = self.sandboxes / self.sandbox_capacity if self.sandbox_capacity > 0 else 1.0
        memory = self.memory_committed / self.memory_bytes if self.memory_bytes > 0 else 1.0
        return max(places, memory)


def _why_not(candidate: Candidate, spec: SandboxSpec) -> str | None:
    """Why this edge can never run such a sandbox; None where it could, given room."""
    offered = next((c for c in candidate.backends if c.backend == spec.backend), None)
    if offered is None or not offered.available:
        reasons = "; ".join(offered.why_not.values()) if offered else ""
        return f"backend {spec.backend} is not offered" + (f": {reasons}" if reasons else "")
    wanted = wants_network(spec)
    if wanted is not None and not offered.network:
        return f"{wanted}: {offered.why_not.get('network', NO_NETWORK)}"
    if spec.memory_limit_mb * _MIB > candidate.memory_bytes:
        return f"memory_limit_mb is above the {candidate.memory_bytes // _MIB} MiB that an edge gives to sandboxes"
    return None


def fits(candidate: Candidate, spec: SandboxSpec) -> bool:
    """True where the edge has room for it now."""
    return (
        candidate.healthy
        and candidate.sandboxes < candidate.sandbox_capacity
        and candidate.memory_committed + spec.memory_limit_mb * _MIB <= candidate.memory_bytes
    )


def with_recent(candidate: Candidate, recent: Iterable[int]) -> Candidate:
    """The edge with placements laid over it that its last report does not show yet; `recent`: bytes of memory of each."""
    sizes = tuple(recent)
    return Candidate(
        edge=candidate.edge,
        healthy=candidate.healthy,
        backends=candidate.backends,
        sandboxes=candidate.sandboxes + len(sizes),
        sandbox_capacity=candidate.sandbox_capacity,
        memory_bytes=candidate.memory_bytes,
        memory_committed=candidate.memory_committed + sum(sizes),
    )


def choose(candidates: Sequence[Candidate], spec: SandboxSpec, *, k: int, nonce: int, retry_after: float) -> int:
    """The number of the edge to ask. `nonce`: a fresh random number below 2**64; the same one gives the same answer.

    Raises Unsupported where no edge could ever run it, with the reason of one; Busy, carrying `retry_after` seconds, where
    one could but none has room now, and also where no edge is known.
    """
    refusals = {c.edge: _why_not(c, spec) for c in candidates}
    able = [c for c in candidates if refusals[c.edge] is None]
    if candidates and not able:
        raise Unsupported(next(reason for reason in refusals.values() if reason), backend=spec.backend)
    ready = [c for c in able if fits(c, spec)]
    if not ready:
        raise Busy("no edge has room for this sandbox now", retry_after=retry_after)
    return min(_sample(ready, k, nonce), key=lambda c: (c.load, c.edge)).edge


def _sample(ready: list[Candidate], k: int, nonce: int) -> list[Candidate]:
    """k of them, drawn by the digits of `nonce` without replacement."""
    pool = list(ready)
    drawn = []
    for _ in range(min(max(k, 1), len(pool))):
        nonce, index = divmod(nonce, len(pool))
        drawn.append(pool.pop(index))
    return drawn
