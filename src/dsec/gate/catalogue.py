"""What each kind of mirror answers to a request: lists as they were at the sandbox's date, and only files that those lists show."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec
from msgspec import Struct

from dsec.gate import goproxy, npm, pypi
from dsec.gate.files import Files, Stored, Wanted
from dsec.gate.refusal import Refused
from dsec.gate.settings import Credential, GateSettings, MirrorService
from dsec.gate.upstream import Flights, Upstream
from dsec.model.network import MirrorRule

__all__ = ["Answer", "Catalogue"]

_KEPT_BYTES = 128 << 20
_INFOS_AT_ONCE = 8
_MOST_VERSIONS = 2000


class Answer(Struct, frozen=True):
    """What goes back: bytes, or a file."""

    content_type: str
    body: bytes | Stored
    status: int = 200


class Catalogue:
    """One mirror service. `group` carries what several sandboxes wait for."""

    def __init__(
        self,
        service: MirrorService,
        settings: GateSettings,
        upstream: Upstream,
        files: Files,
        group: asyncio.TaskGroup,
        credential: Credential | None,
    ) -> None:
        self._service = service
        self._url = service.upstream.rstrip("/") + "/"
        self._seconds = settings.index_seconds
        self._upstream = upstream
        self._files = files
        self._credential = credential
        self._flights = Flights(group)
        self._kept: OrderedDict[str, tuple[float, int, Any]] = OrderedDict()
        self._bytes = 0
        self._infos = asyncio.Semaphore(_INFOS_AT_ONCE)

    async def answer(self, rule: MirrorRule, path: str, accept: str, here: str) -> Answer:
        """`path` without its first slash; `here`: this mirror's URL as the sandbox sees it. Raises Refused: `not_found`, `before`,
        `module`, `upstream`, `hash`."""
        way = {"pypi": self._pypi, "npm": self._npm, "goproxy": self._goproxy}[self._service.kind]
        return await way(rule, path, accept, here)

    async def _pypi(self, rule: MirrorRule, path: str, accept: str, here: str) -> Answer:
        parts = [part for part in path.split("/") if part]
        if len(parts) == 2 and parts[0] == "simple":
            project = pypi.project_name(parts[1])
            releases = await self._releases(project)
            visible = [release for release in releases.values() if release.visible(rule.before)]
            return Answer(*pypi.page(project, visible, pypi.JSON_TYPE in accept))
        if len(parts) != 3 or parts[0] != "files":
            raise Refused("not_found")
        project, name = pypi.project_name(parts[1]), unquote(parts[2])
        releases = await self._releases(project)
        release = releases.get(name) or releases.get(name.removesuffix(".metadata"))
        if release is None:
            raise Refused("not_found")
        if not release.visible(rule.before):
            raise Refused("before", "the file is from after the sandbox's date", name=name)
        if name == release.filename:
            return self._file(release.url, release.hashes, release.size)
        if not release.metadata_hashes:
            raise Refused("not_found")
        return self._file(release.url + ".metadata", release.metadata_hashes, None)

    async def _releases(self, project: str) -> dict[str, pypi.Release]:
        url = f"{self._url}{project}/"
        return await self._list(url, pypi.ACCEPT, lambda kind, content: pypi.parse(kind, content, url))  # type: ignore[no-any-return]

    async def _npm(self, rule: MirrorRule, path: str, accept: str, here: str) -> Answer:
        name, slash, file = path.partition("/-/")
        name = npm.package_name(unquote(name.rstrip("/")))
        package = await self._list(
            self._url + quote(name, safe="@"), "application/json", lambda _, content: npm.parse(content)
        )
        shown = npm.visible(package, rule.before)
        if not slash:
            return Answer("application/json", msgspec.json.encode(_rewritten(shown, name, here)))
        for number, version in package["versions"].items():
            if npm.tarball_name(version) == unquote(file):
                if number not in shown["versions"]:
                    raise Refused("before", "the version is from after the sandbox's date", name=f"{name}@{number}")
                hashes = npm.hashes_of(version)
                if not hashes:
                    raise Refused("hash", "the registry gives no hash of it", name=f"{name}@{number}")
                return self._file(version["dist"]["tarball"], hashes, None)
        raise Refused("not_found")

    async def _goproxy(self, rule: MirrorRule, path: str, accept: str, here: str) -> Answer:
        asked = goproxy.asked(path)
        if not goproxy.within(asked.module, rule.modules):
            raise Refused("module", "the module is not among those that the sandbox may have", name=asked.module)
        base = self._url + goproxy.escaped(asked.module)
        if asked.what in ("list", "latest"):
            return await self._versions(rule, base, asked)
        info = await self._info(base, asked.version)
        if not _in_time(info, rule.before):
            raise Refused(
                "before", "the version is from after the sandbox's date", name=f"{asked.module}@{asked.version}"
            )
        if asked.what == "info":
            return Answer("application/json", info)
        url = f"{base}/@v/{goproxy.escaped(asked.version)}.{asked.what}"
        return self._file(url, {}, None)

    async def _versions(self, rule: MirrorRule, base: str, asked: goproxy.Asked) -> Answer:
        listed = await self._list(
            f"{base}/@v/list",
            "text/plain",
            lambda _, content: content.decode(errors="replace").split()[:_MOST_VERSIONS],
        )
        versions = listed
        if rule.before is not None:
            infos = await asyncio.gather(*(self._info_or_none(base, version) for version in listed))
            versions = [
                version for version, info in zip(listed, infos, strict=True) if info and _in_time(info, rule.before)
            ]
        if asked.what == "list":
            return Answer("text/plain; charset=utf-8", "".join(version + "\n" for version in versions).encode())
        if newest := goproxy.highest(versions):
            return Answer("application/json", await self._info(base, newest))
        latest: bytes = await self._list(f"{base}/@latest", "application/json", lambda _, content: content)
        if not _in_time(latest, rule.before):
            raise Refused("before", "all versions are from after the sandbox's date", name=asked.module)
        return Answer("application/json", latest)

    async def _info(self, base: str, version: str) -> bytes:
        async with self._infos:
            url = f"{base}/@v/{goproxy.escaped(version)}.info"
            info: bytes = await self._list(url, "application/json", lambda _, content: content)
            return info

    async def _info_or_none(self, base: str, version: str) -> bytes | None:
        try:
            return await self._info(base, version)
        except Refused:
            return None  # a version that has gone is not listed

    def _file(self, url: str, hashes: dict[str, str], size: int | None) -> Answer:
        if urlsplit(url).scheme not in ("http", "https"):
            raise Refused("upstream", "a file at no address of HTTP")
        credential = self._credential if urlsplit(url).netloc == urlsplit(self._url).netloc else None
        wanted = Wanted(key=url, url=url, hashes=hashes, size=size, credential=credential)
        return Answer("application/octet-stream", self._files.open(wanted))

    async def _list(self, url: str, accept: str, read: Callable[[str, bytes], Any]) -> Any:
        """A list of the upstream's, read; asked for once for as long as it is fresh. Raises Refused."""
        now = asyncio.get_running_loop().time()
        kept = self._kept.get(url)
        if kept is not None and kept[0] > now:
            self._kept.move_to_end(url)
            found = kept[2]
        else:
            found = await self._flights.once(url, lambda: self._ask(url, accept, read))
        if found is None:
            raise Refused("not_found")
        return found

    async def _ask(self, url: str, accept: str, read: Callable[[str, bytes], Any]) -> Any:
        answer = await self._upstream.index(url, accept, self._credential)
        found = None if answer is None else await asyncio.to_thread(read, *answer)
        size = 256 + (0 if answer is None else len(answer[1]))
        self._bytes += size - self._kept.pop(url, (0.0, 0, None))[1]
        self._kept[url] = (asyncio.get_running_loop().time() + self._seconds, size, found)
        while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1][1]
        return found


def _in_time(info: bytes, before: float | None) -> bool:
    if before is None:
        return True
    made = goproxy.info_seconds(info)
    return made is not None and made < before


def _rewritten(package: dict[str, Any], name: str, here: str) -> dict[str, Any]:
    """The package with its tarballs at this mirror."""
    versions = {}
    for number, version in package["versions"].items():
        file = npm.tarball_name(version)
        if file is not None:
            versions[number] = {
                **version,
                "dist": {**version["dist"], "tarball": f"{here}/{quote(name, safe='@/')}/-/{quote(file)}"},
            }
    return {**package, "versions": versions}
