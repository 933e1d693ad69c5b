"""What of a sandbox's writable layer an image is made of: paths by pattern, scrubbed or kept.

Scrubbed means: the image has there what the layers beneath have, as if the sandbox had never touched it; for a folder, all that is in
it. What is kept by a pattern, with the folders on the way to it, is kept whatever else says otherwise.
"""

from collections.abc import Sequence

from dsec.model.errors import InvalidArgument
from dsec.model.tree import EntryKind
from dsec.rules.patterns import PathPattern

__all__ = ["DEFAULTS", "PLATFORM", "SOCKETS", "Scrub"]

PLATFORM = ("/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/dev/**", "/proc/**", "/sys/**")
"""What the platform itself puts there, or mounts over."""

DEFAULTS = (
    "/tmp/**", "/var/tmp/**", "/run/**", "/var/run/**", "/var/cache/apt/**", "/var/lib/apt/lists/**", "/root/.cache/pip/**",
    "/home/*/.cache/pip/**",
)  # fmt: skip
"""What only that one sandbox had use for."""

SOCKETS = "sockets"
"""The name, in reports, of the rule by which sockets are left out: they are of use to the processes that made them only."""

_MOST = 200


class Scrub:
    """The rules of one commit. `scrub` and `keep`: patterns beside the defaults; `defaults`: whether DEFAULTS hold.

    Raises InvalidArgument for a malformed pattern or more than 200 of either.
    """

    def __init__(self, scrub: Sequence[str], keep: Sequence[str], *, defaults: bool = True) -> None:
        if len(scrub) > _MOST or len(keep) > _MOST:
            raise InvalidArgument(f"at most {_MOST} patterns", field="scrub" if len(scrub) > _MOST else "keep")
        patterns = [PathPattern(text) for text in (*scrub, *PLATFORM, *(DEFAULTS if defaults else ()))]
        # By the first name, where that is a plain one: most paths of a layer then meet no pattern at all.
        self._by_first: dict[str, list[PathPattern]] = {}
        self._anywhere: list[PathPattern] = []
        for pattern in patterns:
            if pattern.first is None:
                self._anywhere.append(pattern)
            else:
                self._by_first.setdefault(pattern.first, []).append(pattern)
        self._keep = [PathPattern(text) for text in keep]

    def keeps(self, names: Sequence[str]) -> bool:
        """Whether a pattern of `keep` names the path or a folder that it is in."""
        return any(pattern.covers(names) for pattern in self._keep)

    def rule(self, names: Sequence[str], kind: EntryKind) -> str | None:
        """The pattern by which the path is scrubbed, whatever is said of the folders it is in; None: it is not."""
        if kind is EntryKind.SOCKET:
            return SOCKETS
        candidates = (*self._by_first.get(names[0], ()), *self._anywhere)
        return next((pattern.text for pattern in candidates if pattern.matches(names)), None)
