"""The fabric: a router of the node's own, a link from it to each sandbox, and programs that judge what passes.

Everything that enforces is held by the kernel: programs by the devices they hang on, maps by pins in a file system below the node's
directory, the router's namespace by a mount there. So a server that dies changes nothing, and the next one takes over.
"""

import ipaddress
import logging
import os
import re
import socket as sockets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from errno import E2BIG, EEXIST, ENODEV, ENOENT, ERANGE
from hashlib import sha256
from pathlib import Path

from dsec import _native
from dsec.kernel import netmaps
from dsec.kernel.conntrack import forget_sources
from dsec.kernel.errors import KernelError, from_kernel, kernel_op
from dsec.kernel.mounts import mount, umount
from dsec.kernel.netrecords import Ledger
from dsec.kernel.netsysctl import HostSysctls, devices_in, router_sysctls, way_out_mtu
from dsec.kernel.nettables import MARK_RELAY, delete_table, host_table, load_tables, router_table
from dsec.kernel.netview import View
from dsec.model.network import Address, Allow, NetLimits
from dsec.model.settings import check_positive, setting
from dsec.ports.clock import Clock
from dsec.ports.network import SlotFlow

__all__ = ["FabricSettings", "NetFabric"]

_log = logging.getLogger("dsec.kernel")

_LAYOUT = "2"
_DEVICE = "dsec-"
_FIRST = 256
_BLOCK = 256
_MS_BIND = 0x1000
_IP_TRANSPARENT, _IPV6_TRANSPARENT = 19, 75
_BACKLOG = 512
_SEALED = NetLimits()
_LINK = re.compile(r"s\d+")


@dataclass(frozen=True)
class FabricSettings:
    """Settings of the node's network of sandboxes."""

    range_v4: str = setting("100.96.0.0/12", "IPv4 addresses of sandboxes; nothing else the host reaches may lie in it")
    range_v6: str = setting("fd64:7365:6300::/64", "IPv6 addresses of sandboxes; the first /64 of it is used")
    mtu: int | None = setting(None, "largest packet of a sandbox in bytes; none: that of the host's way out")
    relay_port: int = setting(3129, "port of the relay inside the node's router")

    def __post_init__(self) -> None:
        check_positive(self, "relay_port", *(["mtu"] if self.mtu is not None else []))


@dataclass(slots=True)
class _Linked:
    """A slot's link: its number in the router, what the programs know of it, and its rules."""

    ifindex: int
    box: netmaps.Box
    view: View


class NetFabric:
    """`directory`: the node's, for pins. `host`: a namespace to stand for the host's, for trying; none: the calling thread's at `open`.

    Implements dsec.ports.network.Fabric. Methods may be called from several threads, for one slot from one at a time.
    """

    def __init__(self, directory: Path, settings: FabricSettings, clock: Clock, host: int | None = None) -> None:
        self._settings = settings
        self._clock = clock
        self._root = directory / "network"
        self._pins = self._root / "maps"
        self._pin = self._root / "router"
        self._v4 = ipaddress.IPv4Network(settings.range_v4)
        self._v6 = ipaddress.IPv6Network((ipaddress.IPv6Network(settings.range_v6).network_address, 64))
        self.gateway_v4, self.gateway_v6 = str(self._v4[1]), str(self._v6[1])
        digest = sha256(str(directory.absolute()).encode()).hexdigest()[:8]
        self._uplink, self._table = f"{_DEVICE}{digest}", f"dsec_{digest}"
        self._given = host
        self._host = self._router = -1
        self._sysctls = HostSysctls()
        self._mtu = 0
        self._lock = threading.Lock()
        self._linked: dict[int, _Linked] = {}
        self._ahead: set[int] = set()
        self._blocks: set[int] = set()
        self._spoke: set[int] = set()
        self._next_view = 1

    def open(self) -> None:
        with kernel_op("mkdir", str(self._root)):
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._pins.mkdir(exist_ok=True)
        self._host = from_kernel(_native.this_netns)() if self._given is None else os.dup(self._given)
        self._mtu = self._settings.mtu or way_out_mtu(self._host)
        if not self._pins.is_mount():
            mount("bpf", str(self._pins), "bpf", 0, "mode=700")
        with kernel_op("mkdir", str(self._pins)):
            (self._pins / _LAYOUT).mkdir(exist_ok=True)
        self._hook = from_kernel(_native.PolicyHook)(str(self._pins / _LAYOUT))
        self._maps = {name: from_kernel(_native.PinnedMap)(str(self._pins / _LAYOUT / name)) for name in netmaps.SIZES}
        self._open_router()
        gateways = (self.gateway_v4, self.gateway_v6)
        node = netmaps.packed_node(self._v4, self._v6, gateways, self._settings.relay_port)
        from_kernel(self._maps["nodes"].put)(bytes(4), node)
        self._ledger = Ledger(self._maps, self._clock)
        self._take_over()

    def _open_router(self) -> None:
        with kernel_op("open", str(self._pin)):
            new = not os.path.ismount(self._pin)
            if new:
                self._pin.touch()
                self._router = from_kernel(_native.make_netns)()
                mount(f"/proc/self/fd/{self._router}", str(self._pin), "", _MS_BIND)
            else:
                self._router = os.open(self._pin, os.O_RDONLY | os.O_CLOEXEC)
        self._links = from_kernel(_native.RouterLinks)(self._host, self._router)
        if new:
            self._links.cut_uplink(self._uplink)
        router_sysctls(self._router)
        load_tables(self._router, router_table(self.gateway_v4, self.gateway_v6, self._settings.relay_port))
        load_tables(self._host, host_table(self._table, self._uplink, self._v4, self._v6))
        # Nobody has this address: tried now, so that a kernel without it is refused by name, and not at the first stop.
        forget_sources(self._host, [self.gateway_v4])
        if not self._links.has_uplink(self._uplink):
            gateway = (self.gateway_v4, self.gateway_v6)
            from_kernel(self._links.uplink)(self._uplink, gateway, self._mtu, MARK_RELAY)
        self._sysctls.set(self._host)

    def _take_over(self) -> None:
        """Finds what an earlier server left: links with their rules are kept, the rest is removed."""
        views: dict[int, dict[str, list[netmaps.Rule]]] = {}
        for key, value in self._maps["rules"].entries():
            view, prefix = netmaps.prefix_of(key)
            views.setdefault(view, {})[prefix] = list(netmaps.unpack_rules(value))
        kept = set()
        for key, value in self._maps["boxes"].entries():
            ifindex, box = int.from_bytes(key, "little"), netmaps.Box.unpack(value)
            if self._index(box.slot) == ifindex:
                found = View(self._maps["rules"], box.view, views.get(box.view, {}))
                self._linked[box.slot] = _Linked(ifindex, box, found)
                self._ledger.begin(ifindex, box.slot)
                self._reach(box.slot)
                kept.add(box.view)
            else:
                self._forget(ifindex)
        self._sweep_away()
        self._ledger.recount()
        for view in views.keys() - kept:
            View(self._maps["rules"], view, views[view]).remove()
        self._next_view = max(views.keys() | kept, default=0) + 1

    def _sweep_away(self) -> None:
        """Removes what a server left that died between cutting a link and removing it."""
        numbers = {_number(linked.ifindex) for linked in self._linked.values()}
        for name in ("meters", "swept"):
            for key, _ in self._maps[name].entries():
                if key not in numbers:
                    from_kernel(self._maps[name].remove)(key)
        known = {_number(slot) for slot in self._linked}
        for key, _ in self._maps["groups"].entries():
            if key not in known:
                from_kernel(self._maps["groups"].remove)(key)
        devices = [name for name in devices_in(self._router) if _LINK.fullmatch(name)]
        left = [slot for slot in (int(name[1:]) for name in devices) if slot not in self._linked]
        if left:
            self.unlink(*left)

    def close(self, keep: bool) -> None:
        slots = self._ahead.copy() if keep else self._linked.copy()
        if slots:
            self.unlink(*slots)
        if not keep and "_links" in self.__dict__:
            self._links.cut_uplink(self._uplink)
            delete_table(self._host, self._table)
            self._sysctls.restore(self._host, _DEVICE)
        self._linked.clear()
        self._ahead.clear()
        self._blocks.clear()
        self._maps = {}
        for name in ("_hook", "_links", "_ledger"):
            self.__dict__.pop(name, None)
        for fd in (self._host, self._router):
            if fd >= 0:
                os.close(fd)
        self._host = self._router = -1
        if not keep:
            for path in (self._pin, self._pins):
                if os.path.ismount(path):
                    umount(str(path), lazy=True)

    def address(self, slot: int) -> Address:
        if not 0 <= slot < self._v4.num_addresses - 2 * _FIRST:
            raise KernelError("address", f"slot {slot} of {self._v4}", ERANGE)
        return Address(slot=slot, v4=str(self._v4[_FIRST + slot]), v6=str(self._v6[_FIRST + slot]))

    def prepare(self, slot: int, netns: int) -> None:
        """Makes a link ahead, for the `link` of the same slot and namespace to find. It is no sandbox's until then."""
        self.link(slot, netns)
        with self._lock:
            self._ahead.add(slot)

    def link(self, slot: int, netns: int) -> None:
        with self._lock:
            linked = self._linked.get(slot)
            if linked is not None:
                if slot not in self._ahead or os.fstat(netns).st_ino != linked.box.netns:
                    raise KernelError("link", _name(slot), EEXIST)
                self._ahead.discard(slot)
                return
        if self._host < 0:
            raise KernelError("link", "the network is not open", ENODEV)
        self.unlink(slot)
        self._reach(slot)
        own = self.address(slot)
        gateway = (self.gateway_v4, self.gateway_v6)
        link = from_kernel(self._links.link)
        ifindex = link(_name(slot), netns, (own.v4, own.v6), gateway, self._mtu, self._hook)
        box = netmaps.Box(slot, self._take_view(), 0, os.fstat(netns).st_ino, own.v4, own.v6, _SEALED)
        key = _number(ifindex)
        try:
            self._maps["meters"].put(key, netmaps.METER)
            self._maps["swept"].put(key, bytes(8))
            self._maps["boxes"].put(key, box.pack())
        except OSError:
            self._forget(ifindex)
            self._links.unlink([_name(slot)])
            raise
        self._ledger.begin(ifindex, slot)
        with self._lock:
            self._linked[slot] = _Linked(ifindex, box, View(self._maps["rules"], box.view, {}))

    def adopt(self, slot: int) -> bool:
        linked = self._linked.get(slot)
        return linked is not None and self._index(slot) == linked.ifindex

    def linked(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._linked.keys() - self._ahead)

    def cut(self, slot: int) -> None:
        linked = self._linked.get(slot)
        if linked is None:
            return
        meter = from_kernel(self._maps["meters"].get)(_number(linked.ifindex))
        if netmaps.ever_opened(meter or b""):
            self._spoke.add(slot)
        # Its record first: without it nothing passes, whatever the other maps still say.
        self._forget(linked.ifindex)
        from_kernel(self._maps["groups"].remove)(_number(slot))
        self._ledger.end(linked.ifindex)
        linked.view.remove()
        with self._lock:
            self._linked.pop(slot, None)
            self._ahead.discard(slot)

    def unlink(self, *slots: int) -> None:
        for slot in slots:
            self.cut(slot)
        if self._host < 0:
            return
        from_kernel(self._links.unlink)([_name(slot) for slot in slots])
        spoke = self._spoke.intersection(slots)
        forget_sources(self._host, [text for slot in spoke for text in (self.address(slot).v4, self.address(slot).v6)])
        self._spoke -= spoke

    def apply(
        self,
        slot: int,
        allows: Sequence[Allow],
        limits: NetLimits,
        group: int,
        answers: Sequence[tuple[Allow, float]] = (),
    ) -> None:
        linked = self._of(slot)
        view = View(self._maps["rules"], self._take_view(), {})
        box = linked.box._replace(view=view.number, group=group, limits=limits)
        try:
            view.fill([(allow, 0) for allow in allows] + [(allow, _boot_ns(seconds)) for allow, seconds in answers])
            self._switch(linked, box, view)
        except (KernelError, ValueError) as error:
            self._shut(linked, view)
            raise error if isinstance(error, KernelError) else KernelError(str(error), _name(slot), E2BIG) from error

    def _shut(self, linked: _Linked, begun: View) -> None:
        """Lets nothing pass after a switch that failed: by a view without rules, which answers; where the kernel refuses that write too, by
        taking the record away, which needs no room; and where it refuses that, the device."""
        slot, shut = linked.box.slot, View(self._maps["rules"], self._take_view(), {})
        try:
            self._switch(linked, linked.box._replace(view=shut.number, group=0), shut)
        except KernelError as error:
            _log.error("slot %d is shut by taking its record away: %s", slot, error)
            try:
                from_kernel(self._maps["boxes"].remove)(_number(linked.ifindex))
            except KernelError as worse:
                _log.error("slot %d is shut by taking its device away: %s", slot, worse)
                from_kernel(self._links.unlink)([_name(slot)])
        begun.remove()

    def _switch(self, linked: _Linked, box: netmaps.Box, view: View) -> None:
        """From one view to the next by one write: no packet is judged by parts of both, or by neither."""
        groups, slot = self._maps["groups"], _number(box.slot)
        if box.group != linked.box.group:
            from_kernel(groups.remove)(slot)
        from_kernel(self._maps["boxes"].put)(_number(linked.ifindex), box.pack())
        if box.group:
            from_kernel(groups.put)(slot, _number(box.group))
        before, linked.box, linked.view = linked.view, box, view
        before.remove()

    def permit(self, slot: int, allows: Sequence[Allow], seconds: float) -> None:
        try:
            self._of(slot).view.fill([(allow, _boot_ns(seconds)) for allow in allows])
        except ValueError as error:
            raise KernelError(str(error), _name(slot), E2BIG) from error

    def allowed(self, slot: int) -> tuple[Allow, ...]:
        return self._of(slot).view.read()

    def events_fd(self) -> int:
        return int(self._hook.events_fd())

    def drain(self) -> list[SlotFlow]:
        return self._ledger.told(self._hook.drain(4096))

    def lost(self) -> int:
        return int.from_bytes(self._maps["lost"].get(bytes(4)) or b"", "little")

    def sweep(self) -> list[SlotFlow]:
        for linked in list(self._linked.values()):
            linked.view.expire()
        return self._ledger.sweep()

    def socket(self, family: int, kind: int, port: int, transparent: bool) -> int:
        fd = from_kernel(_native.socket_in)(self._router, family, kind)
        with sockets.socket(fileno=fd) as made, kernel_op("bind", str(port)):
            made.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            if transparent and family == sockets.AF_INET6:
                made.setsockopt(sockets.IPPROTO_IPV6, _IPV6_TRANSPARENT, 1)
            elif transparent:
                made.setsockopt(sockets.IPPROTO_IP, _IP_TRANSPARENT, 1)
            made.bind((self.gateway_v6 if family == sockets.AF_INET6 else self.gateway_v4, port))
            if kind == sockets.SOCK_STREAM:
                made.listen(_BACKLOG)
            return made.detach()

    def _of(self, slot: int) -> _Linked:
        linked = self._linked.get(slot)
        if linked is None:
            raise KernelError("policy", _name(slot), ENODEV)
        return linked

    def _take_view(self) -> int:
        with self._lock:
            self._next_view += 1
            return self._next_view

    def _forget(self, ifindex: int) -> None:
        for name in ("boxes", "meters", "swept"):
            from_kernel(self._maps[name].remove)(_number(ifindex))

    def _index(self, slot: int) -> int:
        """The number of the slot's device in the router; 0 where there is none."""
        try:
            return int(self._links.index(_name(slot)))
        except OSError as error:
            if error.errno in (ENODEV, ENOENT):
                return 0
            raise

    def _reach(self, slot: int) -> None:
        """Sends the host's answers for a block of slots, which is one server's alone, to this node's router."""
        block = slot // _BLOCK
        with self._lock:
            if block in self._blocks:
                return
            first = _FIRST + block * _BLOCK
            v4, v6 = str(self._v4[first]), str(self._v6[first])
            from_kernel(self._links.behind)(self._uplink, (v4, 24), (v6, 120))
            self._blocks.add(block)


def _name(slot: int) -> str:
    return f"s{slot}"


def _number(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _boot_ns(seconds: float) -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) + int(seconds * 1e9)
