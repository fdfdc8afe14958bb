"""An API server with one Lease."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic.exceptions import ConflictError


class OneLease:
    """An API server that keeps one Lease and counts its versions."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0

    async def get(self, _kind: str, _namespace: str, _name: str) -> dict[str, Any] | None:
        return copy.deepcopy(self.lease)

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        assert self.lease is None
        return self._store(manifest)

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if manifest["metadata"]["resourceVersion"] != str(self.version):
            raise a_conflict()
        return self._store(manifest)

    def _store(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = copy.deepcopy(manifest)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)


def a_conflict() -> Exception:
    """What the API server says to who writes by what is not so any more."""
    response = ApiException(status=409, reason="Conflict")
    response.headers = {}
    make: Callable[[ApiException], Exception] = ConflictError  # the client library is untyped
    return make(response)
