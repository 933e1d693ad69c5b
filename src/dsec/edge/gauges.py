"""What an edge has at the moment of asking, in the text format of Prometheus. Names and meanings: docs/operations.md."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dsec.edge.lifecycle import Lifecycle
from dsec.model.views import SandboxState

__all__ = ["EdgeGauges", "Gauge"]

Gauge = tuple[str, Callable[[], float]]


class EdgeGauges(Collector):
    """Sandboxes by state, and `more`: name to meaning and how it is read."""

    def __init__(self, lifecycle: Lifecycle, more: Mapping[str, Gauge]) -> None:
        self._lifecycle = lifecycle
        self._more = more

    def collect(self) -> Iterable[Metric]:
        """The gauges, read now."""
        states = GaugeMetricFamily("dsec_sandboxes", "sandboxes by state", labels=["state"])
        found = Counter(str(resident.life.state) for resident in self._lifecycle.residents.values())
        for state in (SandboxState.STARTING, SandboxState.RUNNING, SandboxState.STOPPING):
            states.add_metric([state.value], found[state.value])
        yield states
        for name, (meaning, read) in self._more.items():
            yield GaugeMetricFamily(name, meaning, value=read())
