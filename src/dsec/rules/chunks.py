"""Where the data of a layer is cut into chunks: at the beginnings of contents, so that a change of one file changes few chunks.

- A content of at least the target starts a chunk and is cut every target from its start; what is left is a chunk of its own.
- Runs of smaller contents are grouped. A group ends behind a content whose sha256 says so (the larger a content, the likelier;
  about once a target), is at least a quarter of the target before that, and never more than twice the target.

So where a cut lies depends on the contents near it alone, and not on what lies far before them.
"""

from dsec.model.errors import InvalidArgument

__all__ = ["BLOCK_BYTES", "MAX_CHUNK_BYTES", "Cutter", "check_target"]

BLOCK_BYTES = 4096
MAX_CHUNK_BYTES = 256 << 10


def check_target(target: int) -> int:
    """`target` in bytes, if chunks can be about that long: a multiple of 4 blocks, twice of it at most MAX_CHUNK_BYTES.

    Raises InvalidArgument.
    """
    if target <= 0 or target % (4 * BLOCK_BYTES) or 2 * target > MAX_CHUNK_BYTES:
        raise InvalidArgument(
            f"chunks of {target} bytes: a multiple of {4 * BLOCK_BYTES} up to {MAX_CHUNK_BYTES // 2} is needed",
            field="chunk_bytes",
        )
    return target


class Cutter:
    """Cuts contents, given in the order in which they lie in the data. `lengths`: of the chunks that are done, in blocks."""

    def __init__(self, target: int) -> None:
        self.lengths: list[int] = []
        self._target = check_target(target)
        self._group = 0

    def add(self, size: int, sha256: bytes) -> None:
        """The next content: `size` bytes (at least 1), which take whole blocks, and their hash, which counts for contents below the target."""
        blocks = -(-size // BLOCK_BYTES)
        if size >= self._target:
            self._end()
            each = self._target // BLOCK_BYTES
            full, rest = divmod(blocks, each)
            self.lengths += [each] * full
            if rest:
                self.lengths.append(rest)
            return
        taken = blocks * BLOCK_BYTES
        if self._group + taken > 2 * self._target:
            self._end()
        self._group += taken
        # Each content ends a group with the probability of its share of a target: groups are a target long on average.
        if 4 * self._group >= self._target and int.from_bytes(sha256[:4], "little") * self._target < taken << 32:
            self._end()

    def finish(self) -> list[int]:
        """All lengths; nothing can be added afterwards."""
        self._end()
        return self.lengths

    def _end(self) -> None:
        if self._group:
            self.lengths.append(self._group // BLOCK_BYTES)
            self._group = 0
