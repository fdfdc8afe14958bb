"""HTTP requests to the API server: credentials, content types and errors."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import kubernetes.aio.client
import pytest
from aiohttp import web
from kubernetes.aio.dynamic.exceptions import ConflictError, DynamicApiError, NotFoundError
from trimtab_operator.kube.http import ApiHttp, parse_json, to_json_bytes, uses_proxy

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
SOON = aiohttp.ClientTimeout(total=60.0)


@dataclass
class Server:
    """API server with one response; records the requests."""

    status: int = 200
    text: str = '{"kind": "Pod"}'
    asked: list[tuple[str, str, dict[str, str], str]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        headers = {name: request.headers.get(name, "") for name in ("Authorization", "Content-Type", "Accept")}
        self.asked.append((request.method, request.path_qs, headers, await request.text()))
        return web.Response(status=self.status, text=self.text, content_type="application/json")


@asynccontextmanager
async def asking(server: Server, **options: Any) -> AsyncIterator[ApiHttp]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client: Any = kubernetes.aio.client
    try:
        configuration = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}", **options)
        async with ApiHttp(configuration) as http:
            yield http
    finally:
        await runner.cleanup()


async def test_request_has_credentials_and_content_type() -> None:
    server = Server()
    async with asking(server, api_key={"BearerToken": "t"}, api_key_prefix={"BearerToken": "Bearer"}) as http:
        response = await http.request(
            "patch",
            "/api/v1/namespaces/n/pods/m",
            query={"fieldManager": "a b", "force": "true"},
            body={"metadata": {"name": "ü"}},
            content_type="application/apply-patch+yaml",
            timeout=SOON,
        )
        assert json.loads(await response.read()) == {"kind": "Pod"}
    ((method, path, headers, body),) = server.asked
    assert (method, path) == ("PATCH", "/api/v1/namespaces/n/pods/m?fieldManager=a+b&force=true")
    assert headers == {
        "Authorization": "Bearer t",
        "Content-Type": "application/apply-patch+yaml",
        "Accept": "application/json",
    }
    assert json.loads(body) == {"metadata": {"name": "ü"}}


async def test_renewed_token_is_used() -> None:
    server = Server()
    async with asking(server) as http:

        async def renew(configuration: Any) -> None:
            configuration.api_key["BearerToken"] = f"Bearer {len(server.asked)}"

        http._configuration.refresh_api_key_hook = renew
        http._configuration.api_key["BearerToken"] = "Bearer before"
        for _ in range(2):
            await http.request("get", "/version", query={}, timeout=SOON)
    assert [headers["Authorization"] for _, _, headers, _ in server.asked] == ["Bearer 0", "Bearer 1"]


@pytest.mark.parametrize(
    ("status", "kind"), [(404, NotFoundError), (409, ConflictError), (418, DynamicApiError), (301, DynamicApiError)]
)
async def test_error_status_raises_library_exception(status: int, kind: type[DynamicApiError]) -> None:
    server = Server(status, '{"kind": "Status", "message": "no"}')
    async with asking(server) as http:
        with pytest.raises(kind) as refused:
            await http.request("get", "/version", query={}, timeout=SOON)
    assert (refused.value.status, json.loads(str(refused.value.body))["message"]) == (status, "no")
    assert "no" in str(refused.value)


@pytest.mark.parametrize(
    ("named", "host", "is_behind"),
    [
        ({}, "https://10.0.0.1:443", False),
        ({"https_proxy": "http://proxy:3128"}, "https://10.0.0.1:443", True),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "10.0.0.1"}, "https://10.0.0.1:443", False),
        ({"http_proxy": "http://proxy:3128"}, "https://10.0.0.1:443", False),
    ],
)
def test_environment_proxies_are_used(
    named: dict[str, str], host: str, is_behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    assert uses_proxy(host) is is_behind


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 1.5, True, None, "ü", 10**30], "": {}},
        {"message": "half of a pair: \ud800"},  # as an engine may word its end
        functools.reduce(
            lambda inside, _: {"in": inside}, range(400), dict[str, Any]()
        ),  # anyone may nest a template like this
    ],
)
def test_json_round_trip_of_unusual_values(value: dict[str, Any]) -> None:
    assert json.loads(to_json_bytes(value)) == value
    assert parse_json(json.dumps(value).encode()) == value


def test_invalid_json_raises_value_error() -> None:
    for text in (b"", b"{", b"<html>"):
        with pytest.raises(ValueError, match="Expecting"):
            parse_json(text)
