"""Signatures of layers: ed25519 over a small statement in a DSSE envelope (as sigstore's), beside the manifest in the store.

A statement names the digest of a layer's manifest, and so all of the image, for that names everything else; and the names for
which it was signed, so that a store cannot give one signed image for another.
"""

import base64
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from msgspec import Struct

from dsec.images.stores.layout import Folder, Item, Store
from dsec.model.errors import InvalidArgument, NotFound, PermissionDenied

__all__ = ["PublicKey", "Signer", "make_key", "parse_key", "require_signature", "sign", "signers"]

_PREFIX = "ed25519:"
_TYPE = "application/vnd.dsec.layer.statement.v1+json"
_MAX_BYTES = 256 << 10
_MAX_SIGNATURES = 256


class _Statement(Struct, frozen=True):
    digest: str
    names: tuple[str, ...] = ()


class _Signature(Struct, frozen=True):
    keyid: str
    sig: str


class _Envelope(Struct, frozen=True, rename="camel"):
    payload: str
    payload_type: str
    signatures: tuple[_Signature, ...]


@dataclass(frozen=True)
class PublicKey:
    """A key that signatures are checked by. `text`: "ed25519:" and 32 bytes in base64; `id`: their sha256."""

    raw: bytes

    @property
    def text(self) -> str:
        return _PREFIX + base64.b64encode(self.raw).decode()

    @property
    def id(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()


class Signer:
    """The private key in the file `path` (PEM). Raises NotFound, InvalidArgument for another kind of key."""

    def __init__(self, path: Path) -> None:
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except FileNotFoundError:
            raise NotFound(f"{path} does not exist; `dsec image keys` makes a key", what="key") from None
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"{path} is no private key in PEM without a password", field="key") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise InvalidArgument(f"{path} is no ed25519 key", field="key")
        self._key = key
        self.public = PublicKey(key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    def sign(self, statement: _Statement) -> bytes:
        """The envelope of a signed statement."""
        payload = msgspec.json.encode(statement)
        signature = _Signature(self.public.id, base64.b64encode(self._key.sign(_to_sign(payload))).decode())
        return msgspec.json.encode(_Envelope(base64.b64encode(payload).decode(), _TYPE, (signature,)))


def make_key(path: Path) -> PublicKey:
    """Makes a key pair: the private one in the new file `path`, for its owner alone. Raises FileExistsError."""
    raw = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(fd)
    return Signer(path).public


def parse_key(text: str) -> PublicKey:
    """A public key as `PublicKey.text` writes it. Raises InvalidArgument."""
    try:
        raw = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except ValueError:
        raw = b""
    if not text.startswith(_PREFIX) or len(raw) != 32:
        raise InvalidArgument(f"{text[:100]!a} is no public key: {_PREFIX} and 32 bytes in base64", field="keys")
    return PublicKey(raw)


async def sign(store: Store, digest: str, name: str, signer: Signer) -> None:
    """Puts a signature of layer `digest` for `name` into the store, beside those by other keys."""
    names = {name} if not name.startswith("sha256:") else set()
    item = _item(digest, signer.public)
    try:
        before = _verified(await store.read(item, _MAX_BYTES), digest, signer.public)
        names |= set(before.names) if before is not None else set()
    except NotFound:
        pass
    await store.write(item, signer.sign(_Statement(digest, tuple(sorted(names)))))


async def signers(store: Store, digest: str, name: str, keys: Sequence[PublicKey]) -> list[PublicKey]:
    """Which of `keys` have signed layer `digest` for `name` (for any, if that is a digest)."""
    found = []
    for key in keys[:_MAX_SIGNATURES]:
        try:
            statement = _verified(await store.read(_item(digest, key), _MAX_BYTES), digest, key)
        except NotFound:
            continue
        if statement is not None and (name == digest or name in statement.names):
            found.append(key)
    return found


async def require_signature(store: Store, digest: str, name: str, keys: Sequence[PublicKey]) -> list[PublicKey]:
    """The keys of `keys` that have signed layer `digest` for `name`; with no `keys`, none is needed.

    Raises PermissionDenied when keys are given and none of them has.
    """
    found = await signers(store, digest, name, keys)
    if keys and not found:
        raise PermissionDenied(
            f"{name!a} ({digest}) of {store.url} is signed for that name by none of the {len(keys)} keys that are trusted"
        )
    return found


def _verified(raw: bytes, digest: str, key: PublicKey) -> _Statement | None:
    """What an envelope says about `digest`, if it is signed by `key`."""
    try:
        envelope = msgspec.json.decode(raw, type=_Envelope)
        payload = base64.b64decode(envelope.payload, validate=True)
        if envelope.payload_type != _TYPE or len(envelope.signatures) > _MAX_SIGNATURES:
            return None
        signatures = [base64.b64decode(each.sig, validate=True) for each in envelope.signatures]
        if not any(_good(key, signature, payload) for signature in signatures):
            return None
        statement = msgspec.json.decode(payload, type=_Statement)
    except (ValueError, msgspec.DecodeError):
        return None
    return statement if statement.digest == digest else None


def _good(key: PublicKey, signature: bytes, payload: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key.raw).verify(signature, _to_sign(payload))
    except InvalidSignature:
        return False
    return True


def _to_sign(payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding. Source: secure-systems-lab/dsse, protocol.md."""
    kind = _TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def _item(digest: str, key: PublicKey) -> Item:
    layer = digest.removeprefix("sha256:")
    return Item(Folder.SIGNATURES, f"{layer}/{key.id}", layer)
