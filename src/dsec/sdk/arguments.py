"""What a caller passes: the published argument names, turned into the records of the model."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from dsec.model.errors import InvalidArgument
from dsec.model.network import NetLimits, NetworkRule, NetworkRules
from dsec.model.spec import MountSpec, SandboxSpec

__all__ = ["DSecContainerRunArgs", "rules_of"]


def rules_of(rules: Mapping[str, bool | NetworkRule | Sequence[NetworkRule]], field: str) -> NetworkRules:
    """The record of what a caller wrote; dictionaries are taken for NetworkRule. Raises InvalidArgument naming `field`."""
    try:
        return msgspec.convert(dict(rules), NetworkRules)
    except msgspec.ValidationError as error:
        raise InvalidArgument(str(error), field=field) from error


class DSecContainerRunArgs(Struct, frozen=True, kw_only=True):
    """A container sandbox to be created; published names, meanings and defaults of SandboxSpec.

    Sizes in MiB (2**20 bytes), times in seconds. `container_image`: name of a base image, a registry reference that was
    imported, or "sha256:...". `workspace`, `toolkits`: layers laid over it, lowest first. `cpu_cores_limit` may be
    fractional. `ttl_running_stop`: idle time after which the sandbox is stopped, None: never; `ttl_absolute`: life time
    that nothing extends. `network_rules`: None: loopback only, for good; {"npm": False, "pypi": True}: what is True; values may be a NetworkRule,
    options of a service as NetworkRule(before="2024-05-01"), or a list of rules. `network_phases`: such rules by the name of a phase, instead;
    `network_phase` is the first in force. `network_group`, `aliases`: a private network of the project's sandboxes that name it. `init_user`: user of commands that name none, "" means the image's. `job`, `labels`: for list and stop. `qos`: "be" best effort, "ls" latency sensitive.
    `mounts`: volumes and data layers. `project`: None means the key's own.
    """

    container_image: str
    workspace: str | None = None
    toolkits: Sequence[str] = ()
    memory_limit_mb: int = 2048
    cpu_cores_limit: float = 1.0
    disk_limit_mb: int = 4096
    pids_limit: int = 512
    open_files_limit: int = 4096
    shm_size_mb: int = 64
    ttl_running_stop: float | None = 300.0
    ttl_absolute: float | None = None
    network_rules: Mapping[str, bool | NetworkRule | Sequence[NetworkRule]] | None = None
    network_phases: Mapping[str, Mapping[str, bool | NetworkRule | Sequence[NetworkRule]]] = {}
    network_phase: str | None = None
    network_limits: NetLimits = NetLimits()
    network_group: str | None = None
    aliases: Sequence[str] = ()
    init_user: str = ""
    env: Mapping[str, str] = {}
    cwd: str | None = None
    labels: Mapping[str, str] = {}
    job: str | None = None
    qos: Literal["ls", "be"] = "be"
    mounts: Sequence[MountSpec] = ()
    hostname: str | None = None
    no_new_privileges: bool = False
    project: str | None = None

    def spec(self) -> SandboxSpec:
        """The record that goes to the server. Raises InvalidArgument for a value of the wrong type."""
        values = msgspec.structs.asdict(self)
        if values["project"] is None:
            del values["project"]
        for name in ("network_phases", "env", "labels"):
            values[name] = dict(values[name])
        if self.network_rules is not None:
            values["network_rules"] = rules_of(self.network_rules, "network_rules")
        values["network_phases"] = {
            phase: rules_of(rules, f"network_phases.{phase}") for phase, rules in self.network_phases.items()
        }
        for name, given in (("toolkits", self.toolkits), ("aliases", self.aliases)):
            if isinstance(given, str):
                raise InvalidArgument(f"{name} is a list of names, not one text", field=name)
        try:
            return msgspec.convert(values, SandboxSpec)
        except msgspec.ValidationError as error:
            raise InvalidArgument(str(error), field="args") from error
