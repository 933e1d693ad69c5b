"""What lies beside a layer that came from a store: from where and how, which chunks are here, and the profile of first touches."""

import os
from pathlib import Path

import msgspec

from dsec.images.index import ChunkIndex
from dsec.images.making import DATA
from dsec.model.errors import ImageUnavailable, InvalidArgument
from dsec.model.loading import Origin, Profile
from dsec.rules.profiles import check_profile

__all__ = [
    "HAVE",
    "MAP",
    "ORIGIN",
    "PROFILE",
    "decode_profile",
    "keep_profile",
    "make_sparse",
    "read_origin",
    "read_profile",
    "write_origin",
]

ORIGIN, HAVE, MAP, PROFILE = "origin.json", "have", "map", "profile.json"
_PROFILE_BYTES = 64 << 20


def read_origin(folder: Path) -> Origin | None:
    """Where the layer in `folder` came from; None for one that was made here. Raises ImageUnavailable for a damaged record."""
    try:
        return msgspec.json.decode((folder / ORIGIN).read_bytes(), type=Origin)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ImageUnavailable(f"{ORIGIN} of layer {folder.name} is damaged: {error}") from error


def write_origin(folder: Path, origin: Origin) -> None:
    """Sets where a layer came from; a reader sees the old record or the new one."""
    _replace(folder / ORIGIN, msgspec.json.encode(origin))


def make_sparse(folder: Path, index: ChunkIndex) -> None:
    """Makes the layer's data as a hole of its whole length, and the set of the chunks that are here, which is empty."""
    with (folder / DATA).open("xb") as file:
        file.truncate(index.data_bytes)
    fd = os.open(folder / HAVE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, (index.count + 7) // 8)
    finally:
        os.close(fd)


def present_bytes(folder: Path, index: ChunkIndex) -> int:
    """Bytes of the chunks that are here: all of them where there is no set of them. Raises ImageUnavailable."""
    try:
        have = (folder / HAVE).read_bytes()
    except FileNotFoundError:
        return int(index.data_bytes)
    except OSError as error:
        raise ImageUnavailable(f"{HAVE} cannot be read: {error.strerror}") from error
    total = 0
    for number in range(min(index.count, 8 * len(have))):
        if have[number >> 3] >> (number & 7) & 1:
            total += index.length(number)
    return total


def read_profile(folder: Path, layer: str, chunks: int) -> Profile | None:
    """The profile kept beside a layer, None where there is none. Raises InvalidArgument for one that cannot be its."""
    path = folder / PROFILE
    try:
        if path.stat().st_size > _PROFILE_BYTES:
            raise InvalidArgument(f"{PROFILE} of layer {layer} is over {_PROFILE_BYTES} bytes", field="profile")
        return decode_profile(path.read_bytes(), layer, chunks)
    except FileNotFoundError:
        return None


def decode_profile(raw: bytes, layer: str, chunks: int) -> Profile:
    """A profile from its bytes. Raises InvalidArgument for what is none of `layer`, which has `chunks` chunks."""
    try:
        return check_profile(msgspec.json.decode(raw, type=Profile), layer, chunks)
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"what is kept as a profile of {layer} is none: {error}", field="profile") from error


def keep_profile(folder: Path, profile: Profile) -> None:
    """Puts a profile beside its layer, in place of the one before."""
    _replace(folder / PROFILE, msgspec.json.encode(profile))


def _replace(path: Path, raw: bytes) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)
