"""The operations that the apiserver serves itself; everything below /v1/sandboxes/{id} is the edge's."""

from msgspec import Struct

from dsec.model.errors import Busy, Conflict, ImageUnavailable, NotFound, QuotaExceeded, Unavailable, Unsupported
from dsec.model.spec import Batch, SandboxSpec
from dsec.model.tenancy import KeyCreated, KeySpec, KeyView, PrincipalSpec, PrincipalView, ProjectSpec, ProjectView
from dsec.model.views import BatchItem, ImageView, Me, Page, SandboxState, SandboxView, StopMany, Stopped
from dsec.web import NDJSON, Route

__all__ = ["ANY_KEY", "ROUTES", "CancelCreation", "ListSandboxes", "NamedProject"]

# Of routes that need a key and nothing more.
ANY_KEY = "any"


class ListSandboxes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which sandboxes. `label`: "key=value", repeatable; `state`: repeatable, none means all; `project`: the caller's."""

    job: str | None = None
    label: tuple[str, ...] = ()
    state: tuple[SandboxState, ...] = ()
    cursor: str | None = None
    limit: int = 100
    project: str | None = None


class CancelCreation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`request_id`: the idempotency key of the creation; `project`: where its sandbox was to be, the caller's if not said."""

    request_id: str
    project: str | None = None


class NamedProject(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A project by its path."""

    path: str


_CREATE = (Busy, QuotaExceeded, Unsupported, NotFound, ImageUnavailable, Conflict)

ROUTES: tuple[Route, ...] = (
    Route(name="create_sandbox", method="POST", path="/v1/sandboxes", summary="Create a sandbox; answers when it runs.",
          body=SandboxSpec, answer=SandboxView, status=201, errors=_CREATE, permission="sandbox.create", acts=True),
    Route(name="create_batch", method="POST", path="/v1/sandboxes/batch",
          summary="Create many; a line for each as it runs or fails.",
          body=Batch, answer=BatchItem, answer_media=NDJSON, permission="sandbox.create"),
    Route(name="cancel_creation", method="POST", path="/v1/sandboxes/cancel",
          summary="Nobody comes back for a creation: its sandbox is ended now, whether it ran already or not.",
          query=CancelCreation, permission="sandbox.create"),
    Route(name="list_sandboxes", method="GET", path="/v1/sandboxes", summary="List sandboxes, newest first, by page.",
          query=ListSandboxes, answer=Page, permission="sandbox.read"),
    Route(name="stop_many", method="POST", path="/v1/sandboxes/stop", summary="Stop all of a job, or with labels.",
          body=StopMany, answer=Stopped, permission="sandbox.use", acts=True),
    Route(name="list_images", method="GET", path="/v1/images", summary="List the images and layers by name.",
          answer=list[ImageView], permission="image.read", tag="images"),
    Route(name="get_image", method="GET", path="/v1/images/{name:rest}", summary="One image or layer by name.",
          answer=ImageView, errors=(NotFound,), permission="image.read", tag="images"),
    Route(name="me", method="GET", path="/v1/me", summary="Who the caller is and what it may do.",
          answer=Me, permission=ANY_KEY, tag="tenancy"),
    Route(name="list_projects", method="GET", path="/v1/projects", summary="The caller's project and those below it.",
          answer=list[ProjectView], permission="project.read", tag="tenancy"),
    Route(name="create_project", method="POST", path="/v1/projects", summary="Create a subproject out of its parent's quota.",
          body=ProjectSpec, answer=ProjectView, status=201, errors=(Conflict, NotFound, QuotaExceeded),
          permission="project.manage", tag="tenancy"),
    Route(name="set_quota", method="PUT", path="/v1/projects", summary="Change a project's quota.",
          body=ProjectSpec, answer=ProjectView, errors=(NotFound, QuotaExceeded), permission="project.manage", tag="tenancy"),
    Route(name="remove_project", method="DELETE", path="/v1/projects", summary="Remove an unused project.",
          query=NamedProject, errors=(Conflict, NotFound), permission="project.manage", tag="tenancy"),
    Route(name="list_principals", method="GET", path="/v1/principals", summary="Principals of the caller's projects.",
          answer=list[PrincipalView], permission="principal.manage", tag="tenancy"),
    Route(name="create_principal", method="POST", path="/v1/principals", summary="Create a principal out of one's permissions.",
          body=PrincipalSpec, answer=PrincipalView, status=201, errors=(Conflict, NotFound),
          permission="principal.manage", tag="tenancy"),
    Route(name="remove_principal", method="DELETE", path="/v1/principals/{name}", summary="Remove a principal and its keys.",
          errors=(NotFound,), permission="principal.manage", tag="tenancy"),
    Route(name="list_keys", method="GET", path="/v1/keys", summary="One's keys, with key.manage also others'; no secrets.",
          answer=list[KeyView], permission=ANY_KEY, tag="tenancy"),
    Route(name="create_key", method="POST", path="/v1/keys", summary="Make a key; its text is shown this once.",
          body=KeySpec, answer=KeyCreated, status=201, errors=(NotFound,), permission="key.manage", tag="tenancy"),
    Route(name="revoke_key", method="DELETE", path="/v1/keys/{id}", summary="End a key, at once.",
          errors=(NotFound,), permission=ANY_KEY, tag="tenancy"),
    Route(name="healthz", method="GET", path="/healthz", summary="The server answers.",
          answer_media="text/plain", tag="health"),
    Route(name="readyz", method="GET", path="/readyz", summary="Sandboxes can be created here.",
          answer_media="text/plain", errors=(Unavailable,), tag="health"),
    Route(name="metrics", method="GET", path="/metrics", summary="Counters in the text format of Prometheus.",
          answer_media="text/plain", permission="metrics.read", tag="health"),
    Route(name="openapi", method="GET", path="/openapi.json", summary="This document.",
          answer=dict, tag="health"),
)  # fmt: skip
