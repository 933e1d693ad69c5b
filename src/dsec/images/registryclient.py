"""One repository of an OCI registry: requests with token or Basic authentication. Source: OCI distribution spec.

HTTPS always, but for loopback addresses and where the operator allows HTTP. Credentials go to the registry and to the token
service that it names (over HTTPS, or both on loopback), never to where it redirects.
"""

import asyncio
import base64
import re
import urllib.parse
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from dsec.images.oci import parse
from dsec.images.spool import Digest
from dsec.model.errors import ImageUnavailable, InvalidArgument, NotFound, Unauthenticated, Unavailable, Unsupported
from dsec.rules.retry import RETRIED_STATUSES, retry_delay

__all__ = ["Access", "Credentials", "Reference", "RegistryClient", "parse_reference", "read_bounded"]

_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_PARAMETER = re.compile(r'([A-Za-z_]+)="([^"]*)"')
_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=20, sock_read=60)
_REDIRECTS = 5
_TOKEN_BYTES = 1 << 20


@dataclass(frozen=True)
class Reference:
    """host[:port]/repository with a tag, or a digest."""

    host: str
    repository: str
    tag: str = "latest"
    digest: str | None = None

    def __str__(self) -> str:
        return f"{self.host}/{self.repository}" + (f"@{self.digest}" if self.digest else f":{self.tag}")


@dataclass(frozen=True)
class Credentials:
    """A user's name and password for a registry. Never shown."""

    username: str = field(repr=False)
    password: str = field(repr=False)

    @property
    def basic(self) -> str:
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


@dataclass(frozen=True)
class Access:
    """How a repository is reached: whose `credentials` or `token` (never shown), the `actions` asked of a token service ("pull" or
    "pull,push"), and whether plain HTTP may be spoken beyond loopback."""

    credentials: Credentials | None = None
    token: str = field(default="", repr=False)
    actions: str = "pull"
    allow_http: bool = False


def parse_reference(text: str) -> Reference:
    """ "host[:port]/repository[:tag][@sha256:...]". The host must be given. Raises InvalidArgument."""
    rest, _, digest = text.partition("@")
    host, _, path = rest.partition("/")
    repository, _, tag = path.partition(":")
    if (
        not path
        or not ("." in host or ":" in host or host == "localhost")
        or not re.fullmatch(r"[A-Za-z0-9.:\[\]-]+", host)
    ):
        raise InvalidArgument(f"{text[:200]!a} does not begin with a registry's host name", field="source")
    if not _REPOSITORY.fullmatch(repository) or (tag and not _TAG.fullmatch(tag)):
        raise InvalidArgument(f"{text[:200]!a} is not host/repository[:tag][@digest]", field="source")
    return Reference(host, repository, tag or "latest", Digest(digest).text if digest else None)


class RegistryClient:
    """The repository of `reference`. Made inside a running loop, and closed after use."""

    def __init__(self, reference: Reference, access: Access) -> None:
        self.reference = reference
        self._access = access
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT, auto_decompress=False)
        self._authorization: str | None = f"Bearer {access.token}" if access.token else None
        self._plain = access.allow_http or _is_loopback(reference.host)
        scheme = "http" if self._plain else "https"
        self.base = f"{scheme}://{reference.host}/v2/{reference.repository}"

    async def close(self) -> None:
        """Ends all connections."""
        await self._session.close()

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | Path | None = None,
        accepted: Collection[int] = (200,),
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer, whose status is one of `accepted`. `path`: below the repository, or a URL that the registry gave.

        What fails in passing is tried again for a while. Raises Unauthenticated, NotFound, Unavailable, ImageUnavailable.
        """
        url = urllib.parse.urljoin(f"{self.base}/", path)
        if not self._may_reach(url):
            raise ImageUnavailable(f"{self.reference.host} leads to an address that is not HTTPS")
        try:
            answer = await self._persistent(method, url, dict(headers or {}), body, accepted)
            async with answer:
                self._check(answer, accepted)
                yield answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"{self.reference.host}: {error or 'no answer in time'}") from error

    def _check(self, answer: aiohttp.ClientResponse, accepted: Collection[int]) -> None:
        host, repository = self.reference.host, self.reference.repository
        if answer.status in accepted:
            return
        if answer.status in (401, 403):
            raise Unauthenticated(f"{host} does not let us use {repository}")
        if answer.status == 404:
            raise NotFound(f"{self.reference} does not exist", what="image")
        if answer.status == 416:
            raise ImageUnavailable(f"{host}: a blob of {repository} is shorter than it should be")
        raise Unavailable(f"{host} answered {answer.status} for {self.reference}")

    async def _persistent(
        self, method: str, url: str, headers: dict[str, str], body: bytes | Path | None, accepted: Collection[int]
    ) -> aiohttp.ClientResponse:
        """An answer after as many tries as are worth it."""
        tries, waited = 0, 0.0
        while True:
            failure: aiohttp.ClientConnectionError | None = None
            asked = None
            try:
                answer = await self._authenticated(method, url, headers, body)
                if answer.status in accepted or answer.status not in RETRIED_STATUSES:
                    return answer
                after = answer.headers.get("Retry-After", "")
                asked = float(after) if after.isdecimal() and len(after) < 6 else None
            except (aiohttp.ClientConnectorError, TimeoutError):
                raise  # nobody is there, or has not answered for a minute: no try more is worth it
            except aiohttp.ClientConnectionError as error:
                failure = error
            tries += 1
            # The loop's clock is as good a die as any: it only has to differ between clients.
            delay = retry_delay(tries, waited, asyncio.get_running_loop().time() % 1.0, asked)
            if delay is None:
                if failure is not None:
                    raise failure
                return answer
            if failure is None:
                answer.release()
            waited += delay
            await asyncio.sleep(delay)

    async def _authenticated(
        self, method: str, url: str, headers: dict[str, str], body: bytes | Path | None
    ) -> aiohttp.ClientResponse:
        answer = await self._follow(method, url, headers, body)
        if answer.status == 401 and not self._access.token:
            challenge = answer.headers.get("WWW-Authenticate", "")
            answer.release()
            self._authorization = await self._authorize(challenge)
            answer = await self._follow(method, url, headers, body)
        return answer

    async def _follow(
        self, method: str, url: str, headers: dict[str, str], body: bytes | Path | None
    ) -> aiohttp.ClientResponse:
        """Through redirects that never see the credentials."""
        sent = dict(headers)
        if self._authorization and self._is_own(url):
            sent["Authorization"] = self._authorization
        for _ in range(_REDIRECTS):
            answer = await self._send(method, url, sent, body)
            if answer.status not in (301, 302, 303, 307, 308) or method not in ("GET", "HEAD"):
                return answer
            target = urllib.parse.urljoin(url, answer.headers.get("Location", ""))
            answer.release()
            if not self._may_reach(target):
                raise ImageUnavailable(f"{self.reference.host} redirects to an address that is not HTTPS")
            if urllib.parse.urlsplit(target)[:2] != urllib.parse.urlsplit(url)[:2]:
                sent.pop("Authorization", None)
            url = target
        raise ImageUnavailable(f"{self.reference.host} redirects without end")

    async def _send(
        self, method: str, url: str, headers: dict[str, str], body: bytes | Path | None
    ) -> aiohttp.ClientResponse:
        if isinstance(body, Path):
            with await asyncio.to_thread(body.open, "rb") as file:
                return await self._session.request(method, url, headers=headers, data=file, allow_redirects=False)
        return await self._session.request(method, url, headers=headers, data=body, allow_redirects=False)

    async def _authorize(self, challenge: str) -> str:
        """The Authorization header that a challenge asks for. Source: distribution spec, token authentication."""
        credentials, host = self._access.credentials, self.reference.host
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            if credentials is None:
                raise Unauthenticated(f"{host} wants a user name: give --username and --password-stdin")
            return credentials.basic
        if scheme.lower() != "bearer":
            raise Unsupported(f"{host} asks for {scheme[:50]!a} authentication", what="authentication")
        given = {key.lower(): value for key, value in _PARAMETER.findall(rest)}
        realm = given.get("realm", "")
        if not self._may_reach(realm):
            raise ImageUnavailable(f"the token service of {host} is not HTTPS")
        query = {"scope": given.get("scope") or f"repository:{self.reference.repository}:{self._access.actions}"}
        if "service" in given:
            query["service"] = given["service"]
        headers = {"Authorization": credentials.basic} if credentials else {}
        async with self._session.get(realm, params=query, headers=headers, allow_redirects=False) as answer:
            if answer.status != 200:
                raise Unauthenticated(f"the token service of {host} answered {answer.status}")
            token = parse(await read_bounded(answer, _TOKEN_BYTES), dict[str, Any], "token")
        value = token.get("token") or token.get("access_token")
        if not isinstance(value, str):
            raise ImageUnavailable(f"the token service of {host} gave no token")
        return f"Bearer {value}"

    def _is_own(self, url: str) -> bool:
        return urllib.parse.urlsplit(url)[:2] == urllib.parse.urlsplit(self.base)[:2]

    def _may_reach(self, url: str) -> bool:
        """Whether the registry may send us to `url`: HTTPS anywhere; plain HTTP on loopback for a registry on loopback, and to the
        registry itself where that is allowed."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme == "https":
            return True
        local = _is_loopback(self.reference.host) and _is_loopback(parts.netloc.rpartition("@")[2])
        return parts.scheme == "http" and (local or (self._plain and self._is_own(url)))


async def read_bounded(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """All of an answer's body. Raises ImageUnavailable when it is longer than `limit` bytes."""
    raw = bytearray()
    async for data in answer.content.iter_chunked(64 << 10):
        raw += data
        if len(raw) > limit:
            raise ImageUnavailable(f"a document of more than {limit} bytes")
    return bytes(raw)


def _is_loopback(host: str) -> bool:
    name = urllib.parse.urlsplit(f"//{host}").hostname or ""
    return name in ("localhost", "::1") or re.fullmatch(r"127\.\d+\.\d+\.\d+", name) is not None
