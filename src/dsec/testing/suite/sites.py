"""What only a platform's operator can do, as the suite asks for it."""

from pathlib import Path
from typing import Protocol

import pytest

__all__ = ["Foreign", "Site", "needs"]


class Site(Protocol):
    """A platform under test, and the powers over it that its operator lends; `powers` names those it has.

    `import`: import_image works. `kill`: kill and start work; `url` may change with a start. Without `import` the images
    named in docs/conformance.md must be there.
    """

    url: str
    key: str
    powers: frozenset[str]

    def import_image(self, name: str, source: Path) -> None:
        """Makes an image of a directory, a tar or an OCI layout; an image of that name is replaced."""
        ...

    def remove_image(self, name: str) -> None:
        """Takes the name away."""
        ...

    def kill(self) -> None:
        """Ends the server as a crash would (SIGKILL); sandboxes stay."""
        ...

    def start(self) -> None:
        """Starts it again, on what it left."""
        ...

    def server_memory(self) -> int:
        """Resident bytes of the server, at their peak. Power `memory`."""
        ...


class Foreign:
    """A platform of which nothing but its address and a key are known."""

    powers: frozenset[str] = frozenset()

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.key = key

    def import_image(self, name: str, source: Path) -> None:
        raise NotImplementedError("this platform lends no power to import images")

    def remove_image(self, name: str) -> None:
        raise NotImplementedError("this platform lends no power to import images")

    def kill(self) -> None:
        raise NotImplementedError("this platform lends no power to end its server")

    def start(self) -> None:
        raise NotImplementedError("this platform lends no power to start its server")

    def server_memory(self) -> int:
        raise NotImplementedError("this platform does not say what its server uses")


def needs(site: Site, power: str) -> None:
    """Skips the test, by name, where the platform does not lend the power."""
    if power not in site.powers:
        pytest.skip(f"the platform lends no power to {power}: give --dsec-site")
