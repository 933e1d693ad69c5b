"""Mirror: sandboxes that install the same packages from the node's mirror, and what the index behind it had to send for it."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.figures import Figure, Report, machine
from dsec.gate.settings import GateSettings, MirrorService
from dsec.model.network import MirrorRule, Policy
from dsec.testing.gatesite import GATEWAY, site_of
from dsec.testing.internet import NAMESERVERS
from dsec.testing.netns import Netns
from dsec.testing.packageindex import PackageIndex

__all__ = ["run"]

CLIENTS, QUICK_CLIENTS = 50, 10
PACKAGES, PACKAGE_BYTES = 20, 400_000
PARALLEL = 4
ADDRESS, PORT = "203.0.113.80", 3141
DATE = "2024-01-01"


def _install(place: Netns, index: str, target: Path, names: list[str]) -> None:
    """One client without any cache of its own."""
    uv = Path(sys.executable).parent / "uv"
    words = [
        str(uv),
        "--no-config",
        "--no-cache",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(target),
        "--index-url",
        index,
    ]
    with place.inside():
        subprocess.run(
            [*words, "--python", sys.executable, *names],
            check=True,
            timeout=300,
            env={"PATH": os.environ["PATH"], "HOME": str(target)},
        )


def _all(count: int, install: Callable[[int], None]) -> float:
    """Seconds that `count` clients take, some at once."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(install, range(count)))
    return time.perf_counter() - begin


async def run(quick: bool) -> tuple[Report, dict[str, str]]:
    """The benchmark; answers the report and the missing peers."""
    count = QUICK_CLIENTS if quick else CLIENTS
    services = (MirrorService(service="pypi", kind="pypi", port=PORT, upstream=f"http://{ADDRESS}/simple"),)
    settings = GateSettings(nameservers=NAMESERVERS[:1])
    names = [f"pack{number}" for number in range(PACKAGES)]
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as made,
        site_of(Path(made) / "cache", settings, services, count=count) as site,
    ):
        web = site.internet.web([ADDRESS], ["index.test"])
        web.only_pages = True
        index = PackageIndex(web, ADDRESS)
        for name in names:
            index.add_wheel(name, "1.0", DATE, size=PACKAGE_BYTES)
        for number in range(count):
            site.policy(Policy(mirrors={"pypi": MirrorRule(kind="pypi", port=PORT)}), number)
        direct, mirror = f"http://{ADDRESS}/simple/", f"http://{GATEWAY[0]}:{PORT}/simple/"

        web.sent = 0
        _install(site.internet.host, direct, Path(made) / "one", names)
        one, web.sent = web.sent, 0
        ours_s = _all(count, lambda number: _install(site.boxes[number], mirror, Path(made) / f"m{number}", names))
        ours, web.sent = web.sent, 0
        alone_s = _all(count, lambda number: _install(site.internet.host, direct, Path(made) / f"d{number}", names))
        alone = web.sent
        complete = all(
            (Path(made) / f"m{number}" / name / "__init__.py").exists() for number in range(count) for name in names
        )
    if not complete:
        raise RuntimeError("a sandbox did not get all packages")
    figures = [
        Figure(
            name="upstream_bytes_over_one", value=ours / one, unit="", goal=1.05, peer="each on its own", peer_value=alone / one,
            peers={"each on its own": alone / one},
        ),
        Figure(name="install_all_s", value=ours_s, unit="s", peers={"each on its own": alone_s}),
    ]  # fmt: skip
    raw = {"clients": count, "packages": PACKAGES, "one_bytes": one, "mirror_bytes": ours, "alone_bytes": alone}
    return Report(name="mirror", machine=machine(), figures=figures, raw=raw, quick=quick), {}
