"""Where a client finds its server: arguments, then DSEC_* variables, then the credentials file that `dsec up` writes.

The one place of the SDK that reads the environment: a client-only install has no node and no node's configuration.
"""

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.model.errors import InvalidArgument, Unauthenticated

__all__ = ["CREDENTIALS_NAME", "DEFAULT_URL", "Endpoint", "credentials_paths", "find_endpoint"]

DEFAULT_URL = "http://127.0.0.1:7380"
CREDENTIALS_NAME = "credentials.json"
_STATE_DIRECTORY = Path("/var/lib/dsec")


class Endpoint(Struct, frozen=True, kw_only=True):
    """A server and how to speak to it; also the form of the credentials file (JSON). `ca_file`: PEM file of the authority
    that signed the server's certificate, None for the system's own."""

    url: str = DEFAULT_URL
    api_key: str | None = None
    ca_file: str | None = None


def credentials_paths() -> list[Path]:
    """Files read in turn: $DSEC_CREDENTIALS alone where it is set, else the user's, then the node's default state."""
    named = os.environ.get("DSEC_CREDENTIALS")
    if named:
        return [Path(named)]
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return [config / "dsec" / CREDENTIALS_NAME, _STATE_DIRECTORY / CREDENTIALS_NAME]


def _from_file() -> Endpoint | None:
    for path in credentials_paths():
        try:
            return msgspec.json.decode(path.read_bytes(), type=Endpoint)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        except (msgspec.MsgspecError, OSError) as error:
            raise InvalidArgument(f"credentials file {path}: {error}", field="credentials") from error
    return None


def find_endpoint(url: str | None = None, api_key: str | None = None, ca_file: str | None = None) -> Endpoint:
    """Each value from the argument, else the environment, else the credentials file. The file's key is used only with the
    file's own server, so that a key never goes to another one. Raises Unauthenticated where there is no key."""
    stored = _from_file()
    chosen = (url or os.environ.get("DSEC_URL") or (stored.url if stored else DEFAULT_URL)).rstrip("/")
    if not chosen.startswith(("http://", "https://")):
        raise InvalidArgument(f"not an http:// or https:// URL: {chosen!r}", field="url")
    if stored is not None and stored.url.rstrip("/") != chosen:
        stored = None
    key = api_key or os.environ.get("DSEC_API_KEY") or (stored.api_key if stored else None)
    if not key:
        raise Unauthenticated("no API key: pass api_key=, set DSEC_API_KEY, or use the credentials file of `dsec up`")
    authority = ca_file or os.environ.get("DSEC_CA_FILE") or (stored.ca_file if stored else None)
    return Endpoint(url=chosen, api_key=key, ca_file=authority)
