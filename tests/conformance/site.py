"""A node of one's own as the suite's site: the operator's powers over it."""

from pathlib import Path

from dsec.testing.node import Node

__all__ = ["OwnNode"]


class OwnNode(Node):
    """A Node that can be asked all that the suite asks of an operator."""

    powers = frozenset({"import", "kill", "memory"})

    @property
    def key(self) -> str:
        return self.api_key

    def import_image(self, name: str, source: Path) -> None:
        self.dsec("image", "import", name, str(source))

    def remove_image(self, name: str) -> None:
        self.dsec("image", "remove", name)

    def server_memory(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
        raise AssertionError("the server has no VmHWM")
