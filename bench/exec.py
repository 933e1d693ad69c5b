"""Commands: the round trip of `true` in a sandbox that runs already, one at a time and 16 at a time."""

from bench.arena import arena
from bench.create import figure
from bench.figures import Report, machine, summary

__all__ = ["run"]

AT_ONCE = 16
SANDBOXES = 16
SAMPLES = {"dsec": (3000, 8000), "crun": (300, 800), "runc": (150, 320), "docker-api": (60, 160)}
QUICK = {"dsec": (1000, 3000), "crun": (80, 240), "runc": (40, 120), "docker-api": (0, 0)}


async def run(quick: bool) -> tuple[Report, dict[str, str]]:
    """The benchmark; answers the report and the missing peers."""
    counts = QUICK if quick else SAMPLES
    facts = machine()
    async with arena(quick) as ring:
        took: dict[str, list[float]] = {contender.name: [] for contender in ring.everyone}
        rates: dict[str, list[float]] = {contender.name: [] for contender in ring.everyone}
        for contender in ring.everyone:
            await contender.open(SANDBOXES)
            await contender.exec()
        longest = max(counts[contender.name][0] for contender in ring.everyone)
        for turn in range(longest):
            for contender in ring.everyone:
                share = counts[contender.name][0]
                if turn * share // longest != (turn + 1) * share // longest:
                    took[contender.name].append(await contender.exec())
        for _ in range(2):
            for contender in ring.everyone:
                rates[contender.name].append(await contender.rate(counts[contender.name][1] // 2, AT_ONCE))
        missing = ring.missing
    exec_ms = {name: summary(samples) for name, samples in took.items()}
    figures = [
        figure("exec_p50_ms", {n: s["p50"] for n, s in exec_ms.items()}, "ms", goal=2, aim=1.5),
        figure("exec_per_s", {n: max(r) for n, r in rates.items()}, "1/s", goal=1000, aim=1500, better="higher"),
        figure("exec_p99_ms", {n: s["p99"] for n, s in exec_ms.items()}, "ms"),
    ]
    raw = {"exec_ms": exec_ms, "exec_per_s": rates, "missing": missing}
    return Report(name="exec", machine=facts, figures=figures, raw=raw, quick=quick), missing
