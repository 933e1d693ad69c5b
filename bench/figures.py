"""What a benchmark says: figures with goals and peers, samples with percentiles, and the machine they come from."""

import json
import math
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins
from rich.console import Console
from rich.table import Table

__all__ = ["OUT", "Figure", "Report", "machine", "percentile", "summary"]

OUT = Path(__file__).resolve().parent / "out"


class Figure(Struct, kw_only=True):
    """One figure. `goal`: what it has to reach, `aim`: what we would like; `better`: which way is good. `peers`: the same
    figure of others in this run, or, with a date in the report's `raw`, of their last full run."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    aim: float | None = None
    better: str = "lower"
    peer: str | None = None
    peer_value: float | None = None
    peers: dict[str, float] = {}

    @property
    def reached(self) -> bool:
        """Whether the goal is met; a figure without one has nothing to miss."""
        if self.goal is None:
            return True
        return self.value <= self.goal if self.better == "lower" else self.value >= self.goal


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample below which `share` (0..1) of them lie: nearest rank."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def summary(samples: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99, max and how many."""
    return {
        "p50": percentile(samples, 0.5),
        "p90": percentile(samples, 0.9),
        "p99": percentile(samples, 0.99),
        "max": max(samples),
        "samples": len(samples),
    }


def machine() -> dict[str, Any]:
    """The machine, as far as figures depend on it."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model, "cores": os.cpu_count(), "memory_gib": round(memory / 2**30, 1), "kernel": platform.release(),
        "load_before": os.getloadavg()[0], "python": platform.python_version(),
    }  # fmt: skip


class Report(Struct, kw_only=True):
    """A benchmark's whole answer."""

    name: str
    machine: dict[str, Any]
    figures: list[Figure]
    raw: dict[str, Any]
    quick: bool = False

    def write(self, path: Path) -> None:
        """As JSON, in the form of the interfaces document."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(to_builtins(self), indent=2) + "\n")

    def borrow_peers(self) -> None:
        """Where a quick run left a slow peer out, show its last full figure, with its date."""
        kept = OUT / f"{self.name}.json"
        if not self.quick or not kept.is_file():
            return
        before = {figure["name"]: figure["peers"] for figure in json.loads(kept.read_text())["figures"]}
        date = time.strftime("%Y-%m-%d", time.gmtime(kept.stat().st_mtime))
        for figure in self.figures:
            for peer, value in before.get(figure.name, {}).items():
                if peer not in figure.peers:
                    figure.peers[peer] = value
                    self.raw.setdefault("peers_from", {})[peer] = date

    def show(self, missing: dict[str, str]) -> None:
        """Print the table, what is missing, and the closing line."""
        console = Console(width=120)
        peers = list(dict.fromkeys(peer for figure in self.figures for peer in figure.peers))
        table = Table(title=f"{self.name}{' (quick)' if self.quick else ''}")
        for head in ("figure", "ours", "goal", "aim", *(name for peer in peers for name in (peer, "ratio"))):
            table.add_column(head, justify="left" if head == "figure" else "right")
        for figure in self.figures:
            cells = [f"{figure.name} [{figure.unit}]".replace("[", "(").replace("]", ")"), f"{figure.value:.2f}"]
            cells += ["-" if number is None else f"{number:g}" for number in (figure.goal, figure.aim)]
            for peer in peers:
                value = figure.peers.get(peer)
                ratio = (
                    None
                    if not value or not figure.value
                    else (value / figure.value if figure.better == "lower" else figure.value / value)
                )
                cells += ["-" if value is None else f"{value:.2f}", "-" if ratio is None else f"{ratio:.1f}x"]
            table.add_row(*cells)
        console.print(table)
        for peer, date in self.raw.get("peers_from", {}).items():
            console.print(f"{peer}: figures of the full run of {date}")
        for peer, why in missing.items():
            console.print(f"missing peer {peer}: {why}", markup=False)
        goals = [figure for figure in self.figures if figure.goal is not None]
        console.print(f"{sum(figure.reached for figure in goals)} of {len(goals)} figures reach their goal")
