"""Replicas from EndpointSlices, with a server that behaves like the Kubernetes API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from stub_upstream import until
from trimtab_router.endpoints import endpoint_slices
from trimtab_router.endpoints.endpoint import Endpoint
from trimtab_router.endpoints.endpoint_slices import EndpointSliceSource, parse_slices


def make_slice(name: str, *pods: dict[str, Any], family: str = "IPv4", admin: int | None = 8001) -> dict[str, Any]:
    ports = [{"name": "http", "port": 8000}]
    if admin is not None:
        ports.append({"name": "admin", "port": admin})
    return {
        "metadata": {"name": name, "resourceVersion": "1"},
        "addressType": family,
        "ports": ports,
        "endpoints": pods,
    }


def make_pod(name: str, address: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "targetRef": {"kind": "Pod", "name": name}, "conditions": conditions}


def test_slices_become_endpoints() -> None:
    found = parse_slices(
        [
            make_slice("b", make_pod("pod-1", "10.0.0.2", ready=True), make_pod("pod-0", "10.0.0.1", ready=True)),
            make_slice("c", make_pod("pod-2", "10.0.0.3", ready=False), admin=None),
        ]
    )
    assert found == [
        Endpoint("pod-0", "10.0.0.1", 8000, 8001, ready=True),
        Endpoint("pod-1", "10.0.0.2", 8000, 8001, ready=True),
        Endpoint("pod-2", "10.0.0.3", 8000, None, ready=False),
    ]


def test_terminating_pod_takes_no_new_requests() -> None:
    (found,) = parse_slices([make_slice("a", make_pod("p", "10.0.0.1", ready=True, terminating=True))])
    assert not found.ready


def test_pod_in_two_slices_is_one_endpoint() -> None:
    both = [
        make_slice("a", make_pod("p", "fd00::1", ready=True), family="IPv6"),
        make_slice("b", make_pod("p", "10.0.0.1", ready=True)),
    ]
    assert [each.host for each in parse_slices(both)] == ["10.0.0.1"]
    moved = [
        make_slice("a", make_pod("p", "10.0.0.1", ready=False)),
        make_slice("b", make_pod("p", "10.0.0.1", ready=True)),
    ]
    assert [each.ready for each in parse_slices(moved)] == [True]


@pytest.mark.parametrize(
    "item",
    [
        {"metadata": {"name": "a"}},
        {"metadata": {"name": "a"}, "ports": None, "endpoints": None},
        {
            "metadata": {"name": "a"},
            "ports": [{"name": "other", "port": 1}],
            "endpoints": [{"addresses": ["10.0.0.1"]}],
        },
        {"metadata": {"name": "a"}, "ports": [{"name": "http", "port": 1}], "endpoints": [{"addresses": []}]},
    ],
)
def test_incomplete_slices_have_no_endpoints(item: dict[str, Any]) -> None:
    assert parse_slices([item]) == []


class FakeApi:
    """The part of the Kubernetes API that the router uses."""

    def __init__(self, version: str = "v1") -> None:
        self.version = version
        self.slices: list[dict[str, Any]] = []
        self.watches: list[web.StreamResponse] = []
        self.lists = 0
        self.fails = False
        self.is_gone = False
        self.authorization: str | None = None
        self.query: dict[str, str] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.authorization = request.headers.get("Authorization")
        if request.match_info["version"] != self.version:
            return web.Response(status=404)
        if self.fails:
            return web.Response(status=500)
        self.query = dict(request.query)
        if "watch" not in request.query:
            self.lists += 1
            return web.json_response({"metadata": {"resourceVersion": "5"}, "items": self.slices})
        if self.is_gone:
            self.is_gone = False
            return web.Response(status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        self.watches.append(response)
        await asyncio.sleep(60)
        return response

    async def send(self, kind: str, item: dict[str, Any]) -> None:
        await self.watches[-1].write(json.dumps({"type": kind, "object": item}).encode() + b"\n")


class Following:
    """A running source with its API server."""

    def __init__(self, api: FakeApi, account: Path) -> None:
        self.api, self._account = api, account
        self.seen: list[list[Endpoint]] = []

    async def __aenter__(self) -> Following:
        app = web.Application()
        app.router.add_get("/apis/discovery.k8s.io/{version}/namespaces/models/endpointslices", self.api.handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        source = EndpointSliceSource("models", "chat-engines", self._on_endpoints, base_url=url, account=self._account)
        self.task = asyncio.create_task(source.run())
        return self

    def _on_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        self.seen.append(list(endpoints))

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self._runner.cleanup()

    async def names(self, *expected: str) -> None:
        await until(lambda: bool(self.seen) and [each.name for each in self.seen[-1]] == list(expected))


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_source_lists_and_watches(tmp_path: Path, version: str) -> None:
    (tmp_path / "token").write_text("account-token\n")
    api = FakeApi(version)
    api.slices = [make_slice("a", make_pod("pod-0", "10.0.0.1", ready=True))]
    async with Following(api, tmp_path) as following:
        await following.names("pod-0")
        await until(lambda: len(api.watches) == 1)
        assert api.query["labelSelector"] == "kubernetes.io/service-name=chat-engines"
        assert api.query["resourceVersion"] == "5"
        assert api.authorization == "Bearer account-token"
        await api.send("ADDED", make_slice("b", make_pod("pod-1", "10.0.0.2", ready=True)))
        await following.names("pod-0", "pod-1")
        await api.send("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
        await api.send("DELETED", make_slice("a"))
        await following.names("pod-1")


async def test_source_reports_an_empty_service(tmp_path: Path) -> None:
    async with Following(FakeApi(), tmp_path) as following:
        await until(lambda: following.seen == [[]])


async def test_source_lists_again_when_the_watch_is_gone(tmp_path: Path) -> None:
    api = FakeApi()
    async with Following(api, tmp_path) as following:
        await until(lambda: len(api.watches) == 1)
        api.slices = [make_slice("a", make_pod("pod-0", "10.0.0.1", ready=True))]
        await api.send("ERROR", {"code": 410})
        await following.names("pod-0")
        assert api.lists == 2


async def test_source_keeps_replicas_while_the_api_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_slices, "MIN_RETRY_SECONDS", 0.01)
    api = FakeApi()
    api.slices = [make_slice("a", make_pod("pod-0", "10.0.0.1", ready=True))]
    async with Following(api, tmp_path) as following:
        await until(lambda: len(api.watches) == 1)
        api.fails = True
        api.slices = []
        await api.send("ERROR", {"code": 500})
        await asyncio.sleep(0.2)
        assert len(following.seen) == 1
        api.fails = False
        await following.names()
