"""What mirrors fetch from the servers behind them: lists of releases, and files onto disk. Redirects are followed, secrets do not follow them."""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies

import aiohttp
import dns.asyncresolver
import dns.exception
from aiohttp import ThreadedResolver
from aiohttp.abc import AbstractResolver, ResolveResult

from dsec.gate.names import resolver_of
from dsec.gate.reach import Reach
from dsec.gate.refusal import Refused
from dsec.gate.settings import Credential, GateSettings, MirrorService

__all__ = ["LONGEST_INDEX", "Flights", "Upstream"]

LONGEST_INDEX = 96 << 20
_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=20, sock_read=60)
_REDIRECTS = 5
_REDIRECTED = frozenset({301, 302, 303, 307, 308})


class _Ways:
    """Where mirrors go: to the operator's own hosts wherever these are, and to others, which lists of packages and redirects name, as a sandbox
    may: not to the node, its neighbours or a private network. A proxy of the environment is the operator's too."""

    def __init__(self, services: Sequence[MirrorService], reach: Reach) -> None:
        urls = [service.upstream for service in services] + list(getproxies().values())
        self._own = {urlsplit(url).hostname for url in urls} | {host for service in services for host in service.hosts}
        self._reach = reach

    def lead(self, host: str, address: str) -> bool:
        """Whether a connection for `host` may go to `address`."""
        return host in self._own or self._reach.may(address, ())

    def check(self, url: str) -> None:
        """Raises Refused(`upstream`) for a URL with an address instead of a name, where that may not be reached: nobody resolves it."""
        host = urlsplit(url).hostname or ""
        try:
            address = str(ipaddress.ip_address(host))
        except ValueError:
            return
        if not self.lead(host, address):
            raise Refused("upstream", "the server behind the mirror names an address that is not reached for it")


class _Resolver(AbstractResolver):
    """Asks the nameservers of the gate's settings, else as the host does, and leaves out addresses that `ways` do not lead to."""

    def __init__(self, settings: GateSettings, ways: _Ways) -> None:
        self._dns = resolver_of(settings) if settings.nameservers else None
        self._host = ThreadedResolver()
        self._ways = ways

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await (
            self._host.resolve(host, port, family) if self._dns is None else self._ask(self._dns, host, port)
        )
        good = [each for each in found if self._ways.lead(host, each["host"])]
        if found and not good:
            raise OSError(f"{host} leads to addresses that are not reached for it")
        return good

    async def _ask(self, resolver: dns.asyncresolver.Resolver, host: str, port: int) -> list[ResolveResult]:
        found: list[ResolveResult] = []
        for kind, one in (("A", socket.AF_INET), ("AAAA", socket.AF_INET6)):
            try:
                answer = await resolver.resolve(host, kind, search=False, raise_on_no_answer=False)
            except dns.exception.DNSException as error:
                if found:
                    break
                raise OSError(f"{host} is not found: {type(error).__name__}") from error
            found += [
                {"hostname": host, "host": record.address, "port": port, "family": one, "proto": 0, "flags": 0}
                for record in answer.rrset or ()
            ]
        return found

    async def close(self) -> None:
        return None


class Upstream:
    """One HTTP client for all mirrors; a context manager."""

    def __init__(self, settings: GateSettings, services: Sequence[MirrorService], reach: Reach) -> None:
        self._settings = settings
        self._ways = _Ways(services, reach)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Upstream":
        resolver = _Resolver(self._settings, self._ways)
        self._session = aiohttp.ClientSession(
            timeout=_TIMEOUT, auto_decompress=True, trust_env=True, headers={"User-Agent": "dsec-mirror"},
            connector=aiohttp.TCPConnector(limit=self._settings.downloads * 2, resolver=resolver),
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def get(
        self, url: str, headers: Mapping[str, str] | None = None, credential: Credential | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A GET's answer, after redirects. Raises Refused(`upstream`) when nobody answers."""
        assert self._session is not None
        origin = urlsplit(url)
        try:
            for _ in range(_REDIRECTS + 1):
                self._ways.check(url)
                split = urlsplit(url)
                sent = dict(headers or {})
                if credential is not None and (split.scheme, split.netloc) == (origin.scheme, origin.netloc):
                    sent[credential.header] = credential.value
                async with self._session.get(url, headers=sent, allow_redirects=False) as answer:
                    target = answer.headers.get("Location")
                    if answer.status not in _REDIRECTED or target is None:
                        yield answer
                        return
                    url = urljoin(url, target)
                    if urlsplit(url).scheme not in ("https", origin.scheme):
                        raise Refused("upstream", "a redirect out of TLS")
            raise Refused("upstream", "too many redirects")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Refused(
                "upstream", f"the server behind the mirror does not answer: {type(error).__name__}"
            ) from error

    async def index(self, url: str, accept: str, credential: Credential | None = None) -> tuple[str, bytes] | None:
        """Content type and content of a list of releases; None where it does not exist. Raises Refused(`upstream`)."""
        async with self.get(url, {"Accept": accept}, credential) as answer:
            if answer.status in (404, 410):
                return None
            if answer.status != 200:
                raise Refused("upstream", f"the server behind the mirror answers {answer.status}")
            parts, total = [], 0
            async for data in answer.content.iter_chunked(1 << 18):
                total += len(data)
                if total > LONGEST_INDEX:
                    raise Refused("upstream", f"a list of more than {LONGEST_INDEX} bytes")
                parts.append(data)
            return answer.content_type, b"".join(parts)


class Flights:
    """Work that several ask for is done once; what one has asked for goes on when he leaves."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._under_way: dict[Any, asyncio.Future[Any]] = {}

    async def once(self, key: Any, make: Any) -> Any:
        """The result of `make()`, shared by all who ask for `key` while it runs."""
        result = self._under_way.get(key)
        if result is None:
            result = self._under_way[key] = asyncio.get_running_loop().create_future()
            self._group.create_task(self._run(key, make, result))
        return await asyncio.shield(result)

    async def _run(self, key: Any, make: Any, result: "asyncio.Future[Any]") -> None:
        try:
            value = await make()
        except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
            result.set_exception(error)
            result.exception()  # someone may have left before it came
        else:
            result.set_result(value)
        finally:
            del self._under_way[key]
            if not result.done():
                result.cancel()
