"""An API server with one Lease."""

from __future__ import annotations

import copy
from typing import Any


class OneLease:
    """An API server that keeps one Lease and counts its versions."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0

    async def get(self, _kind: str, _namespace: str, _name: str) -> dict[str, Any] | None:
        return copy.deepcopy(self.lease)

    async def create(self, manifest: dict[str, Any]) -> None:
        assert self.lease is None
        self._store(manifest)

    async def replace(self, manifest: dict[str, Any]) -> None:
        assert manifest["metadata"]["resourceVersion"] == str(self.version)
        self._store(manifest)

    def _store(self, manifest: dict[str, Any]) -> None:
        self.version += 1
        self.lease = copy.deepcopy(manifest)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
