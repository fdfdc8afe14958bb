"""The cluster's nodes, read at most once a minute for everybody who asks: in a large cluster they are a long list."""

from __future__ import annotations

import time
from collections.abc import Callable

from trimtab_operator.cluster import API_ERRORS, Cluster
from trimtab_operator.groups import Manifest

FRESH_SECONDS = 60.0
FORBIDDEN = 403


class Nodes:
    """What `present` answers is at most FRESH_SECONDS old."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._read_at: float | None = None
        self._nodes: tuple[Manifest, ...] | None = None

    async def present(self) -> tuple[Manifest, ...] | None:
        """All nodes; None when the operator has no right to see them (it was installed for some namespaces)."""
        now = self._clock()
        if self._read_at is None or now - self._read_at >= FRESH_SECONDS:
            self._nodes = await self._list()
            self._read_at = now
        return self._nodes

    async def _list(self) -> tuple[Manifest, ...] | None:
        try:
            return tuple(await self._cluster.list("Node", None))
        except API_ERRORS as error:
            if getattr(error, "status", None) != FORBIDDEN:
                raise
            return None
