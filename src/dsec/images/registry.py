"""Images from a registry: the OCI distribution API, with token and Basic authentication. Source: OCI distribution spec.

HTTPS always, but for loopback addresses. Every document and blob is checked against its digest as it arrives; credentials go
to the registry and to the token service that it names (over HTTPS, or both on loopback), never to where a blob is redirected.
"""

import asyncio
import base64
import hashlib
import re
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp

from dsec.images.oci import Descriptor, Manifest, Platform, Workshop, choose, parse
from dsec.images.spool import Digest
from dsec.model.errors import ImageUnavailable, InvalidArgument, NotFound, Unauthenticated, Unavailable, Unsupported

__all__ = ["Credentials", "Pulled", "Reference", "credentials_from", "parse_reference", "pull"]

_ACCEPT = ", ".join(
    [
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    ]
)
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_PARAMETER = re.compile(r'([A-Za-z_]+)="([^"]*)"')
_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=20, sock_read=60)
_PARALLEL = 3
_REDIRECTS = 5


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


def credentials_from(config: Path, host: str) -> Credentials | None:
    """What `docker login` left for `host` in a config.json; None when there is nothing. Raises Unsupported for helpers."""
    try:
        content = parse(config.read_bytes(), dict[str, Any], str(config))
    except FileNotFoundError:
        return None
    if host in content.get("credHelpers", {}):
        raise Unsupported(
            f"{config} keeps the password of {host} in a helper program; give --username", what="credHelpers"
        )
    entry = content.get("auths", {}).get(host) or content.get("auths", {}).get(f"https://{host}")
    if not isinstance(entry, dict) or not entry.get("auth"):
        return None
    try:
        username, _, password = base64.b64decode(str(entry["auth"])).decode().partition(":")
    except ValueError as error:
        raise InvalidArgument(f"{config}: the entry of {host} is damaged", field="credentials") from error
    return Credentials(username, password)


class Pulled:
    """The parts of an image that `pull` has fetched; every digest has been checked."""

    checked = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.documents: dict[str, bytes] = {}

    def path(self, descriptor: Descriptor) -> Path:
        return self._folder / f"blob-{Digest(descriptor.digest).hex}"

    def document(self, descriptor: Descriptor) -> bytes:
        return self.documents[descriptor.digest]

    def blob(self, descriptor: Descriptor) -> BinaryIO:
        return self.path(descriptor).open("rb")


async def pull(
    reference: Reference, credentials: Credentials | None, wanted: Platform, work: Workshop
) -> tuple[Pulled, Descriptor]:
    """Fetches the image's documents and layers into `work.folder`; gives them with the descriptor to begin from.

    Raises NotFound, Unauthenticated, Unavailable (no answer), ImageUnavailable (a wrong answer), InvalidArgument (a wrong
    digest). Cancelling it ends all downloads.
    """
    parts = Pulled(work.folder)
    try:
        async with aiohttp.ClientSession(timeout=_TIMEOUT, auto_decompress=False) as session:
            client = _Client(session, reference, credentials, work)
            top, manifest = await client.manifest(reference.digest or reference.tag, parts)
            for _ in range(3):
                if manifest.config is not None or not manifest.manifests:
                    break
                chosen = choose(manifest.manifests, wanted, str(reference))
                _, manifest = await client.manifest(chosen.digest, parts)
            if manifest.config is None:
                raise InvalidArgument(f"{reference} is neither an image nor an index that leads to one", field="source")
            await _fetch_blobs(client, manifest, parts, work)
            return parts, top
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(f"{reference.host}: {error or 'no answer in time'}") from error


async def _fetch_blobs(client: "_Client", manifest: Manifest, parts: Pulled, work: Workshop) -> None:
    assert manifest.config is not None
    parts.documents[manifest.config.digest] = await client.small_blob(manifest.config)
    if len(manifest.layers) > work.config.layers:
        raise InvalidArgument(
            f"an image of {len(manifest.layers)} layers; the bound is {work.config.layers}", field="source"
        )
    layers = {layer.digest: layer for layer in manifest.layers}
    total = sum(layer.size for layer in layers.values())
    if total > work.config.archive_bytes:
        raise InvalidArgument(f"layers of {total} bytes; the bound is {work.config.archive_bytes}", field="source")
    work.progress.step("download", total)
    slots = asyncio.Semaphore(_PARALLEL)

    async def fetch(layer: Descriptor) -> None:
        async with slots:
            await client.large_blob(layer, parts.path(layer))

    try:
        async with asyncio.TaskGroup() as group:
            for layer in layers.values():
                group.create_task(fetch(layer))
    except ExceptionGroup as several:
        # One failure cancels the rest; the first is the reason.
        raise several.exceptions[0] from several


class _Client:
    """One repository of one registry."""

    def __init__(
        self, session: aiohttp.ClientSession, reference: Reference, credentials: Credentials | None, work: Workshop
    ) -> None:
        self._session = session
        self._reference = reference
        self._credentials = credentials
        self._work = work
        self._authorization: str | None = None
        self._loopback = _is_loopback(reference.host)
        scheme = "http" if self._loopback else "https"
        self._base = f"{scheme}://{reference.host}/v2/{reference.repository}"

    async def manifest(self, name: str, parts: Pulled) -> tuple[Descriptor, Manifest]:
        """A manifest or index by tag or digest, and its descriptor."""
        async with self._get(f"{self._base}/manifests/{name}") as answer:
            raw = await self._bounded(answer, self._work.config.document_bytes)
            media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip()
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        if name.startswith("sha256:"):
            Digest(name).check(digest.removeprefix("sha256:"), "the manifest")
        parts.documents[digest] = raw
        return Descriptor(digest, len(raw), media_type), parse(raw, Manifest, "manifest")

    async def small_blob(self, descriptor: Descriptor) -> bytes:
        digest = Digest(descriptor.digest)
        async with self._get(f"{self._base}/blobs/{digest.text}") as answer:
            raw = await self._bounded(answer, self._work.config.document_bytes)
        digest.check(hashlib.sha256(raw).hexdigest(), "the image's config")
        return raw

    async def large_blob(self, descriptor: Descriptor, path: Path) -> None:
        digest, hasher, total = Digest(descriptor.digest), hashlib.sha256(), 0
        async with self._get(f"{self._base}/blobs/{digest.text}") as answer:
            with path.open("xb") as out:
                async for data in answer.content.iter_chunked(256 << 10):
                    total += len(data)
                    if total > descriptor.size:
                        raise ImageUnavailable(f"layer {digest.text} is longer than its manifest says")
                    hasher.update(data)
                    out.write(data)
                    self._work.progress.add(len(data))
        digest.check(hasher.hexdigest(), "a layer")

    async def _bounded(self, answer: aiohttp.ClientResponse, limit: int) -> bytes:
        raw = bytearray()
        async for data in answer.content.iter_chunked(64 << 10):
            raw += data
            if len(raw) > limit:
                raise ImageUnavailable(f"a document of more than {limit} bytes")
        return bytes(raw)

    @asynccontextmanager
    async def _get(self, url: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """A successful GET, authenticated when asked to be, through redirects that never see the credentials."""
        for attempt in range(2):
            answer = await self._ask(url)
            if answer.status != 401 or attempt:
                break
            challenge = answer.headers.get("WWW-Authenticate", "")
            answer.release()
            self._authorization = await self._authorize(challenge)
        async with answer:
            if answer.status in (401, 403):
                raise Unauthenticated(f"{self._reference.host} does not let us read {self._reference.repository}")
            if answer.status == 404:
                raise NotFound(f"{self._reference} does not exist", what="image")
            if answer.status != 200:
                raise Unavailable(f"{self._reference.host} answered {answer.status} for {self._reference}")
            yield answer

    async def _ask(self, url: str) -> aiohttp.ClientResponse:
        headers = {"Accept": _ACCEPT}
        if self._authorization:
            headers["Authorization"] = self._authorization
        for _ in range(_REDIRECTS):
            answer = await self._session.get(url, headers=headers, allow_redirects=False)
            if answer.status not in (301, 302, 303, 307, 308):
                return answer
            target = urllib.parse.urljoin(url, answer.headers.get("Location", ""))
            answer.release()
            if not _may_reach(target, from_loopback=self._loopback):
                raise ImageUnavailable(f"{self._reference.host} redirects to an address that is not HTTPS")
            if urllib.parse.urlsplit(target)[:2] != urllib.parse.urlsplit(url)[:2]:
                headers.pop("Authorization", None)
            url = target
        raise ImageUnavailable(f"{self._reference.host} redirects without end")

    async def _authorize(self, challenge: str) -> str:
        """The Authorization header that a challenge asks for. Source: distribution spec, token authentication."""
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            if self._credentials is None:
                raise Unauthenticated(f"{self._reference.host} wants a user name: give --username and --password-stdin")
            return self._credentials.basic
        if scheme.lower() != "bearer":
            raise Unsupported(f"{self._reference.host} asks for {scheme[:50]!a} authentication", what="authentication")
        given = {key.lower(): value for key, value in _PARAMETER.findall(rest)}
        realm = given.get("realm", "")
        if not _may_reach(realm, from_loopback=self._loopback):
            raise ImageUnavailable(f"the token service of {self._reference.host} is not HTTPS")
        query = {"scope": given.get("scope") or f"repository:{self._reference.repository}:pull"}
        if "service" in given:
            query["service"] = given["service"]
        headers = {"Authorization": self._credentials.basic} if self._credentials else {}
        async with self._session.get(realm, params=query, headers=headers, allow_redirects=False) as answer:
            if answer.status != 200:
                raise Unauthenticated(f"the token service of {self._reference.host} answered {answer.status}")
            token = parse(await self._bounded(answer, 1 << 20), dict[str, Any], "token")
        value = token.get("token") or token.get("access_token")
        if not isinstance(value, str):
            raise ImageUnavailable(f"the token service of {self._reference.host} gave no token")
        return f"Bearer {value}"


def _is_loopback(host: str) -> bool:
    name = urllib.parse.urlsplit(f"//{host}").hostname or ""
    return name in ("localhost", "::1") or re.fullmatch(r"127\.\d+\.\d+\.\d+", name) is not None


def _may_reach(url: str, *, from_loopback: bool) -> bool:
    """Whether a registry may send us to `url`: HTTPS anywhere; plain HTTP on loopback for a registry on loopback only."""
    parts = urllib.parse.urlsplit(url)
    local = parts.scheme == "http" and from_loopback and _is_loopback(parts.netloc.rpartition("@")[2])
    return parts.scheme == "https" or local
