"""Builds one node from its configuration: every service of the platform in one process, with direct calls between them."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path

from msgspec import Struct

import dsec
from dsec.cluster.apiserver import ApiServer, Services
from dsec.cluster.iam import SqlIam
from dsec.cluster.placement import SamplingPlacement
from dsec.cluster.state import Credentials, StateDirectory
from dsec.cluster.tenants import Tenants
from dsec.cluster.watcher import PollingWatcher
from dsec.config import Config
from dsec.edge.agent import UnixAgent
from dsec.edge.backends.container import Container
from dsec.edge.backends.settings import ContainerOptions, ContainerSettings
from dsec.edge.gauges import EdgeGauges, Gauge
from dsec.edge.network.networks import NetworkParts, Networks
from dsec.edge.node import Foundation, Host, Node
from dsec.edge.routes import ROUTES
from dsec.gate.client import GateProcess, GateSetup
from dsec.gate.defaults import upstreams
from dsec.gate.services import load_credentials, load_services
from dsec.images.cache import Cache
from dsec.images.committing import Committer
from dsec.images.ladder import HostLadder
from dsec.images.mounts import NodeImages
from dsec.images.names import NameStore
from dsec.images.ondemand import OnDemand
from dsec.images.pagerprocess import PagerProcess
from dsec.images.remote import Remote
from dsec.images.settings import Stores, load_stores
from dsec.images.store import LayerStore
from dsec.images.upkeep import Upkeep
from dsec.images.volumes import Volumes
from dsec.kernel.network import NetFabric
from dsec.kernel.seccomp import command_filter
from dsec.model.errors import Unsupported
from dsec.model.loading import LayerReads
from dsec.ports.backend import BackendFailure
from dsec.ports.clock import Clock
from dsec.ports.network import Fabric

__all__ = ["AETHER", "PAGER", "Built", "Loading", "clear", "loading", "node"]

AETHER = Path(dsec.__file__).parent / "_bin/aether"
PAGER = AETHER.with_name("dsec-pager")


def _gauges(container: Container, edge: Node) -> dict[str, Gauge]:
    return {
        "dsec_namespaces_ready": (
            "sets of namespaces that the next creates find ready",
            lambda: container.namespaces_ready,
        ),
        "dsec_pool_free_bytes": ("bytes that the pool of writable layers still takes", container.pool.free),
        "dsec_pool_host_free_bytes": (
            "bytes free under the pool's file",
            lambda: float("nan") if (free := container.pool.host_free()) is None else free,
        ),
        "dsec_pool_writable": ("1 while the pool of writable layers can be written", container.pool.writable),
        "dsec_namespaces_failing": ("1 while no namespaces can be made ahead", lambda: container.namespaces_failing),
        "dsec_clock_ahead_seconds": ("seconds that the edge's time is ahead of the host's clock", edge.clock.ahead),
    }


def _network_gauges(networks: Networks) -> dict[str, Gauge]:
    return {
        "dsec_network_sandboxes": ("sandboxes with a network", lambda: networks.counts()[0]),
        "dsec_network_flows_allowed": ("flows that were allowed since the start", lambda: networks.counts()[1].allowed),
        "dsec_network_flows_refused": ("flows that were refused since the start", lambda: networks.counts()[1].refused),
        "dsec_network_bytes_out": ("bytes that ended flows sent", lambda: networks.counts()[1].bytes_out),
        "dsec_network_bytes_in": ("bytes that ended flows received", lambda: networks.counts()[1].bytes_in),
        "dsec_network_events_lost": ("events that found no room in the kernel's ring", lambda: networks.counts()[2]),
    }


class Built(Struct, frozen=True):
    """A running node: the application that its server serves, and its edge."""

    app: ApiServer
    edge: Node


def _network(config: Config, clock: Clock) -> NetworkParts:
    """What networks stand on. Raises InvalidArgument for a services or credentials file that is wrong."""
    own, network = config.fabric, config.network
    services, mirrors = load_services(
        Path(network.services) if network.services else None, upstreams() if network.enabled else {}
    )
    credentials = load_credentials(Path(network.credentials) if network.credentials else None)
    if not network.enabled:
        return NetworkParts(
            fabric=None,
            gate=None,
            services=services,
            settings=network,
            why_not="networks are turned off here (network.enabled)",
        )
    fabric = NetFabric(config.state / "run", own, clock)
    ranges = (own.range_v4, own.range_v6)
    setup = GateSetup(
        settings=config.gate, cache=config.state / "mirror", services=mirrors, credentials=credentials,
        forbidden=(*network.forbidden, *ranges),
    )  # fmt: skip
    return NetworkParts(
        fabric=fabric, gate=GateProcess(setup, fabric, clock), services=services, settings=network,
        credentials=frozenset(credential.name for credential in credentials), ranges=ranges,
    )  # fmt: skip


def _container(config: Config, clock: Clock, fabric: Fabric | None) -> Container:
    if not AETHER.is_file():
        raise Unsupported(f"aether is not built: {AETHER} is not there; run ./dev build")
    options = {field.name: getattr(config.container, field.name) for field in fields(ContainerOptions)}
    settings = ContainerSettings(**options, state=config.state, program=AETHER, filter=command_filter())
    return Container(settings, clock, UnixAgent, fabric)


class Loading(Struct, frozen=True):
    """What a node loads layers of stores with."""

    layers: LayerStore
    names: NameStore
    stores: Stores
    process: PagerProcess
    remote: Remote
    on_demand: OnDemand
    cache: Cache


def loading(config: Config, clock: Clock) -> Loading:
    """The layers of a node's state directory, and how those of stores come there. Raises InvalidArgument for a wrong file of stores."""
    state, settings = config.state, config.images
    layers = LayerStore(state, clock)
    names = NameStore(state, layers, clock)
    stores, process = load_stores(settings), PagerProcess(state, PAGER)
    ladder = HostLadder(process).find
    on_demand = OnDemand(layers, stores, process, settings, ladder)
    return Loading(
        layers=layers, names=names, stores=stores, process=process, on_demand=on_demand,
        remote=Remote(layers, names, clock, stores, settings, ladder),
        cache=Cache(state, layers, names, clock, on_demand, settings),
    )  # fmt: skip


def _images(config: Config, clock: Clock, container: Container, parts: Loading) -> tuple[NodeImages, Committer]:
    images = NodeImages(
        config.state, parts.layers, parts.names, clock, volumes=Volumes(container.pool), config=config.images,
        remote=parts.remote, on_demand=parts.on_demand,
    )  # fmt: skip
    return images, Committer(parts.layers, parts.names, clock, config.commit)


def _loading_gauges(parts: Loading, upkeep: Upkeep) -> dict[str, Gauge]:
    def total() -> LayerReads:
        return parts.on_demand.total

    return {
        "dsec_images_on_demand": ("layers that the pager serves", lambda: len(parts.on_demand.attached)),
        "dsec_images_bytes_fetched": ("bytes that came from stores, as stored there", lambda: total().bytes_fetched),
        "dsec_images_bytes_filled": ("bytes of layers that were written to disk", lambda: total().bytes_filled),
        "dsec_images_fetches": ("requests to stores for chunks", lambda: total().fetches),
        "dsec_images_waits": ("reads that waited for a store", lambda: total().waits),
        "dsec_images_wait_seconds": ("seconds that reads waited for a store", lambda: total().wait_us_total / 1e6),
        "dsec_images_read_errors": ("reads that failed as their store gave nothing", lambda: total().errors),
        "dsec_images_store_errors": ("requests to stores that failed", lambda: total().store_errors),
        "dsec_images_wrong_bytes": ("chunks that came other than they are to be", lambda: total().wrong_bytes),
        "dsec_images_pager_starts": ("times that this server started the pager", lambda: parts.process.starts),
        "dsec_images_cache_bytes": ("bytes of layers of stores on disk, at the last look", lambda: parts.cache.taken),
        "dsec_images_cache_high_bytes": ("bytes at which eviction begins", lambda: parts.cache.marks[0]),
        "dsec_images_evicted_bytes": ("bytes that eviction freed", lambda: upkeep.evicted_bytes),
    }


@asynccontextmanager
async def _edge(
    config: Config, clock: Clock, id_key: bytes, iam: SqlIam
) -> AsyncIterator[tuple[Node, NodeImages, EdgeGauges, Upkeep]]:
    network = _network(config, clock)
    container = _container(config, clock, network.fabric)
    parts = loading(config, clock)
    images, commits = _images(config, clock, container, parts)
    upkeep = Upkeep(images, parts.cache, config.images, clock)
    foundation = Foundation(
        directory=config.state,
        images=images,
        commits=commits,
        backends={"container": container},
        clock=clock,
        id_key=id_key,
        host=Host(float(len(os.sched_getaffinity(0)))),
        on_end=iam.release,
    )
    settings = replace(config.edge, lifecycle=config.lifecycle, operations=config.operations, pulse=config.pulse)
    await images.open()
    try:
        async with AsyncExitStack() as stack:
            try:
                edge = await stack.enter_async_context(Node(foundation, settings, network))
            except BackendFailure as error:
                raise Unsupported(f"sandboxes cannot run here: {error.detail}") from error
            more = _network_gauges(edge.networks) | _loading_gauges(parts, upkeep)
            yield edge, images, EdgeGauges(edge.lifecycle, _gauges(container, edge) | more), upkeep
    finally:
        commits.close()
        await images.close()


@asynccontextmanager
async def node(config: Config, clock: Clock, keep_first_key: Callable[[str], None]) -> AsyncIterator[Built]:
    """The node, open and polled, until the context is left; its sandboxes live on.

    `keep_first_key` gets the key made at the very first start, before it is valid. The caller holds the state directory.
    """
    state = StateDirectory(config.state)
    id_key = state.id_key(clock)
    async with AsyncExitStack() as stack:
        iam = SqlIam(config.state / "iam.db", clock)
        stack.callback(iam.close)
        iam.open(keep_first_key)
        edge, images, gauges, upkeep = await stack.enter_async_context(_edge(config, clock, id_key, iam))
        watcher = PollingWatcher([edge], clock, config.watcher)
        services = Services(
            iam=iam,
            tenants=Tenants(iam, clock),
            placement=SamplingPlacement(watcher, clock, config.placement),
            watcher=watcher,
            edges=(edge,),
            images=images,
            clock=clock,
            id_key=id_key,
        )
        app = ApiServer(services, config.apiserver, ROUTES, version("dsec"))
        app.counts.registry.register(gauges)
        await watcher.refresh()
        await app.settlement.settle()
        async with asyncio.TaskGroup() as group:
            regular = [group.create_task(each.run()) for each in (watcher, app, upkeep)]
            try:
                yield Built(app, edge)
            finally:
                for task in regular:
                    task.cancel()


async def clear(config: Config, clock: Clock) -> int:
    """End every sandbox of a node that no server holds, and remove all but its state directory; how many were ended."""
    state = StateDirectory(config.state)
    if not (config.state / "iam.db").exists():
        return 0
    async with AsyncExitStack() as stack:
        iam = SqlIam(config.state / "iam.db", clock)
        stack.callback(iam.close)
        # A first start that died before its key was kept is left for the next one to repeat.
        iam.open(lambda key: state.keep_credentials(Credentials(url="", api_key=key)))
        edge, _, _, _ = await stack.enter_async_context(_edge(config, clock, state.id_key(clock), iam))
        stopped = await edge.stop_all()
        # One that died between a sandbox's end and this has left its quota held.
        for name in iam.held() - await edge.live():
            await iam.release(name)
    await loading(config, clock).process.end()
    return len(stopped)
