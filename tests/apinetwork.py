"""The fake server's answers about networks."""

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from dsec.model.network import Allow, Flow, NetworkChange, NetworkRules, NetworkView
from dsec.model.views import SandboxView

ONE = "/v1/sandboxes/{id}/network"
TRIED = Flow(
    at=1.5, verdict="refused", address="192.0.2.1", port=22, protocol="tcp", reason="no rule", pid=7, comm="a\x1b[2J"
)  # fmt: skip


def network_routes(sandboxes: Mapping[str, SandboxView]) -> list[web.RouteDef]:
    """GET and PUT of the rules of `sandboxes`, a log with one refused flow, and tunnels that tell back what they hear."""
    changed: dict[str, NetworkRules | None] = {}

    async def network(request: web.Request) -> web.Response:
        view = sandboxes[request.match_info["id"]]
        if request.method == "PUT":
            change = msgspec.json.decode(await request.read(), type=NetworkChange)
            changed[view.id] = view.spec.network_phases[change.phase] if change.phase else change.rules
        rules = changed.get(view.id, view.spec.network_rules)
        return _answer(NetworkView(rules=rules, v4="100.96.0.7", allows=(Allow(network="203.0.113.0/24"),)))

    async def log(request: web.Request) -> web.Response:
        return _answer([TRIED] if request.query.get("verdict", "refused") == "refused" else [])

    async def tunnel(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_bytes(message.data)
        return socket

    return [
        web.get("/v1/sandboxes/{id}/tunnel/{port}", tunnel),
        web.get(ONE, network),
        web.put(ONE, network),
        web.get(ONE + "/log", log),
    ]


def _answer(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
