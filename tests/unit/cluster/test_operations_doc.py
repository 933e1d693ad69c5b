"""docs/operations.md names what there is: permissions and metrics."""

import re
from pathlib import Path

from dsec.cluster.apiserver import ApiServerSettings
from dsec.rules.access import PERMISSIONS
from unit.cluster.fakes import FakeEdge, Platform

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs/operations.md").read_text()


def test_permissions() -> None:
    rows = dict(re.findall(r"^\| `([a-z]+\.[a-z]+)` \| (.*) \|$", TEXT, re.MULTILINE))
    assert rows == PERMISSIONS


async def test_metrics(tmp_path: Path) -> None:
    world = Platform(tmp_path, [FakeEdge(1)], ApiServerSettings())
    await world.watcher.refresh()
    served = set(re.findall(r"^# TYPE (dsec_\w+) ", world.app.counts.text().decode(), re.MULTILINE))
    world.iam.close()
    assert served == set(re.findall(r"dsec_\w+", TEXT))
