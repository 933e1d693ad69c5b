"""`python -m bench NAME [--quick] [--json FILE]`."""

import argparse
import os
import sys
from pathlib import Path

import uvloop

from bench import (
    burst,
    cold,
    commit,
    create,
    density,
    exec,
    files,
    images,
    importing,
    layers,
    mirror,
    neighbours,
    net,
    net_density,
    stacks,
    warm_read,
)
from bench.figures import OUT

__all__ = ["main"]

BENCHMARKS = {
    "commit": commit.run, "create": create.run, "exec": exec.run, "density": density.run, "files": files.run, "import": importing.run, "layers": layers.run, "mirror": mirror.run,
    "neighbours": neighbours.run, "net": net.run, "net-density": net_density.run,
}  # fmt: skip
WITH_IMAGES = {
    "burst": burst.run, "cold": cold.run, "images": images.run, "stacks": stacks.run, "warm-read": warm_read.run,
}  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=[*BENCHMARKS, *WITH_IMAGES])
    parser.add_argument("--quick", action="store_true", help="within a minute, the same figures less exactly")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        default=OUT / "real-images",
        help="keeps the roots of real images, some 15 GB; default: %(default)s",
    )
    options = parser.parse_args(argv)
    if os.geteuid() != 0:
        print("a benchmark starts a node of its own, and that needs root", file=sys.stderr)
        return 2
    if options.name in WITH_IMAGES:
        run = WITH_IMAGES[options.name](options.quick, options.cache.absolute())
    else:
        run = BENCHMARKS[options.name](options.quick)
    report, missing = uvloop.run(run)
    report.borrow_peers()
    if not options.quick:
        report.write(OUT / f"{report.name}.json")
    if options.json:
        report.write(options.json)
    report.show(missing)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
