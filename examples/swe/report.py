"""The table of a job's results, and the same as a record."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from examples.swe.job import Rollout

__all__ = ["record", "show"]

MIB = 1 << 20


def row(name: str, rollouts: Sequence[Rollout]) -> list[str]:
    by_kind = {kind: [r for r in rollouts if r.kind == kind] for kind in ("fix", "wrong", "tamper")}

    def earned(kind: str) -> str:
        return f"{sum(r.reward or 0 for r in by_kind[kind])}/{len(by_kind[kind])}" if by_kind[kind] else "-"

    read = [r.image_bytes_read for r in rollouts if r.image_bytes_read is not None]
    return [
        name, earned("fix"), earned("wrong"), earned("tamper"), str(sum(bool(r.tampered) for r in rollouts)),
        f"{median(r.setup_s for r in rollouts) * 1000:.0f}", f"{median(r.tools_s for r in rollouts):.1f}",
        f"{median(r.test_s for r in rollouts):.1f}", f"{max(read) / MIB:.1f}" if read else "-",
        f"{max(r.peak_memory_bytes for r in rollouts) / MIB:.0f}", str(sum(not r.expected for r in rollouts)),
    ]  # fmt: skip


def show(rollouts: Sequence[Rollout], seconds: float, console: Console) -> None:
    """Print a row for each task (medians of its rollouts, peaks where it says so), the totals, and what went wrong."""
    table = Table(title="rewards: earned/rollouts")
    heads = (
        "task",
        "fix",
        "wrong",
        "tamper",
        "reported",
        "setup ms",
        "tools s",
        "tests s",
        "image MiB",
        "peak MiB",
        "unexpected",
    )
    for head in heads:
        table.add_column(head, justify="left" if head == "task" else "right")
    for name in dict.fromkeys(r.task for r in rollouts):
        table.add_row(*row(name, [r for r in rollouts if r.task == name]))
    table.add_section()
    table.add_row(*row("all", rollouts))
    console.print(table)
    for r in rollouts:
        if r.tampered:
            console.print(f"tampering: {r.task}: {', '.join(r.tampered)}", markup=False)
        if not r.expected:
            console.print(f"unexpected: {r.task} ({r.kind}): reward {r.reward}, {r.error or r.why}", markup=False)
    good = sum(r.expected for r in rollouts)
    console.print(f"{good} of {len(rollouts)} rollouts as expected in {seconds:.1f} s")


def record(rollouts: Sequence[Rollout], seconds: float) -> dict[str, Any]:
    """The results as plain values for JSON."""
    return {
        "seconds": seconds,
        "rollouts": [{**msgspec.to_builtins(r), "expected": r.expected} for r in rollouts],
        "expected": sum(r.expected for r in rollouts),
    }
