"""What a sandbox tried on the network: the newest of it, and counts of all."""

from collections import deque

from msgspec.structs import replace

from dsec.model.network import Flow, NetCounts

__all__ = ["NetLog"]

_NAMES_MAX = 4096

_Key = tuple[str, str, int, float]


def _key(flow: Flow) -> _Key:
    return (flow.protocol, flow.address, flow.port, flow.at)


class NetLog:
    """At most `most` flows of one sandbox, oldest first. What a program says of itself is kept as it is, cut to size."""

    def __init__(self, most: int) -> None:
        self._flows: deque[Flow] = deque(maxlen=most)
        self._names: dict[str, str] = {}
        self.counts = NetCounts()

    def named(self, address: str, name: str) -> None:
        """The resolver gave `address` for `name`."""
        self._names.pop(address, None)
        self._names[address] = name
        if len(self._names) > _NAMES_MAX:
            del self._names[next(iter(self._names))]

    def add(self, flow: Flow) -> None:
        """A refused, begun or ended flow; one that ends takes the place of its beginning while that is kept."""
        if not flow.name and flow.address in self._names:
            flow = replace(flow, name=self._names[flow.address])
        counts = self.counts
        if flow.verdict == "refused":
            self.counts = replace(counts, refused=counts.refused + 1)
        elif flow.ended is None:
            self.counts = replace(counts, allowed=counts.allowed + 1)
        else:
            self.counts = replace(
                counts, bytes_out=counts.bytes_out + flow.bytes_out, bytes_in=counts.bytes_in + flow.bytes_in
            )
            if self._ended(flow):
                return
            self.counts = replace(self.counts, allowed=self.counts.allowed + 1)
        self._flows.append(flow)

    def _ended(self, flow: Flow) -> bool:
        for index in range(len(self._flows) - 1, -1, -1):
            known = self._flows[index]
            if known.ended is None and known.verdict == "allowed" and _key(known) == _key(flow):
                comm, pid, name = flow.comm or known.comm, flow.pid or known.pid, flow.name or known.name
                self._flows[index] = replace(flow, comm=comm, pid=pid, name=name)
                return True
        return False

    def read(self) -> list[Flow]:
        """The flows kept, oldest first."""
        return list(self._flows)
