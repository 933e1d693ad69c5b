"""Compressed layers: what is read, what is refused, and that a small blob cannot fill the disk."""

import gzip
import io
import lzma
from pathlib import Path

import pytest
import zstandard

from dsec.images.importing import Quiet
from dsec.images.inputs import ImportConfig
from dsec.images.spool import Digest, compression_of, open_archive
from dsec.model.errors import InvalidArgument, Unsupported
from imagekit import sha

DATA = b"".join(b"%d line of a layer\n" % i for i in range(200_000))


def unpack(raw: bytes, folder: Path, config: ImportConfig | None = None, diff_id: str | None = None) -> bytes:
    digest = Digest(diff_id) if diff_id else None
    with open_archive(io.BytesIO(raw), folder / "out", config or ImportConfig(), Quiet(), digest) as file:
        return file.read()


@pytest.mark.parametrize(
    "raw",
    [
        DATA, gzip.compress(DATA), gzip.compress(DATA[:99]) + gzip.compress(DATA[99:]) + bytes(700),
        zstandard.ZstdCompressor().compress(DATA),
        zstandard.ZstdCompressor().compress(DATA[:99]) + zstandard.ZstdCompressor().compress(DATA[99:]),
        b"\x50\x2a\x4d\x18\x03\0\0\0abc" + zstandard.ZstdCompressor().compress(DATA),
    ],
    ids=["plain", "gzip", "gzip-members-padded", "zstd", "zstd-frames", "zstd-skippable"],
)  # fmt: skip
def test_unpacks(raw: bytes, tmp_path: Path) -> None:
    assert unpack(raw, tmp_path, diff_id=sha(DATA)) == DATA


def test_highly_compressed_data_comes_whole(tmp_path: Path) -> None:
    zeros = bytes(50 << 20)
    assert unpack(gzip.compress(zeros), tmp_path) == zeros


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cut off"):
        unpack(gzip.compress(DATA)[:-9], tmp_path)
    broken = bytearray(gzip.compress(DATA))
    broken[len(broken) // 2] ^= 0xFF
    (tmp_path / "out").unlink()
    with pytest.raises(InvalidArgument):
        unpack(bytes(broken), tmp_path)
    (tmp_path / "out").unlink()
    with pytest.raises(InvalidArgument, match="more than"):
        unpack(gzip.compress(DATA), tmp_path, ImportConfig(archive_bytes=1 << 20))
    assert (tmp_path / "out").stat().st_size <= 1 << 20
    (tmp_path / "out").unlink()
    with pytest.raises(InvalidArgument, match="digest"):
        unpack(gzip.compress(DATA), tmp_path, diff_id=sha(b"other"))
    with pytest.raises(InvalidArgument, match="digest"):
        unpack(DATA, tmp_path, diff_id=sha(b"other"))
    with pytest.raises(Unsupported, match="xz"):
        compression_of(lzma.compress(b"x"))
    for bad in ("sha256:12", "md5:" + "0" * 64, "sha256:" + "G" * 64, "../../x"):
        with pytest.raises(InvalidArgument):
            Digest(bad)
