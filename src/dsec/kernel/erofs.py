"""EROFS metadata images, and what of a layer's data the page cache holds."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from dsec import _native
from dsec.kernel.errors import from_kernel

__all__ = ["BLOCK_BYTES", "MAX_DATA_BLOCKS", "ErofsEntry", "cached_bytes", "erofs_image"]

BLOCK_BYTES = 4096
MAX_DATA_BLOCKS = 2**32 - 2

_encoder = msgspec.msgpack.Encoder()


class ErofsEntry(Struct, frozen=True, array_like=True, gc=False):
    """One path of a tree, in the order that the native writer reads (crates/erofs, entry.rs, says what each means).

    `kind`: 0 file, 1 dir, 2 symlink, 3 fifo, 4 socket, 5 char, 6 block. `group`: entries of one non-zero number are one
    inode. `offset`: where a file's bytes lie in the data blob, a multiple of BLOCK_BYTES.
    """

    path: bytes
    kind: int
    mode: int
    uid: int
    gid: int
    mtime: int
    mtime_ns: int
    rdev: tuple[int, int]
    target: bytes
    xattrs: tuple[tuple[bytes, bytes], ...]
    group: int
    offset: int
    size: int


def erofs_image(entries: Sequence[ErofsEntry], uuid: bytes, data_blocks: int) -> bytes:
    """The metadata image of `entries` (any order, the root as the empty path, each parent listed).

    Raises ValueError, naming the path, for what the format cannot hold.
    """
    return _native.erofs_image(_encoder.encode(entries), uuid, data_blocks)


@from_kernel
def cached_bytes(path: str) -> int:
    """Bytes of the file that the page cache holds now. Raises KernelError: ENOENT, ENOSYS before kernel 6.5."""
    return _native.cached_bytes(path)
