"""Who may do what where: permissions as data, and the visibility of projects by their path.

A principal acts in one project; it sees that project and those below it, and nothing else. What it hands on is never more
than it holds.
"""

import re
from collections.abc import Iterable

from dsec.model.errors import InvalidArgument, PermissionDenied

__all__ = [
    "PERMISSIONS", "ROOT_PROJECT", "check_delegation", "check_image_name", "check_project_path", "may", "may_use_image", "parent_of",
    "sees",
]  # fmt: skip

ROOT_PROJECT = "root"

PERMISSIONS: dict[str, str] = {
    "sandbox.create": "create sandboxes",
    "sandbox.read": "see sandboxes, their usage and events",
    "sandbox.use": "run commands in sandboxes, read and write their files, renew and stop them",
    "image.read": "see images and layers",
    "image.write": "make images of sandboxes",
    "project.read": "see projects and their quota",
    "project.manage": "create, change and remove subprojects",
    "principal.manage": "create and remove principals",
    "key.manage": "create keys, list and revoke those of other principals",
    "metrics.read": "read the node's metrics",
}

_SEGMENT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")
_MAX_DEPTH = 16


def check_project_path(path: str) -> None:
    """Raises InvalidArgument unless `path` is "root", or names below it, each [a-z0-9._-]{1,63}, at most 16 deep."""
    segments = path.split("/")
    if segments[0] != ROOT_PROJECT or len(segments) > _MAX_DEPTH or not all(map(_SEGMENT.match, segments)):
        raise InvalidArgument(f"{path!r} is not a project path such as root/team/run-7", field="project")


def parent_of(path: str) -> str | None:
    """The project that `path` lies in; None for the root."""
    head, _, _ = path.rpartition("/")
    return head or None


def sees(own: str, project: str) -> bool:
    """True where someone of project `own` may see `project`: itself, or one below it."""
    return project == own or project.startswith(own + "/")


def check_image_name(project: str, name: str) -> None:
    """Raises PermissionDenied unless someone of `project` may give an image this name: root any, others one that begins with their
    project's path below root and a slash ("team/run-7/tools:1" for root/team/run-7, and for root/team)."""
    below = project.removeprefix(ROOT_PROJECT).removeprefix("/")
    if below and not name.startswith(below + "/"):
        raise PermissionDenied(f"images of {project} have names that begin with {below}/", project=project)


def may_use_image(own: str, owner: str) -> bool:
    """True where someone of project `own` may use an image of `owner` ("": everyone's): its own, of a project below or of one above."""
    return not owner or sees(own, owner) or sees(owner, own)


def may(own: str, permissions: frozenset[str], permission: str, project: str) -> bool:
    """True where a principal of project `own` that holds `permissions` may do `permission` in `project`."""
    return permission in permissions and sees(own, project)


def check_delegation(own: str, held: frozenset[str], project: str, given: Iterable[str]) -> frozenset[str]:
    """The permissions `given` to someone in `project` by one of `own` that holds `held`.

    Raises InvalidArgument for a permission that does not exist, PermissionDenied for more than the giver holds or for a
    project that the giver does not see.
    """
    wanted = frozenset(given)
    unknown = sorted(wanted - PERMISSIONS.keys())
    if unknown:
        raise InvalidArgument(f"no such permission: {', '.join(unknown)}", field="permissions")
    if not sees(own, project):
        raise PermissionDenied("the project is not yours", project=project)
    missing = sorted(wanted - held)
    if missing:
        raise PermissionDenied(f"you do not hold what you would give: {', '.join(missing)}", permission=missing[0])
    return wanted
