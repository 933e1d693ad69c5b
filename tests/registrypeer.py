"""A small registry on loopback that speaks the distribution API with token authentication: a peer for tests, not a product."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from imagekit import Image


@dataclass
class Registry:
    """What it serves and how. `auth`: "", "basic" or "bearer"; `redirect`: blobs are answered by a redirect to /cdn."""

    auth: str = ""
    redirect: bool = False
    password: str = "user:secret"
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    host: str = ""
    elsewhere: str = ""

    def add(self, tag: str, made: Image, index: bytes | None = None) -> None:
        kind = "application/vnd.oci.image.index.v1+json" if index else made.manifest["mediaType"]
        self.manifests[tag] = (kind, index or made.blobs[made.manifest["digest"]])
        for digest, raw in made.blobs.items():
            self.blobs[digest] = raw
            self.manifests[digest] = (made.manifest["mediaType"], raw)

    async def token(self, request: web.Request) -> web.Response:
        self.requests.append((request.path_qs, request.headers.get("Authorization", "")))
        given = request.headers.get("Authorization", "")
        if self.password and given != "Basic " + base64.b64encode(self.password.encode()).decode():
            return web.Response(status=401)
        return web.json_response({"token": f"T-{request.query['scope']}-{request.query['service']}"})

    def refuse(self, request: web.Request) -> web.Response | None:
        given = request.headers.get("Authorization", "")
        if self.auth == "basic" and given != "Basic " + base64.b64encode(self.password.encode()).decode():
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="r"'})
        if self.auth == "bearer" and given != "Bearer T-repository:team/app:pull-svc":
            realm = f"http://{self.host}/token"
            challenge = f'Bearer realm="{realm}",service="svc",scope="repository:team/app:pull"'
            return web.Response(status=401, headers={"WWW-Authenticate": challenge})
        return None

    async def manifest(self, request: web.Request) -> web.Response:
        self.requests.append((request.path, request.headers.get("Authorization", "")))
        if (refusal := self.refuse(request)) is not None:
            return refusal
        if request.match_info["name"] not in self.manifests:
            return web.Response(status=404)
        kind, raw = self.manifests[request.match_info["name"]]
        return web.Response(body=raw, content_type=kind)

    async def blob(self, request: web.Request) -> web.Response:
        self.requests.append((request.path, request.headers.get("Authorization", "")))
        if (refusal := self.refuse(request)) is not None:
            return refusal
        digest = request.match_info["digest"]
        if self.redirect:
            raise web.HTTPTemporaryRedirect(f"http://{self.elsewhere or self.host}/cdn/{digest}")
        return web.Response(body=self.blobs[digest])

    async def cdn(self, request: web.Request) -> web.Response:
        self.requests.append((request.path, request.headers.get("Authorization", "")))
        return web.Response(body=self.blobs[request.match_info["digest"]])


@asynccontextmanager
async def serving(registry: Registry) -> AsyncIterator[Registry]:
    """Serves it on a free port of loopback; `registry.host` says where, and `elsewhere` a second name for the same."""
    app = web.Application()
    app.router.add_get("/token", registry.token)
    app.router.add_get("/v2/team/app/manifests/{name}", registry.manifest)
    app.router.add_get("/v2/team/app/blobs/{digest}", registry.blob)
    app.router.add_get("/cdn/{digest}", registry.cdn)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        registry.host, registry.elsewhere = f"127.0.0.1:{port}", f"localhost:{port}"
        yield registry
    finally:
        await runner.cleanup()
