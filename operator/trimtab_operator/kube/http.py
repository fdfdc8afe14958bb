"""Requests to the API server over aiohttp, as the Kubernetes client library is configured.

The library finds credentials and renews them; it is not asked for the requests themselves. Its own way looks for
proxies and for a netrc file at each request, in a thread, and copies each body: of an operator's processor time at a
burst of edits that was a third. What answers is told in the library's errors.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import kubernetes.aio.client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic.exceptions import api_exception
from pydantic_core import from_json, to_json

MAX_CONNECTIONS = 100  # as many as the library has
BUFFER_BYTES = 2**21  # a line of a watch may be long
JSON = "application/json"


class ApiHttp:
    """One pool of connections to one API server. Use it as an async context manager."""

    def __init__(self, configuration: Any) -> None:
        self._configuration = configuration  # the client library is untyped
        self._host = str(configuration.host).rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._of_every_request: dict[str, Any] = {}

    async def __aenter__(self) -> ApiHttp:
        rest: Any = kubernetes.aio.client.rest.RESTClientObject(self._configuration)  # reads certificates
        connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, ssl=rest.ssl_context)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=BUFFER_BYTES,
            trust_env=rest.proxy is None and is_behind_a_proxy(self._host),
        )
        named = {
            "server_hostname": self._configuration.tls_server_name,
            "proxy": rest.proxy,
            "proxy_headers": rest.proxy_headers,
        }
        self._of_every_request = {name: value for name, value in named.items() if value}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str],
        body: Any = None,
        content_type: str = JSON,
        timeout: aiohttp.ClientTimeout,
        check: Callable[[], None] | None = None,
    ) -> aiohttp.ClientResponse:
        """Make one request; an answer that says yes, to be read. Raises DynamicApiError for any other, and what `check`
        raises once nothing is waited for any more but the connection."""
        assert self._session is not None
        headers = {"Accept": JSON, "Content-Type": content_type, **await self._credentials()}
        if check is not None:
            check()
        response = await self._session.request(
            method,
            self._host + path,
            params=query,
            data=None if body is None else written(body),
            headers=headers,
            timeout=timeout,
            **self._of_every_request,
        )
        if 200 <= response.status <= 299:
            return response
        text = await response.text(errors="replace")
        said = ApiException(status=response.status, reason=response.reason)
        said.body, said.headers = text, response.headers
        refused: Any = api_exception
        raise refused(said)

    async def _credentials(self) -> dict[str, str]:
        """The headers that say who asks, renewed by the library where they are about to end."""
        settings: Iterable[Mapping[str, Any]] = (await self._configuration.auth_settings()).values()
        return {str(one["key"]): str(one["value"]) for one in settings if one["in"] == "header" and one["value"]}


def read(text: bytes) -> Any:
    """JSON as the API server writes it: five times as fast as the standard library, which reads what this cannot, such
    as objects that are nested hundreds deep. Raises ValueError."""
    try:
        return from_json(text)
    except ValueError:
        return json.loads(text)


def written(body: Any) -> bytes:
    """JSON for the API server. The standard library writes what is no text by itself: half of a surrogate pair."""
    try:
        return to_json(body)
    except ValueError:
        return json.dumps(body).encode()


def is_behind_a_proxy(host: str) -> bool:
    """Whether the environment names a proxy for an address."""
    parts = urlsplit(host)
    proxies = urllib.request.getproxies()
    is_named = bool(proxies.get(parts.scheme) or proxies.get("all"))
    return is_named and not urllib.request.proxy_bypass(parts.hostname or "")
