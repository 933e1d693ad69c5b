"""What only a platform's operator can do, as the suite asks for it."""

from pathlib import Path
from typing import Protocol

import pytest

__all__ = ["Foreign", "Site", "needs"]


class Site(Protocol):
    """A platform under test, and the powers over it that its operator lends; `powers` names those it has.

    `import`: import_image works. `kill`: kill and start work; `url` may change with a start. `crash`: crash_agent and cut_agent
    work. `log`: server_log works. `tenants`: another_key works. Without `import` the images named in docs/conformance.md must be there.
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

    def crash_agent(self, sandbox_id: str) -> None:
        """Ends the sandbox's agent, and nothing else, as a crash of it would."""
        ...

    def cut_agent(self, sandbox_id: str) -> int:
        """Breaks every connection that the server has to the sandbox's agent now; how many. Both go on."""
        ...

    def server_log(self) -> str:
        """What the server has logged."""
        ...

    def another_key(self) -> str:
        """A key of a tenant who shares nothing with the one of `key`, with the same rights and quota."""
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

    def crash_agent(self, sandbox_id: str) -> None:
        raise NotImplementedError("this platform lends no power over its agents")

    def cut_agent(self, sandbox_id: str) -> int:
        raise NotImplementedError("this platform lends no power over its agents")

    def server_log(self) -> str:
        raise NotImplementedError("this platform shows nobody its log")

    def another_key(self) -> str:
        raise NotImplementedError("this platform lends no second tenant")


def needs(site: Site, power: str) -> None:
    """Skips the test, by name, where the platform does not lend the power."""
    if power not in site.powers:
        pytest.skip(f"the platform lends no power to {power}: give --dsec-site")
