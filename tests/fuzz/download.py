"""Trees between a sandbox and this machine: dsec.sdk."""

import os
import stat
from pathlib import Path

from dsec.model.errors import DSecError
from dsec.sdk.packing import Packer
from dsec.sdk.records import Transfer
from dsec.sdk.unpacking import Unpacker
from fuzz.archives import open_descriptors, place
from fuzz.draw import Draw
from fuzz.hostile import archive

SECRET = b"untouched"


def receive(target: Path, raw: bytes, piece: int) -> Transfer | None:
    """The archive below `target`, in pieces; None where it is refused."""
    unpacker = Unpacker(target, "/w/tree")
    try:
        unpacker.open()
        for start in range(0, len(raw), piece):
            unpacker.feed(raw[start : start + piece])
        return unpacker.finish()
    except DSecError:
        return None
    finally:
        unpacker.close()


def seen(root: Path) -> dict[str, tuple[int, str, bytes]]:
    """Every path below `root`: its mode, its link's text, its bytes."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            text = os.readlink(path) if stat.S_ISLNK(status.st_mode) else ""
            data = Path(path).read_bytes() if stat.S_ISREG(status.st_mode) else b""
            found[os.path.relpath(path, root)] = (status.st_mode, text, data)
    return found


def inside(root: Path, found: dict[str, tuple[int, str, bytes]]) -> None:
    """Files, directories and links alone; no link leads out, whatever it leads through; no part is left."""
    top = os.path.realpath(root)
    for name, (mode, _, _) in found.items():
        assert stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
        assert stat.S_ISLNK(mode) or not mode & 0o7000
        assert not os.path.basename(name).startswith(".dsec-")
        end = os.path.realpath(os.path.join(top, name))
        assert end == top or end.startswith(top + "/"), (name, end)


def download(data: bytes) -> None:
    """Any archive of a hostile sandbox: nothing outside the target changes, what is inside stays inside, nothing is left open."""
    draw = Draw(data)
    piece = 1 + draw.number(2) % 3000
    raw = archive(draw).raw
    folder, before = place(), open_descriptors()
    (folder / "secret").write_bytes(SECRET)
    (folder / "outside").mkdir()
    done = receive(folder / "target", raw, piece)
    assert open_descriptors() == before
    assert (folder / "secret").read_bytes() == SECRET and (folder / "secret").stat().st_nlink == 1
    assert os.listdir(folder / "outside") == []
    assert set(os.listdir(folder)) <= {"secret", "outside", "target"}
    found = seen(folder / "target")
    inside(folder / "target", found)
    assert sum(len(data) for _, _, data in found.values()) <= len(raw) * 40  # hard links count for each name
    again = receive(folder / "target", raw, 1 << 16)  # over itself, and cut another way
    inside(folder / "target", seen(folder / "target"))
    assert (done is None) == (again is None)


def upload(data: bytes) -> None:
    """What was downloaded, packed for an upload and unpacked again, is the same tree."""
    folder = place()
    receive(folder / "first", archive(Draw(data)).raw, 1 << 16)
    before = open_descriptors()
    packer = Packer(folder / "first")
    raw = b"".join(packer.pieces())
    assert open_descriptors() == before
    done = receive(folder / "second", raw, 777)
    assert done is not None and done.refused == (), done
    assert seen(folder / "second") == seen(folder / "first")
