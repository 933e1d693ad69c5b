"""Named services and credentials of a node: DSec's own list, and over it the operator's files."""

import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from dsec.gate.settings import RELAY_PORT, RESOLVER_PORT, Credential, MirrorService
from dsec.model.errors import InvalidArgument
from dsec.model.network import MirrorKind, NetworkRule, Service
from dsec.rules.netrules import check_rules

__all__ = ["OWN", "Upstream", "load_credentials", "load_services"]

OWN = Path(__file__).with_name("services.toml")
_FIRST_PORT = 3200
_SECRET_MAX = 8192


class Upstream(Struct, frozen=True, kw_only=True):
    """Where a client installed on this node gets packages from: base URL of its index, and the hosts that it asks."""

    index: str = ""
    hosts: tuple[str, ...] = ()


class _Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a services file."""

    mirror: MirrorKind | None = None
    port: int = 0
    upstream: str = ""
    hosts: tuple[str, ...] = ()
    ports: tuple[int | str, ...] = (443,)
    env: dict[str, str] = {}
    credential: str = ""


class _Secret(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a credentials file: the fields of Credential, less its name."""

    hosts: tuple[str, ...]
    value: str
    header: str = "Authorization"
    certificate: str = ""
    key: str = ""
    port: int = 443
    plain: bool = False


def _tables(path: Path, setting: str) -> dict[str, dict[str, Any]]:
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: {error}", field=setting) from error
    for name, table in content.items():
        if not isinstance(table, dict):
            raise InvalidArgument(f"{path}: {name} stands outside a table", field=setting)
    return content


def load_services(
    file: Path | None, upstreams: Mapping[str, Upstream]
) -> tuple[dict[str, Service], tuple[MirrorService, ...]]:
    """The services of this node by name, and the mirrors to be served. `file`: the operator's; `upstreams`: what installed clients use.

    A service for which nothing says where it is has `why_not` set. Raises InvalidArgument, naming the table, for what a file says wrongly.
    """
    tables = _tables(OWN, "network.services")
    for name, table in (_tables(file, "network.services") if file else {}).items():
        tables[name] = {**tables.get(name, {}), **table}
    check_rules(dict.fromkeys(tables, True), "network.services")
    services: dict[str, Service] = {}
    mirrors: list[MirrorService] = []
    taken = {RESOLVER_PORT: "the resolver", RELAY_PORT: "the relay"}
    for index, (name, table) in enumerate(sorted(tables.items())):
        entry = _entry(name, table)
        service, mirror = _made(name, entry, upstreams.get(name, Upstream()), _FIRST_PORT + index)
        services[name] = service
        if mirror is not None:
            if mirror.port in taken:
                raise InvalidArgument(
                    f"{name} and {taken[mirror.port]} have the same port", field=f"network.services.{name}.port"
                )
            taken[mirror.port] = name
            mirrors.append(mirror)
    return services, tuple(mirrors)


def _entry(name: str, table: dict[str, Any]) -> _Entry:
    try:
        entry = msgspec.convert(table, _Entry)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"service {name}: {error}", field=f"network.services.{name}") from error
    if not 0 <= entry.port <= 65535:
        raise InvalidArgument("1 to 65535", field=f"network.services.{name}.port")
    check_rules({name: NetworkRule(hosts=entry.hosts, ports=entry.ports)}, "network.services")
    return entry


def _made(name: str, entry: _Entry, found: Upstream, port: int) -> tuple[Service, MirrorService | None]:
    hosts = entry.hosts or found.hosts
    if entry.mirror is None:
        why = "" if hosts else f"no client on this node says where {name} is; give `hosts` in the file network.services"
        service = Service(
            name=name, hosts=hosts, ports=entry.ports, env=entry.env, credential=entry.credential, why_not=why
        )  # fmt: skip
        return service, None
    upstream = entry.upstream or found.index
    why = (
        "" if upstream else f"no client on this node says where {name} is; give `upstream` in the file network.services"
    )
    service = Service(
        name=name, mirror=entry.mirror, port=entry.port or port, hosts=hosts, env=entry.env, credential=entry.credential,
        why_not=why,
    )  # fmt: skip
    if why:
        return service, None
    return service, MirrorService(
        service=name, kind=entry.mirror, port=service.port, upstream=upstream, credential=entry.credential, hosts=hosts
    )


def load_credentials(file: Path | None) -> tuple[Credential, ...]:
    """What the operator's file holds. Raises InvalidArgument, without a value of the file, for one that others may read or that is wrong."""
    if file is None:
        return ()
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise InvalidArgument(f"{file}: {error.strerror}", field="network.credentials") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidArgument(f"{file} may be read by others: give it mode 0600", field="network.credentials")
    found = []
    for name, table in sorted(_tables(file, "network.credentials").items()):
        here = f"network.credentials.{name}"
        try:
            secret = msgspec.convert(table, _Secret)
        except msgspec.ValidationError:
            # The message could hold what it complains of.
            fields = ", ".join(_Secret.__struct_fields__)
            raise InvalidArgument(
                f"credential {name}: hosts and value, and of the right types: {fields}", field=here
            ) from None
        if (
            not secret.value
            or len(secret.value) > _SECRET_MAX
            or not secret.value.isprintable()
            or not secret.value.isascii()
        ):
            raise InvalidArgument(
                f"credential {name}: a value of 1 to {_SECRET_MAX} printable ASCII characters", field=here
            )
        check_rules({"hosts": NetworkRule(hosts=secret.hosts)}, here)
        found.append(Credential(name=name, **msgspec.structs.asdict(secret)))
    return tuple(found)
