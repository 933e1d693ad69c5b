"""A package index of the tests' own in the fake internet: a Python index of PEP 691, an npm registry and a Go module proxy, with wheels it makes."""

import base64
import gzip
import hashlib
import io
import json
import tarfile
import zipfile
from datetime import UTC, datetime

from dsec.testing.netservices import Web

__all__ = ["PackageIndex", "day", "module_zip", "wheel"]


def day(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def wheel(name: str, version: str, size: int = 2000) -> tuple[str, bytes]:
    """A wheel with one module and `size` bytes of padding that does not pack."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"VERSION = {version!r}\n",
        f"{name}/padding.txt": hashlib.shake_256(f"{name}{version}".encode()).hexdigest(size // 2),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: dsec-test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},," + "\n" for path in files) + f"{info}/RECORD,,\n"
    return f"{name}-{version}-py3-none-any.whl", packed({**files, f"{info}/RECORD": record})


def module_zip(module: str, version: str) -> bytes:
    prefix = f"{module}@{version}"
    return packed({f"{prefix}/go.mod": f"module {module}\n", f"{prefix}/m.go": "package m\n"})


def packed(files: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path, (2024, 1, 1, 0, 0, 0)), text)
    return out.getvalue()


class PackageIndex:
    """What it knows is pages of a Web server of the fake internet."""

    def __init__(self, web: Web, host: str) -> None:
        self.web = web
        self.url = f"http://{host}"
        self._projects: dict[str, list[dict[str, object]]] = {}
        self._packages: dict[str, dict[str, dict[str, object]]] = {}
        self._modules: dict[str, list[str]] = {}

    def add_wheel(
        self, name: str, version: str, uploaded: str | None, content: bytes | None = None, size: int = 2000
    ) -> str:
        """A release; `uploaded` None: the index does not say when. `content`: what is served instead of the real file."""
        filename, real = wheel(name, version, size)
        file: dict[str, object] = {
            "filename": filename, "url": f"/files/{filename}", "hashes": {"sha256": hashlib.sha256(real).hexdigest()}, "size": len(real),
        }  # fmt: skip
        if uploaded:
            file["upload-time"] = f"{uploaded}T12:00:00.000000Z"
        self.web.pages[f"/files/{filename}"] = real if content is None else content
        self._projects.setdefault(name, []).append(file)
        listing = {"meta": {"api-version": "1.1"}, "name": name, "files": self._projects[name]}
        self.web.pages[f"/simple/{name}/"] = json.dumps(listing).encode()
        self.web.types[f"/simple/{name}/"] = "application/vnd.pypi.simple.v1+json"
        return filename

    def add_package(self, name: str, version: str, published: str) -> None:
        """An npm package of one file."""
        content = tarball(name, version)
        path = f"/{name}/-/{name}-{version}.tgz"
        self.web.pages[path] = content
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()
        versions = self._packages.setdefault(name, {})
        versions[version] = {"name": name, "version": version, "published": published,
                             "dist": {"tarball": self.url + path, "integrity": integrity, "shasum": hashlib.sha1(content).hexdigest()}}  # fmt: skip
        package = {
            "name": name, "dist-tags": {"latest": version}, "versions": versions,
            "time": {number: f"{one['published']}T12:00:00.000Z" for number, one in versions.items()},
        }  # fmt: skip
        self.web.pages[f"/{name}"] = json.dumps(package).encode()
        self.web.types[f"/{name}"] = "application/json"

    def add_module(self, module: str, version: str, made: str) -> None:
        """A version of a Go module."""
        self._modules.setdefault(module, []).append(version)
        base = f"/{module}/@v/"
        info = json.dumps({"Version": version, "Time": f"{made}T12:00:00Z"}).encode()
        self.web.pages[base + "list"] = "".join(f"{one}\n" for one in self._modules[module]).encode()
        self.web.pages[base + version + ".info"] = self.web.pages[f"/{module}/@latest"] = info
        self.web.pages[base + version + ".mod"] = f"module {module}\n".encode()
        self.web.pages[base + version + ".zip"] = module_zip(module, version)


def tarball(name: str, version: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path, text in (
            ("package/package.json", json.dumps({"name": name, "version": version})),
            ("package/index.js", "module.exports = 1\n"),
        ):
            entry = tarfile.TarInfo(path)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return gzip.compress(out.getvalue(), mtime=0)
