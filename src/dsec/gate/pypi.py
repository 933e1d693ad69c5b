"""A Python package index as of a date. Source: PEP 503, PEP 592, PEP 658, PEP 691, PEP 700, PEP 714."""

import datetime
import html
import html.parser
import re
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

import msgspec
from msgspec import Struct, field

from dsec.gate.refusal import Refused

__all__ = ["ACCEPT", "JSON_TYPE", "Release", "page", "parse", "project_name", "seconds"]

JSON_TYPE = "application/vnd.pypi.simple.v1+json"
HTML_TYPE = "application/vnd.pypi.simple.v1+html"
ACCEPT = f"{JSON_TYPE}, {HTML_TYPE};q=0.2, text/html;q=0.1"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,198}[A-Za-z0-9])?")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,250}")
_HASHES = frozenset({"sha256", "sha384", "sha512"})


class Release(Struct, frozen=True, rename="kebab"):
    """One file of a project. `upload_time`: text of PEP 700; without it nobody can say whether the file was there at a date."""

    filename: str
    url: str
    hashes: dict[str, str]
    requires_python: str | None = None
    upload_time: str | None = None
    size: int | None = None
    yanked: bool | str = False
    core_metadata: bool | dict[str, str] | None = None
    dist_info_metadata: bool | dict[str, str] | None = None

    @property
    def metadata_hashes(self) -> dict[str, str]:
        """Hashes of the file of PEP 658 beside it; none where there is no such file, or no hash of it."""
        given = self.core_metadata if self.core_metadata is not None else self.dist_info_metadata
        return {name: text for name, text in given.items() if name in _HASHES} if isinstance(given, dict) else {}

    def visible(self, before: float | None) -> bool:
        """Whether a sandbox of that date sees it."""
        if before is None:
            return True
        uploaded = seconds(self.upload_time)
        return uploaded is not None and uploaded < before


class _Listing(Struct):
    files: list[Release] = field(default_factory=list)


def project_name(text: str) -> str:
    """The normal form of a project's name. Raises Refused(`not_found`)."""
    name = unquote(text)
    if not _NAME.fullmatch(name):
        raise Refused("not_found", "no name of a project")
    return re.sub(r"[-_.]+", "-", name).lower()


def seconds(text: str | None) -> float | None:
    """Unix seconds of an upload time; None for what is none."""
    if text is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


def parse(content_type: str, content: bytes, url: str) -> dict[str, Release]:
    """Files by name, each with an absolute URL and a hash that can be checked. Raises Refused(`upstream`)."""
    if content_type.endswith("+json") or content_type == "application/json":
        try:
            files = msgspec.json.decode(content, type=_Listing).files
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Refused("upstream", "the index is no list of PEP 691") from error
    else:
        reader = _Anchors()
        reader.feed(content.decode(errors="replace"))
        files = reader.files
    found = {}
    for release in files:
        target = urljoin(url, release.url)
        hashes = {
            name: text
            for name, text in release.hashes.items()
            if name in _HASHES and re.fullmatch(r"[0-9A-Fa-f]{64,128}", text)
        }
        if hashes and _FILE.fullmatch(release.filename) and urlsplit(target).scheme in ("http", "https"):
            found[release.filename] = msgspec.structs.replace(release, url=urldefrag(target).url, hashes=hashes)
    return found


class _Anchors(html.parser.HTMLParser):
    """The links of an index in HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[Release] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        target = given.get("href")
        if tag != "a" or not target:
            return
        address, fragment = urldefrag(target)
        algorithm, _, text = fragment.partition("=")
        metadata = (given.get("data-core-metadata") or "").partition("=")
        self.files.append(
            Release(
                filename=unquote(address.rpartition("/")[2]), url=address, hashes={algorithm: text},
                requires_python=given.get("data-requires-python"),
                yanked=(given["data-yanked"] or True) if "data-yanked" in given else False,
                core_metadata={metadata[0]: metadata[2]} if metadata[2] else None,
            )
        )  # fmt: skip


def page(project: str, releases: list[Release], as_json: bool) -> tuple[str, bytes]:
    """Content type and content of the project's page; files are reached through this mirror."""
    shown = [_shown(project, release) for release in releases]
    if as_json:
        listing = {"meta": {"api-version": "1.0"}, "name": project, "files": shown}
        return JSON_TYPE, msgspec.json.encode(listing)
    lines = [_anchor(file) for file in shown]
    body = "\n".join(["<!DOCTYPE html>", "<html><body>", *lines, "</body></html>"])
    return "text/html; charset=utf-8", body.encode()


def _shown(project: str, release: Release) -> dict[str, Any]:
    file: dict[str, Any] = {
        "filename": release.filename, "url": f"../../files/{project}/{quote(release.filename)}", "hashes": release.hashes, "yanked": release.yanked,
    }  # fmt: skip
    for key, value in (
        ("requires-python", release.requires_python),
        ("upload-time", release.upload_time),
        ("size", release.size),
    ):
        if value is not None:
            file[key] = value
    if release.metadata_hashes:
        file["core-metadata"] = file["dist-info-metadata"] = release.metadata_hashes
    return file


def _anchor(file: dict[str, Any]) -> str:
    algorithm = max(file["hashes"], key=len) if "sha256" not in file["hashes"] else "sha256"
    words = [f'href="{html.escape(file["url"])}#{algorithm}={html.escape(file["hashes"][algorithm])}"']
    if "requires-python" in file:
        words.append(f'data-requires-python="{html.escape(file["requires-python"])}"')
    if file["yanked"] is not False:
        words.append(f'data-yanked="{html.escape("" if file["yanked"] is True else file["yanked"])}"')
    for kind, text in list(file.get("core-metadata", {}).items())[:1]:
        words += [
            f'data-core-metadata="{kind}={html.escape(text)}"',
            f'data-dist-info-metadata="{kind}={html.escape(text)}"',
        ]
    return f"<a {' '.join(words)}>{html.escape(file['filename'])}</a><br>"
