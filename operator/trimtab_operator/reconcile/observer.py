"""One look at a resource: everything that a turn decides by, read once.

First the resource and its children, then, all at once, what `questions_of` finds worth asking beyond them: nodes, the
groups of other resources, Events, engines. The resource and its children come from the cache where there is one; what
is to be done by it is confirmed first (`confirmed`): ADR-0034.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from trimtab_operator.builders.admin_token import admin_token
from trimtab_operator.builders.labels import DEPLOYMENT_LABEL, GROUP_LABEL, MANAGED_BY
from trimtab_operator.engines.poller import Engines
from trimtab_operator.engines.prometheus import Prometheus
from trimtab_operator.errors import Gone
from trimtab_operator.kube.client import API_ERRORS, Cluster, is_forbidden
from trimtab_operator.kube.informer_cache import Cache, Owner
from trimtab_operator.kube.nodes import Nodes
from trimtab_operator.observed.groups import is_terminating
from trimtab_operator.observed.missing_pods import FAILED_CREATE
from trimtab_operator.planning.snapshot import ClusterSnapshot, parse_resource, plan_extra_reads
from trimtab_operator.planning.state import ReconcilerState
from trimtab_operator.reconcile.gpu_claims import Stakes
from trimtab_operator.resource.installation import Installation
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import KIND, InferenceDeployment
from trimtab_operator.resource.validation_error import ValidationError
from trimtab_operator.rollout.gang_placement import Age, ages_of_partly_placed

CONFIRMATIONS = 3  # before the API server is asked for all: a cache that lags has caught up by then
CATCH_UP_SECONDS = 0.1
MAX_LIVE_LOOKS = 8  # that ask the API server at once: with a thousand resources the lists of all would smother it
ALL_GROUPS = f"app.kubernetes.io/managed-by={MANAGED_BY},{DEPLOYMENT_LABEL},{GROUP_LABEL}"


@dataclass(frozen=True, slots=True)
class Key:
    """Which resource: a namesake that was created meanwhile has another uid."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


_Read = tuple[Manifest, tuple[InferenceDeployment, tuple[ValidationError, ...]]]


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
    cache: Cache | None = None
    gpu_claims: Stakes | None = None
    """None: there is no GPU budget."""
    _live: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LIVE_LOOKS))
    _read: dict[Owner, _Read] = field(default_factory=dict)
    """What of the cache was read last, of each resource."""

    async def look(
        self, key: Key, state: ReconcilerState, engines: Engines, *, believes_last_words: bool = False
    ) -> ClusterSnapshot:
        """See the resource, its children, its engines and what else matters now. Raises Gone. Who
        `believes_last_words` does not wait for an engine that has just spoken."""
        snapshot = await self.glance(key)
        asked = plan_extra_reads(snapshot.deployment, snapshot.children, state, now=snapshot.at)
        nodes, partly_placed, refused, said = await asyncio.gather(
            self._nodes(asked.nodes_fresh_seconds),
            self._rivals() if asked.partly_placed else _nothing(),
            self._refused_creations(key.namespace) if asked.failed_creations else _nothing(),
            engines.look(asked.engines, snapshot.tokens, asked.metrics, believes_last_words=believes_last_words),
        )
        return replace(
            self.with_stakes(key, snapshot),
            at=self.clock(),
            engines=said,
            nodes=nodes,
            partly_placed=partly_placed,
            failed_creations=refused,
        )

    def with_stakes(self, key: Key, snapshot: ClusterSnapshot) -> ClusterSnapshot:
        """The same world, with what other resources ask for and hold of the GPU budget now."""
        if self.gpu_claims is None:
            return snapshot
        return replace(snapshot, gpu_claims=self.gpu_claims.of_others(key.namespace, key.name))

    def forget(self, key: Key) -> None:
        """Drop what is expected of a resource that is gone."""
        if self.cache is not None:
            self.cache.forget((key.namespace, key.name))
            self.cache.discard(KIND, (key.namespace, key.name), key.uid)
        self._read.pop((key.namespace, key.name), None)
        if self.gpu_claims is not None:
            self.gpu_claims.forget(key.namespace, key.name)

    def unanswered(self, key: Key) -> int | None:
        """The generation of a spec of which no status speaks yet, as far as watches have told; None: there is none."""
        body = None if self.cache is None else next(iter(self.cache.of(KIND, (key.namespace, key.name))), None)
        if body is None:
            return None
        asked, answered = body["metadata"].get("generation"), (body.get("status") or {}).get("observedGeneration")
        return None if asked == answered else asked

    async def resource(self, key: Key) -> InferenceDeployment:
        """See the resource alone. Raises Gone."""
        return self._world(key, await self._body(key)).deployment

    async def _body(self, key: Key) -> Manifest:
        return _expected(await self.cluster.get(KIND, key.namespace, key.name), key)

    async def glance(self, key: Key) -> ClusterSnapshot:
        """See the resource and its children alone. Raises Gone."""
        return await self._remembered(key) or await self._asked(key)

    async def _asked(self, key: Key) -> ClusterSnapshot:
        """The same from the API server."""
        async with self._live:
            body = await self._body(key)
            snapshot = self._world(key, body)
            return replace(snapshot, children=await self.cluster.observe(snapshot.deployment), live_resource=body)

    async def _remembered(self, key: Key) -> ClusterSnapshot | None:
        """The same from the cache; None where it does not say enough, or has not heard of our own writes."""
        owner = key.namespace, key.name
        if self.cache is None or not self.cache.is_heard(KIND, key.namespace) or not await self.cache.settled(owner):
            return None
        body = next(iter(self.cache.of(KIND, owner)), None)
        if body is None or body["metadata"]["uid"] != key.uid:
            return None  # a loop ends by what the API server says alone
        snapshot = self._world(key, _expected(body, key))
        children = await self.cluster.recall(snapshot.deployment, self.cache)
        return None if children is None else replace(snapshot, children=children, cached_resource=body)

    async def confirmed(self, key: Key, snapshot: ClusterSnapshot, grounds: Iterable[Manifest]) -> ClusterSnapshot:
        """The same world, if the `grounds` are still as they are known; else one that is confirmed as a whole, beside
        what the engines said: by what the cache has heard meanwhile, or by what the API server says. Raises Gone.

        As a whole means the resource, its StatefulSets and their pods: who goes and who stays depends on them. Other
        children are written over with what the spec asks for, whatever they are.
        """
        if await self.cluster.are_current(grounds):
            return snapshot
        for _ in range(CONFIRMATIONS - 1 if snapshot.cached_resource is not None else 0):
            await asyncio.sleep(CATCH_UP_SECONDS)
            known = await self._remembered(key)
            if known is None or known.cached_resource is None:
                break
            if await self.cluster.are_current(
                (known.cached_resource, *known.children.stateful_sets, *known.children.pods)
            ):
                return _beside_the_same(known, snapshot)
        return _beside_the_same(await self._asked(key), snapshot)

    def _world(self, key: Key, body: Manifest) -> ClusterSnapshot:
        """What the resource itself says; its children are still to be read."""
        deployment, parse_errors = self._as_read(key, body)
        token = admin_token(self.secret, key.uid)
        former = None if self.former_secret is None else admin_token(self.former_secret, key.uid)
        return ClusterSnapshot(
            self.clock(),
            deployment,
            token,
            parse_errors=parse_errors,
            tick_seconds=self.tick_seconds,
            former_token=former,
            installation=self.installation,
            sample_seconds=self._sample_seconds(deployment),
        )

    def _as_read(self, key: Key, body: Manifest) -> tuple[InferenceDeployment, tuple[ValidationError, ...]]:
        """The resource; one that the cache still has as it was is not read again."""
        last = self._read.get((key.namespace, key.name))
        if last is not None and last[0] is body:
            return last[1]
        found = parse_resource(
            body, default_image=self.default_image, allowed_privileges=self.installation.allowed_privileges
        )
        if self.cache is not None:
            self._read[key.namespace, key.name] = body, found
        return found

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
        fields = f"involvedObject.kind=StatefulSet,reason={FAILED_CREATE}"
        try:
            return tuple(await self.cluster.list("Event", namespace, fields=fields))
        except API_ERRORS as error:
            if not is_forbidden(error):
                raise
            return ()


def _beside_the_same(snapshot: ClusterSnapshot, seen: ClusterSnapshot) -> ClusterSnapshot:
    """A world with what was seen beside the children: engines tell of each request once."""
    return replace(
        snapshot,
        engines=seen.engines,
        nodes=seen.nodes,
        partly_placed=seen.partly_placed,
        gpu_claims=seen.gpu_claims,
        failed_creations=seen.failed_creations,
    )


def _expected(body: Manifest | None, key: Key) -> Manifest:
    """The resource that is meant. Raises Gone where that is no more, or about to be."""
    if body is None or body["metadata"]["uid"] != key.uid or is_terminating(body):
        raise Gone
    return body


async def _nothing() -> None:
    return None
