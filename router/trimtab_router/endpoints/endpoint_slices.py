"""Replicas from the EndpointSlices of a Service, by list and watch.

Errors of the Kubernetes API keep the last known replicas: the router serves without the API server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from trimtab_router.endpoints.endpoint import Endpoint

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SERVICE_NAME_LABEL = "kubernetes.io/service-name"
VERSIONS = ("v1", "v1beta1")
"""Of discovery.k8s.io; Kubernetes before 1.21 serves only the second."""
WATCH_SECONDS = 290
MAX_LINE_BYTES = 4 << 20
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 10.0
API_PORT_NAME = "http"
ADMIN_PORT_NAME = "admin"

logger = logging.getLogger(__name__)


class ResourceVersionGone(Exception):
    """The watch cannot continue: list again."""


class EndpointSliceSource:
    """Follows the EndpointSlices of one Service.

    Args:
        namespace: Namespace of the Service.
        service: Name of the Service.
        on_endpoints: Called with all endpoints after each change.
        base_url: Address of the API server; the pod's own by default.
        account: Folder with the files `token` and `ca.crt` of the service account.
    """

    def __init__(
        self,
        namespace: str,
        service: str,
        on_endpoints: Callable[[Sequence[Endpoint]], None],
        *,
        base_url: str | None = None,
        account: Path = ACCOUNT,
    ) -> None:
        self._namespace, self._service, self._on_endpoints = namespace, service, on_endpoints
        self._base_url = base_url or in_cluster_url()
        self._account = account
        self._version = 0
        self._slices: dict[str, Mapping[str, Any]] = {}
        self._sent: tuple[Endpoint, ...] | None = None

    async def run(self) -> None:
        """List and watch until cancelled."""
        delay = MIN_RETRY_SECONDS
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=WATCH_SECONDS + 30)
        async with aiohttp.ClientSession(timeout=timeout, read_bufsize=MAX_LINE_BYTES) as session:
            while True:
                try:
                    resource_version = await self._list(session)
                    delay = MIN_RETRY_SECONDS
                    while True:
                        resource_version = await self._watch(session, resource_version)
                except ResourceVersionGone:
                    continue
                except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
                    logger.warning("endpoints: %s: %s; trying again", type(error).__name__, error)
                    await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                    delay = min(delay * 2, MAX_RETRY_SECONDS)

    async def _list(self, session: aiohttp.ClientSession) -> str:
        """Read all slices and return their resource version."""
        while True:
            async with session.get(self._url(), headers=self._headers(), ssl=self._ssl()) as response:
                if response.status == 404 and self._version + 1 < len(VERSIONS):
                    self._version += 1
                    continue
                response.raise_for_status()
                found = orjson.loads(await response.read())
            self._slices = {item["metadata"]["name"]: item for item in found.get("items") or ()}
            self._report()
            return str(found["metadata"]["resourceVersion"])

    async def _watch(self, session: aiohttp.ClientSession, resource_version: str) -> str:
        """Apply changes until the API server ends the watch; return the last resource version."""
        parameters = (
            f"&watch=1&allowWatchBookmarks=true&timeoutSeconds={WATCH_SECONDS}&resourceVersion={resource_version}"
        )
        async with session.get(self._url() + parameters, headers=self._headers(), ssl=self._ssl()) as response:
            if response.status == 410:
                raise ResourceVersionGone
            response.raise_for_status()
            async for line in response.content:
                event = orjson.loads(line)
                kind, item = event["type"], event["object"]
                if kind == "ERROR":
                    raise ResourceVersionGone
                resource_version = str(item["metadata"]["resourceVersion"])
                if kind == "BOOKMARK":
                    continue
                if kind == "DELETED":
                    self._slices.pop(item["metadata"]["name"], None)
                else:
                    self._slices[item["metadata"]["name"]] = item
                self._report()
        return resource_version

    def _report(self) -> None:
        endpoints = tuple(parse_slices(self._slices.values()))
        if endpoints != self._sent:
            self._sent = endpoints
            self._on_endpoints(endpoints)

    def _url(self) -> str:
        return (
            f"{self._base_url}/apis/discovery.k8s.io/{VERSIONS[self._version]}/namespaces/{self._namespace}"
            f"/endpointslices?labelSelector={SERVICE_NAME_LABEL}%3D{self._service}"
        )

    def _headers(self) -> dict[str, str]:
        """Return the headers; the token is read each time because it is rotated."""
        token = self._account / "token"
        return {"Authorization": f"Bearer {token.read_text().strip()}"} if token.is_file() else {}

    def _ssl(self) -> ssl.SSLContext | bool:
        authority = self._account / "ca.crt"
        return ssl.create_default_context(cafile=str(authority)) if authority.is_file() else True


def parse_slices(slices: Iterable[Mapping[str, Any]]) -> list[Endpoint]:
    """Return the endpoints of slices, sorted by name.

    A pod in several slices (of both address families, or while slices are rebalanced) is one endpoint: IPv4 and Ready
    first.
    """
    found: dict[str, Endpoint] = {}
    ordered = sorted(slices, key=lambda each: (each.get("addressType") != "IPv4", each["metadata"]["name"]))
    for each in ordered:
        ports = {port.get("name"): port.get("port") for port in each.get("ports") or ()}
        port = ports.get(API_PORT_NAME)
        if not isinstance(port, int):
            continue
        for item in each.get("endpoints") or ():
            conditions = item.get("conditions") or {}
            addresses = item.get("addresses") or ()
            if not addresses:
                continue
            name = (item.get("targetRef") or {}).get("name") or addresses[0]
            ready = conditions.get("ready") is not False and conditions.get("terminating") is not True
            known = found.get(name)
            if known is None or (ready and not known.ready):
                found[name] = Endpoint(name, addresses[0], port, ports.get(ADMIN_PORT_NAME), ready)
    return [found[name] for name in sorted(found)]


def in_cluster_url() -> str:
    """Return the address of the API server of this pod's cluster.

    Raises:
        ValueError: The process does not run in a pod.
    """
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ValueError("--service: no Kubernetes API (KUBERNETES_SERVICE_HOST is not set); use --endpoint URL")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
