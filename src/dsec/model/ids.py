"""Sandbox ids: which edge owns a sandbox, readable from its id alone, and not to be guessed or forged.

Layout before encoding (19 bytes): edge number (2), edge epoch (3), random (10), keyed tag (4). Encoded as lower-case
base32 without padding behind the letter "s": 32 characters of [a-z0-9], so an id can stand in a host name.
"""

import base64
import hashlib
import hmac

from msgspec import Struct

from dsec.model.errors import NotFound

__all__ = ["ID_LENGTH", "RANDOM_BYTES", "SandboxAddress", "decode_sandbox_id", "encode_sandbox_id"]

RANDOM_BYTES = 10
_TAG_BYTES = 4
_BODY_BYTES = 2 + 3 + RANDOM_BYTES
ID_LENGTH = 1 + 31


class SandboxAddress(Struct, frozen=True):
    """What an id says: `edge` (0..65535) owns it since its start number `epoch` (0..2**24-1)."""

    edge: int
    epoch: int
    random: bytes


def _tag(key: bytes, body: bytes) -> bytes:
    return hashlib.blake2s(body, key=key, digest_size=_TAG_BYTES).digest()


def encode_sandbox_id(address: SandboxAddress, key: bytes) -> str:
    """The id of a new sandbox. `address.random` must be RANDOM_BYTES fresh random bytes, `key` 16 to 32 secret bytes."""
    if len(address.random) != RANDOM_BYTES:
        raise ValueError(f"random part must have {RANDOM_BYTES} bytes")
    body = address.edge.to_bytes(2, "big") + address.epoch.to_bytes(3, "big") + address.random
    return "s" + base64.b32encode(body + _tag(key, body)).decode().rstrip("=").lower()


def decode_sandbox_id(text: str, key: bytes) -> SandboxAddress:
    """What `text` says. Raises NotFound for anything that this key did not make."""
    if len(text) == ID_LENGTH and text[0] == "s" and text.isascii() and text == text.lower():
        try:
            raw = base64.b32decode(text[1:].upper() + "=")
        except ValueError:
            raw = b""
        body, tag = raw[:_BODY_BYTES], raw[_BODY_BYTES:]
        # The last letter carries 2 bits and 3 that must be zero: one id has one spelling.
        if len(body) == _BODY_BYTES and text[-1] in "aiqy" and hmac.compare_digest(tag, _tag(key, body)):
            return SandboxAddress(int.from_bytes(body[:2], "big"), int.from_bytes(body[2:5], "big"), body[5:])
    raise NotFound("no such sandbox", what="sandbox")
