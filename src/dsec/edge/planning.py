"""What a backend is asked for, and what callers are told of its failures."""

from dsec.edge.resident import Resident
from dsec.model.aether import FileStatRequest
from dsec.model.errors import Busy, DSecError, ImageUnavailable, InvalidArgument, RuntimeFailure
from dsec.model.network import Link
from dsec.model.outcome import End
from dsec.model.plan import Identity, Limits, Plan
from dsec.model.spec import SandboxSpec
from dsec.ports.agent import Agent
from dsec.ports.backend import BackendFailure
from dsec.rules.admit import MIB

__all__ = ["check_user", "end_of", "error_of", "layers_named", "plan_of"]


def plan_of(resident: Resident, link: Link | None = None) -> Plan:
    """What its backend needs to start it."""
    spec = resident.row.spec
    layers, extra = resident.layers
    limits = Limits(
        memory_bytes=spec.memory_limit_mb * MIB,
        cpu_cores=spec.cpu_cores_limit,
        disk_bytes=spec.disk_limit_mb * MIB,
        pids=spec.pids_limit,
        open_files=spec.open_files_limit,
        shm_bytes=spec.shm_size_mb * MIB,
    )
    identity = Identity(
        hostname=spec.hostname or resident.id[:12], no_new_privileges=spec.no_new_privileges, qos=spec.qos
    )
    return Plan(
        sandbox_id=resident.id, layers=tuple(layers), mounts=tuple(extra), limits=limits, identity=identity, link=link
    )


def layers_named(spec: SandboxSpec) -> tuple[str, ...]:
    """Names of all images and layers that the sandbox needs."""
    below = (spec.container_image, *(() if spec.workspace is None else (spec.workspace,)), *spec.toolkits)
    return (*below, *(mount.data for mount in spec.mounts if mount.data is not None))


def error_of(failure: BackendFailure) -> DSecError:
    """A backend's failure as callers see it."""
    if failure.end is End.CAPACITY:
        return Busy(failure.detail, retry_after=1.0)
    if failure.end is End.IMAGE:
        return ImageUnavailable(failure.detail)
    return RuntimeFailure(failure.detail)


def end_of(error: DSecError, *, mounting: bool) -> End:
    """The class of the end of a sandbox that did not start for `error`."""
    if isinstance(error, InvalidArgument):
        return End.STOPPED
    return End.IMAGE if mounting else End.CAPACITY


async def check_user(resident: Resident, agent: Agent) -> None:
    """The sandbox's own accounts know `init_user`, by aether's reading; a number needs no account. Raises InvalidArgument."""
    user = resident.row.spec.init_user
    if not user or user.isdecimal():
        return
    try:
        await agent.call(FileStatRequest(path="/", user=user, follow=True))
    except DSecError as error:
        if error.fields.get("what") != "user":
            raise
        raise InvalidArgument(error.detail, field="init_user") from error
