"""API keys: `dsec_<id>_<secret>`. Only a salted hash of the secret is kept; the text is shown once."""

import hashlib
import hmac
import re

from msgspec import Struct

__all__ = ["RANDOM_BYTES", "KeyRecord", "key_id_of", "make_key", "matches"]

_TEXT = re.compile(r"dsec_([0-9a-f]{16})_([0-9a-f]{64})\Z")
_ID_BYTES, _SECRET_BYTES, _SALT_BYTES = 8, 32, 16
RANDOM_BYTES = _ID_BYTES + _SECRET_BYTES + _SALT_BYTES


class KeyRecord(Struct, frozen=True, kw_only=True):
    """What is kept of a key."""

    id: str
    salt: bytes
    hash: bytes


def _hash(salt: bytes, secret: str) -> bytes:
    # One round is enough: the secret has 256 random bits, so there is nothing to guess.
    return hashlib.sha256(salt + secret.encode()).digest()


def make_key(random: bytes) -> tuple[str, KeyRecord]:
    """A new key's text and record, from RANDOM_BYTES fresh random bytes."""
    if len(random) != RANDOM_BYTES:
        raise ValueError(f"a key needs {RANDOM_BYTES} random bytes")
    name, secret = random[:_ID_BYTES].hex(), random[_ID_BYTES:-_SALT_BYTES].hex()
    salt = random[-_SALT_BYTES:]
    return f"dsec_{name}_{secret}", KeyRecord(id=name, salt=salt, hash=_hash(salt, secret))


def key_id_of(text: str) -> str | None:
    """The id in a key's text; None for what cannot be a key."""
    found = _TEXT.match(text)
    return found[1] if found else None


def matches(text: str, record: KeyRecord) -> bool:
    """True where `text` is the key of `record`; compared in constant time."""
    found = _TEXT.match(text)
    return (
        found is not None and found[1] == record.id and hmac.compare_digest(_hash(record.salt, found[2]), record.hash)
    )
