"""Where layers are shared: a store's address and what its client needs to reach it."""

from msgspec import Struct

__all__ = ["SCHEMES", "SECRETS", "StoreOptions", "scheme_of"]

SECRETS = ("secret_key", "token", "password")
SCHEMES = ("file", "s3", "oci")


class StoreOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A store, by URL: file:///path, s3://bucket/prefix or oci://host/repository.

    For S3: `endpoint` (URL; "": the cloud's own), `region`, `access_key` and `secret_key`, `token` (of a session). For a registry:
    `username` with `password`, or `token`. `allow_http`: speak plain HTTP, which anybody on the way can read. `keys`: public keys of
    those whose signature a manifest must have one of; none: not asked for. What is a secret is never shown.
    """

    url: str
    endpoint: str = ""
    region: str = ""
    access_key: str = ""
    secret_key: str = ""
    token: str = ""
    username: str = ""
    password: str = ""
    allow_http: bool = False
    keys: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"StoreOptions(url={self.url!r})"


def scheme_of(url: str) -> str:
    """The part of a store's URL before the colon, "" for what is no store's URL."""
    scheme, separator, rest = url.partition("://")
    return scheme if separator and rest and scheme in SCHEMES else ""
