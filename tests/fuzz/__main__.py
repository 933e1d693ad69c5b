"""python -m fuzz [TARGET ...] [--seconds N | --runs N]: targets one after another, and a table of what they did."""

import argparse
import os
import re
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
PROGRAM = ROOT / "target/fuzzing/dsec-fuzz"
RUST = ("stream", "messages", "chronus", "erofs", "index", "map", "requests")
GUIDED = (
    "tar",
    "raw_tar",
    "layers",
    "unpack",
    "imports",
    "parts",
    "dockerfile",
    "patterns",
    "download",
    "upload",
    "replies",
    "api",
    "proxy",
)
LIVE = ("aether", "node", "bytes")
LONGEST = 8192
SLOWEST = 10
MEMORY_MIB = 1024
START_SECONDS = 120


@dataclass(frozen=True)
class Ran:
    """What a target did. `branches`: edges of the compiled or instrumented code that were reached."""

    target: str
    executions: str
    cpu: float
    branches: str
    memory: str
    found: bool

    def row(self) -> str:
        verdict = "FOUND" if self.found else "-"
        return f"{self.target:<9} {self.executions:>11} {self.cpu:>7.1f} {self.branches:>9} {self.memory:>6}  {verdict}"


HEAD = f"{'target':<9} {'executions':>11} {'cpu s':>7} {'branches':>9} {'MiB':>6}  found"


def command(target: str, given: argparse.Namespace) -> list[str]:
    if target in LIVE:
        return [
            sys.executable,
            "-m",
            "fuzz.live",
            target,
            f"--seconds={given.seconds}",
            f"--runs={given.runs}",
            f"--seed={given.seed}",
        ]
    program = [str(PROGRAM)] if target in RUST else [sys.executable, "-m", "fuzz.guided", target]
    bound = f"-runs={given.runs}" if given.runs else f"-max_total_time={given.seconds}"
    folders = [given.found / f"corpus-{target}", CORPUS / target]
    folders[0].mkdir(parents=True, exist_ok=True)
    return [
        *program, bound, f"-seed={given.seed}", f"-max_len={LONGEST}", "-len_control=0", f"-timeout={SLOWEST}",
        f"-rss_limit_mb={MEMORY_MIB}", f"-artifact_prefix={given.found}/{target}-", "-print_final_stats=1", *map(str, folders),
    ]  # fmt: skip


def one(target: str, given: argparse.Namespace) -> Ran:
    """Runs a target to its time, or to what it finds; its output is in FOUND/TARGET.log."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    log = given.found / f"{target}.log"
    with log.open("wb") as out:
        done = subprocess.run(
            command(target, given), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, check=False,
            timeout=given.seconds + START_SECONDS + given.runs, env={**os.environ, "DSEC_FUZZ": target},
        )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = log.read_text(errors="replace")

    def last(pattern: str) -> str:
        return (re.findall(pattern, text) or ["?"])[-1]

    return Ran(
        target, last(r"stat::number_of_executed_units:\s*(\d+)"),
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, last(r"cov: (\d+)"),
        last(r"stat::peak_rss_mb:\s*(\d+)"), done.returncode != 0,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description="targets: " + " ".join((*RUST, *GUIDED, *LIVE)))
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--runs", type=int, default=0, help="inputs for each target, instead of a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--found",
        type=Path,
        default=ROOT / "target/fuzz-found",
        help="logs, inputs that broke a promise, grown corpora",
    )
    given = parser.parse_args()
    if unknown := set(given.targets) - {*RUST, *GUIDED, *LIVE}:
        parser.error(f"no such target: {' '.join(sorted(unknown))}")
    given.found.mkdir(parents=True, exist_ok=True)
    print(HEAD, flush=True)
    failed = False
    for target in given.targets or (*RUST, *GUIDED, *LIVE):
        if target in LIVE and os.geteuid() != 0:
            print(f"{target:<9} needs root", flush=True)
            continue
        if target in RUST and not PROGRAM.exists():
            print(f"{target:<9} is not built; ./dev fuzz builds it", flush=True)
            continue
        ran = one(target, given)
        print(ran.row(), flush=True)
        if ran.found:
            failed = True
            print("".join((given.found / f"{target}.log").read_text(errors="replace").splitlines(True)[-40:]))
    return int(failed)


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started:.0f} s")
    sys.exit(code)
