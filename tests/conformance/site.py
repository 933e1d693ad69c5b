"""A node of one's own as the suite's site: the operator's powers over it."""

from pathlib import Path

from dsec.testing.node import Node
from imagekit import Shelf

__all__ = ["OwnNode"]


class OwnNode(Node):
    """A Node that can be asked all that the suite asks of an operator."""

    powers = frozenset({"import", "kill", "memory"})

    @property
    def key(self) -> str:
        return self.api_key

    def import_image(self, name: str, source: Path) -> None:
        """In this process, on the node's store, as the command line does it: thirty images are not thirty starts of Python."""
        Shelf(self.state).import_image(name, source)

    def remove_image(self, name: str) -> None:
        Shelf(self.state).names.remove(name)

    def server_memory(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
        raise AssertionError("the server has no VmHWM")
