"""An API server over HTTP that stores every object without validation. Watches stay silent unless events are queued."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from trimtab_operator.kube.client import RESOURCES
from trimtab_operator.resource.spec import GROUP, KIND, PLURAL, VERSION

POLL_SECONDS = 0.05
RESOURCE = {"kind": KIND, "name": PLURAL, "singularName": "", "namespaced": True, "verbs": ["list", "watch", "patch"]}
VERSIONS = {"preferredVersion": {"version": VERSION}, "versions": [{"version": VERSION}]}
DISCOVERY: dict[str, dict[str, Any]] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {"resources": [{**RESOURCE, "kind": "Namespace", "name": "namespaces", "namespaced": False}]},
    "/apis": {"groups": [{"name": GROUP, **VERSIONS}]},
    f"/apis/{GROUP}/{VERSION}": {"resources": [RESOURCE]},
}


class SmallApiServer:
    """Its objects by path, and how often each path was asked, and answered: read or written."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.asked: Counter[str] = Counter()
        self.methods: set[str] = set()
        self.writes: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.slow: dict[str, Callable[[], bool]] = {}
        """Paths of which nothing is said before this is so."""
        self.listed: dict[str, list[dict[str, Any]]] = {}
        """Items of lists, by path."""
        self.events: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        """Events that the watch of a path sends."""
        self.port = 0
        self._version = 0

    @asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        """Serve on loopback."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        try:
            yield
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.asked[path] += 1
        self.methods.add(request.method)
        while not self.slow.get(path, lambda: True)():  # noqa: ASYNC110 - whatever it is that is waited for
            await asyncio.sleep(POLL_SECONDS)
        if "watch" in request.query:
            return await self._watched(request)
        if request.method in ("POST", "PUT"):
            return self._written(path, await request.json(), is_new=request.method == "POST")
        self.reads[path] += 1
        if path in self.objects:
            return web.json_response(self.objects[path])
        if path in DISCOVERY:
            return web.json_response(DISCOVERY[path])
        if path.rsplit("/", 1)[1] in {plural for _, _, plural, _ in RESOURCES.values()}:
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": self.listed.get(path, [])})
        name = path.rsplit("/", 1)[1]
        return web.json_response({"reason": "NotFound", "details": {"name": name}}, status=404)

    def _written(self, path: str, body: dict[str, Any], *, is_new: bool) -> web.Response:
        self._version += 1
        path = f"{path}/{body['metadata']['name']}" if is_new else path
        body["metadata"] |= {"resourceVersion": str(self._version), "uid": path}
        self.objects[path] = body
        self.writes[path] += 1
        return web.json_response(body)

    async def _watched(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        events = self.events.get(request.path)
        while request.transport is not None:  # until the client disconnects
            if events is None or events.empty():
                await asyncio.sleep(POLL_SECONDS)
            else:
                await response.write(json.dumps(await events.get()).encode() + b"\n")
        return response


def make_kubeconfig(folder: Path, port: int) -> Path:
    """Write a kubeconfig for the server on this port. Return its path."""
    content = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "c", **content}))
    return path
