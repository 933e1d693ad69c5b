"""Which requests come by a preview link: by its path, or by a host name of its own."""

import re
from typing import Any

from dsec.ports.cluster import Scope

__all__ = ["link_of"]

_PATH = re.compile(r"/p/([^/]+)(?:/|\Z)")
_LABEL = re.compile(r"\d{1,5}-(p[a-z2-7]{31})\Z")


def link_of(scope: Scope, domain: str | None) -> str | None:
    """The link's id; None for a request of another kind. One by host name PORT-ID.DOMAIN is rewritten to the path /p/ID/..., marked as such;
    on such a name nothing but the link is served, so that a page there can never reach the API as its own origin."""
    label = _label(scope, domain)
    if label is not None:
        found = _LABEL.match(label)
        link = found[1] if found else "p" + "a" * 31
        prefix = f"/p/{link}"
        raw: Any = scope.get("raw_path") or scope["path"].encode()
        scope.update({"path": prefix + scope["path"], "raw_path": prefix.encode() + raw, "dsec.preview_host": True})
        return link
    found = _PATH.match(scope["path"])
    return found[1] if found else None


def _label(scope: Scope, domain: str | None) -> str | None:
    if domain is None:
        return None
    for name, value in scope["headers"]:
        if name == b"host":
            host = value.decode("latin-1").lower().rpartition(":")[0] or value.decode("latin-1").lower()
            return host.removesuffix("." + domain) if host.endswith("." + domain) else None
    return None
