"""docs/operations.md names what there is: permissions and metrics."""

import re
from pathlib import Path
from unittest.mock import Mock

from dsec import wiring
from dsec.cluster.apiserver import ApiServerSettings
from dsec.edge.agent import UnixAgent
from dsec.edge.backends.container import Container
from dsec.edge.backends.settings import ContainerSettings
from dsec.edge.gauges import EdgeGauges
from dsec.rules.access import PERMISSIONS
from unit.cluster.fakes import FakeEdge, Platform, RealClock

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs/operations.md").read_text()


def test_permissions() -> None:
    rows = dict(re.findall(r"^\| `([a-z]+\.[a-z]+)` \| (.*) \|$", TEXT, re.MULTILINE))
    assert rows == PERMISSIONS


async def test_metrics(tmp_path: Path) -> None:
    container = Container(ContainerSettings(state=tmp_path, program=tmp_path, filter=b""), RealClock(), UnixAgent)
    world = Platform(tmp_path, [FakeEdge(1)], ApiServerSettings())
    await world.watcher.refresh()
    gauges = wiring._gauges(container, Mock()) | wiring._network_gauges(Mock()) | wiring._loading_gauges(Mock(), Mock())
    readings = {name: (meaning, lambda: 0.0) for name, (meaning, _) in gauges.items()}
    world.app.counts.registry.register(EdgeGauges(Mock(residents={}), readings))
    served = set(re.findall(r"^# TYPE (dsec_\w+) ", world.app.counts.text().decode(), re.MULTILINE))
    world.iam.close()
    assert served == set(re.findall(r"dsec_\w+", TEXT))
