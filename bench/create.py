"""Creation: from the call to the first command's result, one at a time and 16 at a time, and stopping."""

from bench.arena import arena
from bench.figures import Figure, Report, machine, summary

__all__ = ["run"]

AT_ONCE = 16
# Slow contenders get fewer samples: those of one full run take a minute, not ten.
SAMPLES = {"dsec": (300, 800), "crun": (60, 160), "runc": (60, 96), "docker-api": (20, 48)}
QUICK = {"dsec": (100, 240), "crun": (15, 48), "runc": (10, 32), "docker-api": (0, 0)}


async def run(quick: bool) -> tuple[Report, dict[str, str]]:
    """The benchmark; answers the report and the missing peers."""
    counts = QUICK if quick else SAMPLES
    made: dict[str, list[float]] = {}
    stopped: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    facts = machine()
    async with arena(quick) as ring:
        await ring.ours.open(0)
        for contender in ring.everyone:
            await contender.create()  # the first one warms caches, and is not counted
            made[contender.name], stopped[contender.name], rates[contender.name] = [], [], []
        longest = max(counts[contender.name][0] for contender in ring.everyone)
        for turn in range(longest):
            for contender in ring.everyone:
                share = counts[contender.name][0]
                if turn * share // longest != (turn + 1) * share // longest:
                    create, stop = await contender.create()
                    made[contender.name].append(create)
                    stopped[contender.name].append(stop)
        for _ in range(2):
            for contender in ring.everyone:
                rates[contender.name].append(await contender.burst(counts[contender.name][1] // 2, AT_ONCE))
        phases = ring.ours.phases()
        missing = ring.missing
    create_ms = {name: summary(samples) for name, samples in made.items()}
    stop_ms = {name: summary(samples) for name, samples in stopped.items()}
    figures = [
        figure("create_p50_ms", {n: s["p50"] for n, s in create_ms.items()}, "ms", goal=8, aim=5),
        figure("create_p99_ms", {n: s["p99"] for n, s in create_ms.items()}, "ms"),
        figure(
            f"create_per_s_c{AT_ONCE}", {n: max(r) for n, r in rates.items()}, "1/s", goal=150, aim=250, better="higher"
        ),
        figure("stop_p50_ms", {n: s["p50"] for n, s in stop_ms.items()}, "ms"),
    ]
    by_phase = {key: summary([p[key] * 1000 for p in phases if key in p]) for key in (phases[-1] if phases else {})}
    raw = {"create_ms": create_ms, "stop_ms": stop_ms, "create_per_s": rates, "phases_ms": by_phase, "missing": missing}
    return Report(name="create", machine=facts, figures=figures, raw=raw, quick=quick), missing


def figure(
    name: str,
    values: dict[str, float],
    unit: str,
    goal: float | None = None,
    aim: float | None = None,
    better: str = "lower",
) -> Figure:
    """Ours with the peers beside it; the Docker API is the peer proper, else the first there is."""
    peers = {peer: value for peer, value in values.items() if peer != "dsec"}
    chief = "docker-api" if "docker-api" in peers else next(iter(peers), None)
    return Figure(
        name=name, value=values["dsec"], unit=unit, goal=goal, aim=aim, better=better,
        peer=chief, peer_value=peers[chief] if chief else None, peers=peers,
    )  # fmt: skip
