"""Secrets that are added on the way: which, for which host, and how their bytes are kept from coming back."""

import ssl
from collections.abc import Sequence

from dsec.gate.settings import Credential
from dsec.model.errors import InvalidArgument
from dsec.rules.netpolicy import matches

__all__ = ["Credentials", "Scrubber"]

_SHORTEST_SECRET = 8


class Credentials:
    """The operator's, by name. Raises InvalidArgument for certificates that cannot be read and values that are no field's."""

    def __init__(self, listed: Sequence[Credential]) -> None:
        self._by_name = {credential.name: credential for credential in listed}
        self._servers: dict[str, ssl.SSLContext] = {}
        self.client = ssl.create_default_context()
        self.client.set_alpn_protocols(["http/1.1"])
        for credential in listed:
            if (
                not credential.value.isascii()
                or not credential.value.isprintable()
                or len(_secret(credential)) < _SHORTEST_SECRET
            ):
                raise InvalidArgument(
                    f"credential {credential.name}: its value cannot be sent safely", field="credentials"
                )
            if credential.certificate:
                self._servers[credential.name] = _server(credential)

    def named(self, name: str) -> Credential:
        """The credential `name`. Raises InvalidArgument."""
        if name not in self._by_name:
            raise InvalidArgument(f"no credential {name}", field="credentials")
        return self._by_name[name]

    def find(self, name: str, host: str) -> Credential | None:
        """The credential `name`, if it is for this host."""
        credential = self._by_name.get(name)
        if credential is None or not any(matches(pattern, host) for pattern in credential.hosts):
            return None
        return credential

    def server(self, credential: Credential) -> ssl.SSLContext | None:
        """What ends TLS of sandboxes for the credential's hosts; None where the operator gave no certificate."""
        return self._servers.get(credential.name)


class Scrubber:
    """Blots a secret out of what a server answers, should it send back what it was sent. Lengths stay as they are.

    Only the secret as it was sent is seen, not what a server makes of it.
    """

    def __init__(self, credential: Credential) -> None:
        self._secret = _secret(credential).encode()
        self._kept = b""

    def feed(self, data: bytes) -> bytes:
        """What may go on now; up to a secret's length less one is held back."""
        data = (self._kept + data).replace(self._secret, b"*" * len(self._secret))
        hold = next(
            (n for n in range(min(len(self._secret) - 1, len(data)), 0, -1) if self._secret.startswith(data[-n:])), 0
        )
        self._kept = data[len(data) - hold :]
        return data[: len(data) - hold]

    def rest(self) -> bytes:
        """What was held back, at the end."""
        rest, self._kept = self._kept, b""
        return rest


def _secret(credential: Credential) -> str:
    return max(credential.value.split() or [""], key=len)


def _server(credential: Credential) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(credential.certificate, credential.key or None)
    except OSError as error:
        raise InvalidArgument(
            f"credential {credential.name}: {credential.certificate}: {error}", field="credentials"
        ) from error
    return context
