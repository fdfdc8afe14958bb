"""The cluster's nodes, read once for all who ask at about the same time: in a large cluster they are a long list."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from trimtab_operator.edge.cluster import API_ERRORS, Cluster, is_forbidden
from trimtab_operator.resource.manifest import Manifest

logger = logging.getLogger(__name__)

FRESH_SECONDS = 60.0  # which GPUs there are seldom changes


class Nodes:
    """The latest list of nodes, read again when it is too old for who asks."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._read_at: float | None = None
        self._nodes: tuple[Manifest, ...] | None = ()
        self._one_at_a_time = asyncio.Lock()

    async def present(self, *, fresh_seconds: float = FRESH_SECONDS) -> tuple[Manifest, ...] | None:
        """All nodes as they were at most `fresh_seconds` ago; None when the operator has no right to see them (it was
        installed for some namespaces)."""
        async with self._one_at_a_time:  # who asks meanwhile is served by the list that is under way
            now = self._clock()
            if self._read_at is None or now - self._read_at >= fresh_seconds:
                self._nodes = await self._list()
                self._read_at = now
            return self._nodes

    async def _list(self) -> tuple[Manifest, ...] | None:
        try:
            return tuple(await self._cluster.list("Node", None))
        except API_ERRORS as error:
            if not is_forbidden(error):
                raise
            if self._nodes is not None:  # said once
                logger.warning(
                    "nodes cannot be listed: replicas on lost nodes wait until Kubernetes deletes their pods"
                )
            return None
