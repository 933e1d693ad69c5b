"""Host ids for sandboxes: slots of 65,537, claimed host-wide in blocks so that two servers never share one."""

import fcntl
import os
from collections import deque
from errno import EAGAIN, ENOSPC
from pathlib import Path

from dsec.kernel.errors import KernelError, kernel_op

__all__ = ["IDS", "Slots", "agent_id", "base_id", "slot_of_agent"]

IDS = 65_536
_STRIDE = IDS + 1
_FIRST = 1 << 24
_BLOCK = 256
_BLOCKS = ((1 << 32) - 2 - _FIRST) // (_STRIDE * _BLOCK)
RUN = Path("/run/dsec/ids")


def base_id(slot: int) -> int:
    """Host id of root in the sandbox of `slot`; its ids are the 65,536 from here."""
    return _FIRST + slot * _STRIDE


def agent_id(slot: int) -> int:
    """Host id of that sandbox's aether: one past its own ids, so outside its map."""
    return base_id(slot) + IDS


def slot_of_agent(uid: int) -> int | None:
    """The slot whose aether has the host id `uid`, if it is one."""
    slot, rest = divmod(uid - _FIRST, _STRIDE)
    return slot if rest == IDS and slot >= 0 else None


class Slots:
    """`owner`: the server's state directory. A block is a locked file that names its owner; one whose owner is gone is
    taken over only when no process runs under its ids any more. Methods raise KernelError.

    A slot has a holder: `release` by another one does nothing, so a repeated undo cannot free somebody else's.
    """

    def __init__(self, owner: str, run: Path = RUN) -> None:
        self._owner = owner
        self._run = run
        self._locks: dict[int, int] = {}
        self._free: deque[int] = deque()
        self._holders: dict[int, str] = {}

    def open(self) -> None:
        """Claims again the blocks that carry the owner's name, or a first one."""
        with kernel_op("mkdir", str(self._run)):
            self._run.mkdir(parents=True, exist_ok=True, mode=0o755)
            mine = [block for block in _blocks(self._run) if _owner_of(self._run / str(block)) == self._owner]
        for block in mine:
            self._claim(block)
        if not self._locks:
            self._grow()

    def close(self) -> None:
        """Gives up the blocks in which no slot is held; the others keep the owner's name."""
        used = {slot // _BLOCK for slot in self._holders}
        for block, lock in self._locks.items():
            if block not in used:
                with kernel_op("unlink", str(block)):
                    (self._run / str(block)).unlink(missing_ok=True)
            os.close(lock)
        self._locks.clear()
        self._free.clear()
        self._holders.clear()

    def take(self, holder: str) -> int:
        """A free slot. Raises KernelError ENOSPC when the host has none."""
        if not self._free:
            self._grow()
        slot = self._free.popleft()
        self._holders[slot] = holder
        return slot

    def hold(self, slot: int, holder: str) -> bool:
        """Marks `slot` as held, after a restart or when it changes hands; False where another has it."""
        if self._holders.setdefault(slot, holder) != holder:
            return False
        if slot in self._free:
            self._free.remove(slot)
        return True

    def pass_on(self, slot: int, holder: str, to: str) -> bool:
        """Gives a held slot to another holder; False where another has it."""
        if self._holders.get(slot) != holder:
            return False
        self._holders[slot] = to
        return True

    def release(self, slot: int, holder: str) -> None:
        if self._holders.get(slot) == holder:
            del self._holders[slot]
            if slot // _BLOCK in self._locks:
                # Last in the queue: the longest unused ids are used next.
                self._free.append(slot)

    def _grow(self) -> None:
        for block in range(_BLOCKS):
            if block not in self._locks and self._claim(block):
                return
        raise KernelError("claim ids", str(self._run), ENOSPC)

    def _claim(self, block: int) -> bool:
        path = self._run / str(block)
        with kernel_op("claim ids", str(path)):
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                said = os.pread(lock, 4096, 0).decode("utf-8", "replace")
                if not _same_file(lock, path) or (said not in ("", self._owner) and _in_use(block)):
                    os.close(lock)
                    return False
                os.ftruncate(lock, 0)
                os.pwrite(lock, self._owner.encode(), 0)
            except OSError as error:
                os.close(lock)
                if error.errno == EAGAIN:
                    return False
                raise
        self._locks[block] = lock
        first = block * _BLOCK
        self._free.extend(slot for slot in range(first, first + _BLOCK) if slot not in self._holders)
        return True


def _blocks(run: Path) -> list[int]:
    return sorted(int(name) for name in os.listdir(run) if name.isdigit())


def _owner_of(path: Path) -> str:
    """ "" where the block was given up meanwhile."""
    try:
        return path.read_text("utf-8", "replace")
    except FileNotFoundError:
        return ""


def _same_file(fd: int, path: Path) -> bool:
    """False when the block was given up (unlinked) between our open and our lock."""
    try:
        return os.path.sameopenfile(fd, fd) and os.fstat(fd).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _in_use(block: int) -> bool:
    first, end = base_id(block * _BLOCK), base_id((block + 1) * _BLOCK)
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                status = Path("/proc", name, "status").read_text("ascii", "replace")
            except OSError:
                # It ended while we looked.
                continue
            if any(first <= uid < end for uid in _uids(status)):
                return True
    return False


def _uids(status: str) -> list[int]:
    for line in status.splitlines():
        if line.startswith("Uid:"):
            return [int(value) for value in line.split()[1:]]
    return []
