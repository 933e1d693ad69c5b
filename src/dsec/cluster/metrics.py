"""What the services count, in the text format of Prometheus. Names and meanings: docs/operations.md."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dsec.cluster.gate import CreationGate
from dsec.ports.cluster import Watcher

__all__ = ["METRICS_MEDIA", "Metrics"]

disable_created_metrics()  # type: ignore[no-untyped-call]

METRICS_MEDIA = "text/plain; version=0.0.4; charset=utf-8"

_CREATE_BUCKETS = (0.002, 0.004, 0.006, 0.008, 0.012, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_EXEC_BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)


class _Edges(Collector):
    """Gauges read at the moment of asking: the watcher's view and the creation queue."""

    def __init__(self, watcher: Watcher, gate: CreationGate) -> None:
        self._watcher = watcher
        self._gate = gate

    def collect(self) -> Iterable[Metric]:
        gauges = {
            "healthy": "1 where the edge answers and can run sandboxes",
            "sandboxes": "sandboxes that are not gone",
            "sandbox_capacity": "most sandboxes the edge takes",
            "memory_bytes": "bytes of memory that the edge gives to sandboxes",
            "memory_committed": "bytes that admitted sandboxes may use at most",
            "cpu_cores": "cores of the edge",
            "cpu_committed": "sum of the core limits of admitted sandboxes",
        }
        view = self._watcher.view()
        for name, meaning in gauges.items():
            family = GaugeMetricFamily(f"dsec_edge_{name}", meaning, labels=["edge"])
            for status in view:
                family.add_metric([str(status.edge)], float(getattr(status, name)))
            yield family
        queue = GaugeMetricFamily("dsec_creations", "creations under way and waiting", labels=["state"])
        queue.add_metric(["running"], self._gate.running)
        queue.add_metric(["waiting"], self._gate.waiting)
        yield queue


class Metrics:
    """The counters of one apiserver. `registry` takes further collectors."""

    def __init__(self, watcher: Watcher, gate: CreationGate) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Edges(watcher, gate))
        self._created = Counter("dsec_creates", "sandboxes created, by result", ["result"], registry=self.registry)
        self._failures = Counter(
            "dsec_failures", "requests that failed, by HTTP status", ["status"], registry=self.registry
        )
        self._create = Histogram(
            "dsec_create_seconds", "from request to running", buckets=_CREATE_BUCKETS, registry=self.registry
        )
        self._phases = Counter(
            "dsec_create_phase_seconds", "time in each phase of creation", ["phase"], registry=self.registry
        )
        self.exec_seconds = Histogram(
            "dsec_exec_seconds", "round trip of exec in the server", buckets=_EXEC_BUCKETS, registry=self.registry
        )

    def created(self, seconds: float, phases: dict[str, float]) -> None:
        """A sandbox runs."""
        self._created.labels("ok").inc()
        self._create.observe(seconds)
        for phase, duration in phases.items():
            if phase == "total":
                continue
            self._phases.labels(phase).inc(max(duration, 0.0))

    def create_failed(self, code: str) -> None:
        """A sandbox could not be created, for the reason `code`."""
        self._created.labels(code).inc()

    def failed(self, status: int) -> None:
        """A request was answered with `status`, 400 or above."""
        self._failures.labels(str(status)).inc()

    def text(self) -> bytes:
        """All of it, now."""
        return generate_latest(self.registry)
