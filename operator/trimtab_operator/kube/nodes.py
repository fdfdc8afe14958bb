"""List of the cluster's nodes, shared by concurrent callers: in a large cluster the list is long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from trimtab_operator.kube.client import API_ERRORS, Cluster, is_forbidden
from trimtab_operator.resource.manifest import Manifest

logger = logging.getLogger(__name__)

FRESH_SECONDS = 60.0  # GPU capacity seldom changes


class Nodes:
    """Cached list of nodes."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._read_at: float | None = None
        self._nodes: tuple[Manifest, ...] | None = ()
        self._reading: asyncio.Task[None] | None = None

    async def list_nodes(self, *, fresh_seconds: float = FRESH_SECONDS) -> tuple[Manifest, ...] | None:
        """Return all nodes, at most `fresh_seconds` old. None if the operator has no permission to list them
        (namespaced installation).
        """
        if self._reading is None and (self._read_at is None or self._clock() - self._read_at >= fresh_seconds):
            self._reading = asyncio.create_task(self._read(), name="nodes")
        if self._reading is not None:  # shared by all callers; it completes even if they are cancelled
            await asyncio.shield(self._reading)
        return self._nodes

    async def _read(self) -> None:
        began = self._clock()
        try:
            self._nodes = await self._list()
            self._read_at = began
        finally:
            self._reading = None

    async def _list(self) -> tuple[Manifest, ...] | None:
        try:
            return tuple(await self._cluster.list("Node", None))
        except API_ERRORS as error:
            if not is_forbidden(error):
                raise
            if self._nodes is not None:  # logged once
                logger.warning(
                    "nodes cannot be listed (no permission): replicas on lost nodes are replaced only after "
                    "Kubernetes deletes their pods"
                )
            return None
