"""The cluster's nodes, read once for all who ask at about the same time: in a large cluster they are a long list."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from trimtab_operator.kube.client import API_ERRORS, Cluster, is_forbidden
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
        self._reading: asyncio.Task[None] | None = None

    async def present(self, *, fresh_seconds: float = FRESH_SECONDS) -> tuple[Manifest, ...] | None:
        """All nodes as they were at most `fresh_seconds` ago; None when the operator has no right to see them (it was
        installed for some namespaces)."""
        if self._reading is None and (self._read_at is None or self._clock() - self._read_at >= fresh_seconds):
            self._reading = asyncio.create_task(self._read(), name="nodes")
        if self._reading is not None:  # it serves all who ask meanwhile, and the next one where they went
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
            if self._nodes is not None:  # said once
                logger.warning(
                    "nodes cannot be listed: replicas on lost nodes wait until Kubernetes deletes their pods"
                )
            return None
