"""What callers ask of a sandbox's network."""

from msgspec import Struct

from dsec.edge.door import Door
from dsec.edge.operations import Operations, fingerprint_of
from dsec.model.errors import InvalidArgument
from dsec.model.network import Flow, NetworkChange, NetworkView, Verdict
from dsec.web import Call

__all__ = ["LogQuery", "NetworkHandlers"]


class LogQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`limit`: flows at most, 1 or more; `network.log_flows` are kept. `verdict`: "allowed" or "refused" alone."""

    limit: int = 1000
    verdict: Verdict | None = None


class NetworkHandlers:
    """Handlers of /network, called like their routes."""

    def __init__(self, door: Door, operations: Operations) -> None:
        self._door = door
        self._operations = operations
        self._networks = door.lifecycle.parts.networks

    async def get_network(self, call: Call[None, None]) -> NetworkView:
        with self._door.enter(call) as resident:
            return await self._networks.view(resident)

    async def set_network(self, call: Call[None, NetworkChange]) -> NetworkView:
        change = call.body
        with self._door.enter(call) as resident:

            async def run() -> NetworkView:
                return await self._networks.change(resident, change)

            mark = fingerprint_of(change)
            return await self._operations.once(resident, call.request_id, "set_network", mark, run, NetworkView)

    async def network_log(self, call: Call[LogQuery, None]) -> list[Flow]:
        query = call.query
        if query.limit < 1:
            raise InvalidArgument("1 or more", field="limit")
        with self._door.enter(call) as resident:
            flows = await self._networks.log(resident)
        if query.verdict is not None:
            flows = [flow for flow in flows if flow.verdict == query.verdict]
        return flows[-query.limit :]
