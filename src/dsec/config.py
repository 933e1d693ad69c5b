"""The configuration of a node: defaults, then a TOML file, then DSEC_* variables, then the command line.

The one place that reads the environment. A setting is a field of a frozen dataclass beside the code that it sets; its name is
`section.field`, its variable DSEC_SECTION_FIELD. What nobody declared is an error.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, cast, get_type_hints

import msgspec

from dsec.cluster.apiserver import ApiServerSettings
from dsec.cluster.placement import PlacementSettings
from dsec.cluster.serve import ServerSettings
from dsec.cluster.watcher import WatcherSettings
from dsec.edge.backends.settings import ContainerOptions
from dsec.edge.lifecycle import LifecycleSettings
from dsec.edge.network.settings import NetworkSettings
from dsec.edge.node import NodeSettings
from dsec.edge.operations import OperationSettings
from dsec.edge.pulse import PulseSettings
from dsec.gate.settings import GateSettings
from dsec.images.committing import CommitSettings
from dsec.images.settings import ImagesSettings
from dsec.kernel.network import FabricSettings
from dsec.model.errors import InvalidArgument
from dsec.model.settings import setting

__all__ = ["Config", "Explained", "Loaded", "load", "reference"]

DEFAULT_FILE = Path("/etc/dsec/config.toml")
# Read by the client library or by this module, and no settings of a node.
OTHER_VARIABLES = frozenset({"DSEC_CONFIG", "DSEC_URL", "DSEC_API_KEY", "DSEC_CA_FILE", "DSEC_CREDENTIALS"})


@dataclass(frozen=True)
class StateSettings:
    """Settings of the node as a whole."""

    state: str = setting("/var/lib/dsec", "directory of all that the node keeps: images, pool, journal, keys")


@dataclass(frozen=True)
class Config:
    """All settings of a node, by section."""

    node: StateSettings
    server: ServerSettings
    apiserver: ApiServerSettings
    placement: PlacementSettings
    watcher: WatcherSettings
    edge: NodeSettings
    lifecycle: LifecycleSettings
    operations: OperationSettings
    pulse: PulseSettings
    container: ContainerOptions
    images: ImagesSettings
    commit: CommitSettings
    network: NetworkSettings
    fabric: FabricSettings
    gate: GateSettings

    @property
    def state(self) -> Path:
        """The state directory."""
        return Path(self.node.state)


@dataclass(frozen=True)
class Explained:
    """One setting for people. `origin`: default, the file's path, the variable's name, or command line."""

    name: str
    variable: str
    value: object
    origin: str
    default: object
    meaning: str


@dataclass(frozen=True)
class Loaded:
    """A configuration and where each value came from."""

    config: Config
    origins: Mapping[str, str]

    def explain(self) -> list[Explained]:
        """Every setting in the order of declaration."""
        return [
            Explained(
                name=name, variable=_variable(name), value=getattr(getattr(self.config, section), field.name),
                origin=self.origins.get(name, "default"), default=_default(field), meaning=field.metadata["meaning"],
            )
            for section, name, field in _declared()
        ]  # fmt: skip


def load(overrides: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Loaded:
    """The configuration. `overrides`: from the command line, by name (None: not given); `environ`: the process's own.

    Raises InvalidArgument, naming the setting and where it stands, for an unknown name or a value of the wrong type.
    """
    variables = os.environ if environ is None else environ  # noqa: TID251 - the one place
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for name, value, origin in _given(variables, overrides or {}):
        values[name], origins[name] = value, origin
    sections = {}
    hints = {section: get_type_hints(kind) for section, kind in _sections().items()}
    for section, kind in _sections().items():
        chosen = {}
        for field in _settings(kind):
            name = f"{section}.{field.name}"
            if name in values:
                chosen[field.name] = _convert(values[name], hints[section][field.name], name, origins[name])
        try:
            sections[section] = kind(**chosen)
        except InvalidArgument as error:
            raise InvalidArgument(f"section {section}: {error.detail}", **error.fields) from error
    return Loaded(Config(**sections), origins)


def reference() -> str:
    """docs/configuration.md: every setting, in Markdown."""
    parts = [_HEAD]
    for section, kind in _sections().items():
        parts.append(
            f"\n## {section}\n\n{(kind.__doc__ or '').strip()}\n\n| setting | default | meaning |\n| --- | --- | --- |\n"
        )
        for field in _settings(kind):
            shown = msgspec.json.encode(_default(field), enc_hook=str).decode()
            parts.append(f"| `{section}.{field.name}` | `{shown}` | {field.metadata['meaning']} |\n")
    return "".join(parts)


_HEAD = """# Configuration

Generated by `dsec config reference`; do not edit. `dsec config explain` shows the values of a node and where each comes from.

A setting is taken from its default, then the file named by `DSEC_CONFIG` (else `/etc/dsec/config.toml`, if there), then its
variable `DSEC_SECTION_SETTING`, then the command line. In the file a section is a TOML table. An unknown name is an error.
"""


def _sections() -> dict[str, type[Any]]:
    return cast(dict[str, type[Any]], get_type_hints(Config))


def _settings(kind: type[Any]) -> list[Field[Any]]:
    return [field for field in fields(kind) if "meaning" in field.metadata]


def _declared() -> Iterator[tuple[str, str, Field[Any]]]:
    for section, kind in _sections().items():
        for field in _settings(kind):
            yield section, f"{section}.{field.name}", field


def _variable(name: str) -> str:
    return "DSEC_" + name.replace(".", "_").upper()


def _default(field: Field[Any]) -> object:
    return field.default if field.default is not MISSING else cast(Any, field.default_factory)()


def _given(variables: Mapping[str, str], overrides: Mapping[str, object]) -> Iterator[tuple[str, object, str]]:
    known = {name for _, name, _ in _declared()}
    named = variables.get("DSEC_CONFIG")
    file = Path(named) if named else DEFAULT_FILE
    if named or file.exists():
        yield from _from_file(file, known)
    by_variable = {_variable(name): name for name in known}
    for variable, value in variables.items():
        if variable.startswith("DSEC_") and variable not in OTHER_VARIABLES:
            if variable not in by_variable:
                raise InvalidArgument(f"{variable} is no setting; see `dsec config explain`", field=variable)
            yield by_variable[variable], value, variable
    for name, given in overrides.items():
        if given is not None:
            yield name, given, "command line"


def _from_file(file: Path, known: set[str]) -> Iterator[tuple[str, object, str]]:
    try:
        content = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file}: {error}", field="DSEC_CONFIG") from error
    for section, table in content.items():
        if not isinstance(table, dict):
            raise InvalidArgument(f"{file}: {section} stands outside a section", field=section)
        for key, value in table.items():
            if f"{section}.{key}" not in known:
                raise InvalidArgument(f"{file}: {section}.{key} is no setting", field=f"{section}.{key}")
            yield f"{section}.{key}", value, str(file)


def _convert(value: object, kind: Any, name: str, origin: str) -> object:
    try:
        return msgspec.convert(value, kind, strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{name} ({origin}): {error}", field=name) from error
