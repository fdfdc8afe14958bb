"""One look at a resource: everything that a turn decides by, read once.

First the resource and its children, then, all at once, what `questions_of` finds worth asking beyond them: nodes, the
groups of other resources, Events, engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from trimtab_operator.builders.admin_token import admin_token
from trimtab_operator.builders.labels import DEPLOYMENT_LABEL, GROUP_LABEL, MANAGED_BY
from trimtab_operator.decisions.memory import Memory
from trimtab_operator.decisions.placement import Age, ages_of_partly_placed
from trimtab_operator.decisions.world import World, as_read, questions_of
from trimtab_operator.edge.cluster import API_ERRORS, Cluster, is_forbidden
from trimtab_operator.edge.engines import Engines
from trimtab_operator.edge.nodes import Nodes
from trimtab_operator.edge.prometheus import Prometheus
from trimtab_operator.errors import Gone
from trimtab_operator.observed.groups import is_terminating
from trimtab_operator.observed.missing_pods import REFUSED_CREATION
from trimtab_operator.resource.installation import Installation
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import KIND, InferenceDeployment

ALL_GROUPS = f"app.kubernetes.io/managed-by={MANAGED_BY},{DEPLOYMENT_LABEL},{GROUP_LABEL}"


@dataclass(frozen=True, slots=True)
class Key:
    """Which resource: a namesake that was created meanwhile has another uid."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Eyes:
    """Look for all loops. `secret` is what admin tokens are derived from, `former_secret` what they were before."""

    cluster: Cluster
    nodes: Nodes
    secret: bytes
    default_image: str | None
    tick_seconds: float
    clock: Callable[[], float] = time.time
    former_secret: bytes | None = None
    installation: Installation = field(default_factory=Installation)
    prometheus: Prometheus | None = None

    async def look(self, key: Key, memory: Memory, engines: Engines) -> World:
        """See the resource, its children, its engines and what else matters now. Raises Gone."""
        world = await self.glance(key)
        asked = questions_of(world.deployment, world.children, memory, now=world.at)
        nodes, rivals, refused, said = await asyncio.gather(
            self._nodes(asked.nodes_fresh_seconds),
            self._rivals() if asked.rivals else _nothing(),
            self._refused_creations(key.namespace) if asked.refused_creations else _nothing(),
            engines.look(asked.engines, world.tokens, asked.metrics),
        )
        return replace(world, at=self.clock(), engines=said, nodes=nodes, rivals=rivals, refused_creations=refused)

    async def resource(self, key: Key) -> InferenceDeployment:
        """See the resource alone. Raises Gone."""
        return as_read(await self._body(key), default_image=self.default_image, powers=self.installation.powers)[0]

    async def _body(self, key: Key) -> Manifest:
        body = await self.cluster.get(KIND, key.namespace, key.name)
        if body is None or body["metadata"]["uid"] != key.uid or is_terminating(body):
            raise Gone
        return body

    async def glance(self, key: Key) -> World:
        """See the resource and its children alone. Raises Gone."""
        body = await self._body(key)
        deployment, misread = as_read(body, default_image=self.default_image, powers=self.installation.powers)
        children = await self.cluster.observe(deployment)
        token = admin_token(self.secret, key.uid)
        former = None if self.former_secret is None else admin_token(self.former_secret, key.uid)
        return World(
            self.clock(),
            deployment,
            token,
            children,
            misread=misread,
            tick_seconds=self.tick_seconds,
            former_token=former,
            installation=self.installation,
            sample_seconds=self._sample_seconds(deployment),
        )

    def _sample_seconds(self, deployment: InferenceDeployment) -> float:
        """How often metrics change where they are read; 0: with each look."""
        if self.prometheus is None or deployment.spec.metrics.source == "Pods":
            return 0.0
        return self.prometheus.connection.scrape_seconds

    async def _nodes(self, fresh_seconds: float | None) -> tuple[Manifest, ...] | None:
        return () if fresh_seconds is None else await self.nodes.present(fresh_seconds=fresh_seconds)

    async def _rivals(self) -> tuple[Age, ...] | None:
        """The ages of the groups of all resources that are partly placed; None without the right to see them."""
        try:
            sets, pods = await asyncio.gather(
                self.cluster.list("StatefulSet", None, selector=ALL_GROUPS),
                self.cluster.list("Pod", None, selector=ALL_GROUPS),
            )
        except API_ERRORS as error:
            if not is_forbidden(error):
                raise
            return None
        return ages_of_partly_placed(sets, pods)

    async def _refused_creations(self, namespace: str) -> tuple[Manifest, ...]:
        """The Events of StatefulSets whose pods the API server does not create; none without the right to read them."""
        fields = f"involvedObject.kind=StatefulSet,reason={REFUSED_CREATION}"
        try:
            return tuple(await self.cluster.list("Event", namespace, fields=fields))
        except API_ERRORS as error:
            if not is_forbidden(error):
                raise
            return ()


async def _nothing() -> None:
    return None
