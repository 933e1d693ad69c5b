"""Which pages of a mounted layer's files the page cache holds: what the kernel asked for since the layer was mounted."""

import ctypes
import os
from pathlib import Path

__all__ = ["evict", "resident_bytes"]

PAGE = os.sysconf("SC_PAGE_SIZE")
PROT_READ, MAP_SHARED = 1, 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def _pages(path: str, size: int) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        place = _libc.mmap(None, size, PROT_READ, MAP_SHARED, fd, 0)  # maps, and reads nothing
        if place in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        there = ctypes.create_string_buffer(-(-size // PAGE))
        failed = _libc.mincore(place, size, there)
        _libc.munmap(place, size)
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        return sum(byte & 1 for byte in there.raw)
    finally:
        os.close(fd)


def resident_bytes(mount: Path) -> int:
    """Bytes of the contents of regular files below `mount`, each file once, that the page cache holds."""
    seen: set[int] = set()
    pages, pending = 0, [str(mount)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False) and entry.inode() not in seen:
                    seen.add(entry.inode())
                    if size := entry.stat(follow_symlinks=False).st_size:
                        pages += _pages(entry.path, size)
    return pages * PAGE


def evict(path: Path) -> None:
    """Lets the page cache forget a file that nothing maps and nobody changed."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
