"""`python -m examples.swe`: start the platform, run the rollouts, print the table, stop, leave nothing behind."""

import argparse
import asyncio
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console

import dsec
from dsec.testing.node import Node
from examples.swe.job import Rollout, run
from examples.swe.prepare import prepare
from examples.swe.report import record, show
from examples.swe.tasks import load

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.swe", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=64, help="how many, all at once (default 64)")
    parser.add_argument("--tasks", nargs="*", default=[], metavar="NAME", help="which packages (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too; - for standard output")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache/swe", help="downloads kept between runs")
    parser.add_argument(
        "--state", type=Path, help="state of the platform, with its image store (default: in the cache)"
    )
    return parser.parse_args(argv)


async def job(options: argparse.Namespace, console: Console) -> tuple[list[Rollout], float]:
    """Prepare and run; answers the rollouts and the seconds they took."""
    tasks = load(tuple(options.tasks))
    options.cache.mkdir(parents=True, exist_ok=True)
    with Node(options.state or options.cache / "state") as node:
        async with dsec.DSecClient(url=node.url, api_key=node.api_key) as client:
            environments = await prepare(client, node, tasks, options.cache, console.print)
            console.print(f"{options.rollouts} rollouts of {len(tasks)} tasks at once")
            begin, ended = time.perf_counter(), 0

            def done(rollout: Rollout) -> None:
                nonlocal ended
                ended += 1
                if ended % 8 == 0 or not rollout.expected:
                    console.print(f"{ended:4} ended after {time.perf_counter() - begin:.1f} s")

            rollouts = await run(client, environments, options.rollouts, f"swe-{time.time_ns()}", done)
            return rollouts, time.perf_counter() - begin


def main(argv: list[str]) -> int:
    options = arguments(argv)
    console = Console(stderr=str(options.json) == "-", width=None if sys.stdout.isatty() else 120)
    rollouts, seconds = asyncio.run(job(options, console))
    show(rollouts, seconds, console)
    if options.json:
        text = msgspec.json.format(msgspec.json.encode(record(rollouts, seconds))).decode()
        print(text) if str(options.json) == "-" else options.json.write_text(text + "\n")
    return 0 if rollouts and all(rollout.expected for rollout in rollouts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
