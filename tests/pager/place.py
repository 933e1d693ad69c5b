"""Layers as stores and shelves have them, and a pager of one's own to serve them: written from the formats alone."""

import hashlib
import json
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import zstandard

from dsec.kernel.erofs import BLOCK_BYTES, ErofsEntry, erofs_image
from dsec.kernel.mounts import mount_erofs, umount

BINARY = Path(__file__).parents[2] / "src/dsec/_bin/dsec-pager"
TARGET = 32 * 1024
PACK = 4 * 1024 * 1024
ZEROS = 0xFFFFFFFF


@dataclass
class Made:
    """A layer in a store: what each file holds, and where its chunks lie."""

    hex: str
    files: Mapping[str, bytes]
    offsets: Mapping[str, int]
    lengths: Sequence[int]
    store: Path
    parts: Mapping[str, bytes] = field(repr=False)

    def chunks_of(self, name: str) -> range:
        """The chunks that a file's content is in."""
        start, end = self.offsets[name], self.offsets[name] + max(1, len(self.files[name]))
        place, found = 0, []
        for number, length in enumerate(self.lengths):
            if place < end and start < place + length:
                found.append(number)
            place += length
        return range(found[0], found[-1] + 1)

    def packs(self) -> list[Path]:
        return sorted((self.store / "v2/packs").iterdir())


def _cut(files: Mapping[str, bytes]) -> tuple[bytes, dict[str, int], list[int]]:
    data, offsets, lengths = bytearray(), {}, []
    for name, content in sorted(files.items()):
        offsets[name] = len(data)
        padded = content + bytes(-len(content) % BLOCK_BYTES)
        data += padded
        lengths += [min(TARGET, len(padded) - at) for at in range(0, len(padded), TARGET)]
    return bytes(data), offsets, lengths


def make_layer(store: Path, files: Mapping[str, bytes], *, compressed: bool = True) -> Made:
    """Writes the packs of a layer with `files` into `store`; its other files are in `parts`."""
    data, offsets, lengths = _cut(files)
    head = struct.pack("<8sIIQQI28x", b"DSECIDX2", BLOCK_BYTES, 1024, len(lengths), len(data), TARGET)
    entries, rows, packs, pack = [], [], [], bytearray()
    packer = zstandard.ZstdCompressor(level=3)
    place = 0

    def close() -> None:
        packs.append(hashlib.sha256(pack).digest())
        folder = store / "v2/packs"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / packs[-1].hex()).write_bytes(pack)
        pack.clear()

    for length in lengths:
        chunk = data[place : place + length]
        place += length
        entries.append(struct.pack("<I", length // BLOCK_BYTES) + hashlib.sha256(chunk).digest())
        if not any(chunk):
            rows.append(struct.pack("<IIII", ZEROS, 0, 0, 0))
            continue
        frame = packer.compress(chunk) if compressed else chunk
        stored, encoding = (frame, 1) if len(frame) < length else (chunk, 0)
        rows.append(struct.pack("<IIII", len(packs), len(pack), len(stored), encoding))
        pack += stored
        if len(pack) > PACK:
            close()
    if pack:
        close()
    pages = [b"".join(entries[at : at + 1024]) for at in range(0, len(entries), 1024)]
    root = hashlib.sha256(head + b"".join(hashlib.sha256(page).digest() for page in pages)).hexdigest()
    blob = {"digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}
    manifest = json.dumps({"schema_version": 2, "hash_root": f"sha256:{root}", "data": blob}).encode()
    parts = {
        "manifest.json": manifest,
        "index": head + b"".join(pages),
        "map": struct.pack("<8sIIQ40x", b"DSECMAP2", len(packs), 0, len(rows)) + b"".join([*packs, *rows]),
        "meta.erofs": _meta(files, offsets, len(data) // BLOCK_BYTES),
    }
    return Made(hashlib.sha256(manifest).hexdigest(), files, offsets, lengths, store, parts)


def _meta(files: Mapping[str, bytes], offsets: Mapping[str, int], blocks: int) -> bytes:
    def entry(path: str, kind: int, mode: int, offset: int, size: int) -> ErofsEntry:
        return ErofsEntry(path.encode(), kind, mode, 0, 0, 0, 0, (0, 0), b"", (), 0, offset, size)

    found = [entry("", 1, 0o755, 0, 0)]
    found += [entry(name, 0, 0o644, offsets[name], len(content)) for name, content in files.items()]
    return erofs_image(found, bytes(16), blocks)


class Refused(Exception):
    """An error that the pager answered: `code` and words."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


class Control:
    """A connection to a pager."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        self._socket.connect(str(path))
        self._id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, raw: bytes) -> None:
        self._socket.sendall(struct.pack("<I", len(raw)) + raw)

    def receive(self) -> dict[str, Any]:
        (length,) = struct.unpack("<I", self._exactly(4))
        found: dict[str, Any] = msgspec.msgpack.decode(self._exactly(length))
        return found

    def _exactly(self, count: int) -> bytes:
        got = b""
        while len(got) < count:
            more = self._socket.recv(count - len(got))
            if not more:
                raise ConnectionError("the pager closed the connection")
            got += more
        return got

    def ask(self, op: str, **fields: object) -> Any:
        self._id += 1
        self.send(msgspec.msgpack.encode({"op": op, "id": self._id, **fields}))
        answer = self.receive()
        assert answer["id"] == self._id
        if "error" in answer:
            raise Refused(answer["error"]["code"], answer["error"]["detail"])
        return answer["ok"]


class Pager:
    """A pager over a state directory, its layers' folders and their mounts; all of it goes with the context."""

    def __init__(self, state: Path, mechanism: str) -> None:
        self.state = state
        self.mechanism = mechanism
        self.socket = state / "run/pager.sock"
        self._mounts: list[Path] = []
        self._mounted = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        (self.state / "run").mkdir(parents=True)
        words = [str(BINARY), "--socket", str(self.socket), "--state", str(self.state)]
        self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
        until(self.socket.exists)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.retire()

    def again(self) -> None:
        """Starts anew with no layer here."""
        shutil.rmtree(self.state)
        self.__enter__()

    def retire(self) -> None:
        """Unmounts what is mounted and ends the pager, which also closes its connections to stores."""
        for target in reversed(self._mounts):
            umount(str(target))
        self._mounts.clear()
        hello = self.ask("hello", version=1)
        self.ask("stop", force=True)
        if self._process is not None:
            self._process.wait(20)
            self._process = None
        until(lambda: not any(alive(hello[name]) for name in ("pid", "keeper")))

    def control(self) -> Control:
        return Control(self.socket)

    def ask(self, op: str, **fields: object) -> Any:
        with self.control() as control:
            return control.ask(op, **fields)

    def folder(self, made: Made) -> Path:
        return self.state / "layers" / made.hex

    def store(self, made: Made) -> dict[str, Any]:
        return {"url": f"file://{made.store}"}

    def attach(self, made: Made, **more: Any) -> Any:
        """The layer as a pull leaves it (all but its data), attached."""
        folder = self.folder(made)
        if not folder.exists():
            folder.mkdir(parents=True)
            for name, content in made.parts.items():
                (folder / name).write_bytes(content)
        fields = {"store": self.store(made), "mechanism": self.mechanism, **more}
        return self.ask("attach", layer=made.hex, directory=str(folder), **fields)

    def mount(self, made: Made, **more: Any) -> Path:
        data = self.attach(made, **more)["data_path"]
        target = self.state / "mnt" / f"{made.hex[:12]}.{self._mounted}"
        self._mounted += 1
        target.mkdir(parents=True)
        mount_erofs(str(self.folder(made) / "meta.erofs"), data, str(target))
        self._mounts.append(target)
        return target

    def unmount(self, target: Path) -> None:
        umount(str(target))
        self._mounts.remove(target)

    def stats(self, made: Made) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("stats", layer=made.hex)["layers"][made.hex]
        return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition: Any, seconds: float = 20.0) -> None:
    """Waits for something that another process does, which tells nobody."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be in time"
        time.sleep(0.01)


def forget_pages(target: Path) -> None:
    """Drops what the page cache has of the files below a mount, so that a read asks its device again."""
    for path in target.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class Reader(threading.Thread):
    """Reads a file in the background; `got` is its bytes or its error."""

    def __init__(self, path: Path, offset: int = 0, count: int = -1) -> None:
        super().__init__(daemon=True)
        self.path, self.offset, self.count = path, offset, count
        self.got: bytes | OSError | None = None
        self.start()

    def run(self) -> None:
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                self.got = file.read(self.count)
        except OSError as error:
            self.got = error

    def result(self, seconds: float = 60.0) -> bytes | OSError | None:
        self.join(seconds)
        assert not self.is_alive(), "the reader still waits"
        return self.got


@contextmanager
def away(store: Path) -> Iterator[None]:
    """The store's directory is gone, as a shared file system that is not mounted."""
    other = store.with_name(store.name + ".away")
    store.rename(other)
    try:
        yield
    finally:
        other.rename(store)


def detached(pager: Pager, made: Made) -> bool:
    """Whether the layer was let go of; False while something has it open."""
    try:
        pager.ask("detach", layer=made.hex)
    except Refused as refused:
        assert refused.code == "busy"
        return False
    return True
