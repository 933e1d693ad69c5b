"""The program that reads a root's files in a sandbox, in a container and on the host alike. Needs nothing but Python.

`python3 reader.py read`: reads every file of FOLDERS once; prints seconds, bytes, and seconds of processor time. `large`: only files
of a MiB and more. `evict`: lets the page cache forget them all.
"""

import os
import sys
import time

FOLDERS = ("/usr/lib", "/usr/bin", "/usr/share")
LARGE = 1 << 20


def files(least: int) -> list[str]:
    found = []
    for top in FOLDERS:
        for place, _, names in os.walk(top):
            for name in names:
                path = os.path.join(place, name)
                if not os.path.islink(path) and os.path.isfile(path) and os.stat(path).st_size >= least:
                    found.append(path)
    return sorted(found)


def read(paths: list[str]) -> int:
    room, total = memoryview(bytearray(1 << 20)), 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        while count := os.readv(fd, [room]):
            total += count
        os.close(fd)
    return total


def forget(paths: list[str]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main(word: str) -> None:
    paths = files(LARGE if word == "large" else 1)
    begin, worked = time.perf_counter(), time.process_time()
    total = 0
    if word == "evict":
        forget(paths)
    else:
        total = read(paths)
    print(time.perf_counter() - begin, total, time.process_time() - worked)


main(sys.argv[1])
