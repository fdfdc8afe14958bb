"""Observation of one resource: all inputs of one reconcile iteration, read once.

The resource and its children are read first. Then `plan_extra_reads` selects the additional reads, which run
concurrently: nodes, the groups of other resources, Events and engines. The resource and its children come from the
informer cache if it is synced; the preconditions of a plan are revalidated (`revalidate`) before it is applied:
ADR-0034.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from trimtab_operator.builders.admin_token import admin_token
from trimtab_operator.builders.labels import DEPLOYMENT_LABEL, GROUP_LABEL, MANAGED_BY
from trimtab_operator.engines.poller import EnginePoller
from trimtab_operator.engines.prometheus import Prometheus
from trimtab_operator.engines.router_client import RouterPoller
from trimtab_operator.errors import Gone
from trimtab_operator.kube.client import API_ERRORS, Cluster, is_forbidden
from trimtab_operator.kube.informer_cache import Cache, Owner
from trimtab_operator.kube.nodes import Nodes
from trimtab_operator.observed.groups import groups_of, is_terminating
from trimtab_operator.observed.router import RouterReport, router_targets
from trimtab_operator.observed.start_errors import SCALE_UP_REASONS, START_REASONS
from trimtab_operator.planning.snapshot import ClusterSnapshot, parse_resource, plan_extra_reads
from trimtab_operator.planning.state import ReconcilerState
from trimtab_operator.reconcile.gpu_claims import GpuClaims
from trimtab_operator.resource.installation import Installation
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import KIND, InferenceDeployment, class_of
from trimtab_operator.resource.validation_error import ValidationError
from trimtab_operator.rollout.gang_placement import Age, ages_of_partly_placed

MAX_CACHE_REVALIDATIONS = 3  # before everything is read from the API server: a lagging cache has caught up by then
CATCH_UP_SECONDS = 0.1
MAX_LIVE_READS = 8  # concurrent: the list calls of a thousand resources would overload the API server
GROUP_SELECTOR = f"app.kubernetes.io/managed-by={MANAGED_BY},{DEPLOYMENT_LABEL},{GROUP_LABEL}"


@dataclass(frozen=True, slots=True)
class Key:
    """Identity of a resource. The uid distinguishes it from a later resource with the same name."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


_ParsedResource = tuple[Manifest, tuple[InferenceDeployment, tuple[ValidationError, ...]]]


@dataclass(frozen=True, slots=True)
class ClusterObserver:
    """Observer shared by all reconcile loops. Admin tokens are derived from `secret`, and before a rotation from
    `former_secret`.
    """

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
    gpu_claims: GpuClaims | None = None
    """None if there is no GPU budget."""
    _live_reads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LIVE_READS))
    _parsed: dict[Owner, _ParsedResource] = field(default_factory=dict)
    """The last cached object of each resource, and its parsed form."""

    async def observe(
        self,
        key: Key,
        state: ReconcilerState,
        engines: EnginePoller,
        routers: RouterPoller,
        *,
        allow_stale_engine_status: bool = False,
    ) -> ClusterSnapshot:
        """Return a snapshot of the resource, its children, its engines, its router and the additional reads.

        With `allow_stale_engine_status`, engines that reported a fresh idle status are not polled again.

        Raises:
            Gone: The resource was deleted or is being deleted.
        """
        snapshot = await self.read_resource(key)
        extra = plan_extra_reads(snapshot.deployment, snapshot.children, state, now=snapshot.at)
        nodes, partly_placed, failed, observations = await asyncio.gather(
            self._nodes(extra.nodes_fresh_seconds),
            self._partly_placed_ages() if extra.partly_placed else _no_result(),
            self._failed_creations(key.namespace) if extra.failed_creations else _no_result(),
            engines.poll(
                extra.engines, snapshot.tokens, extra.metrics, allow_stale_engine_status=allow_stale_engine_status
            ),
        )
        return replace(
            self.with_gpu_claims(key, snapshot),
            at=self.clock(),
            engines=observations,
            nodes=nodes,
            partly_placed=partly_placed,
            failed_creations=failed,
            routers=_follow_routers(snapshot, routers),
        )

    def with_gpu_claims(self, key: Key, snapshot: ClusterSnapshot) -> ClusterSnapshot:
        """Return the snapshot with the current GPU claims of other resources."""
        if self.gpu_claims is None:
            return snapshot
        return replace(snapshot, gpu_claims=self.gpu_claims.other_claims(key.namespace, key.name))

    def forget(self, key: Key) -> None:
        """Drop the state of a deleted resource."""
        if self.cache is not None:
            self.cache.forget((key.namespace, key.name))
            self.cache.discard(KIND, (key.namespace, key.name), key.uid)
        self._parsed.pop((key.namespace, key.name), None)
        if self.gpu_claims is not None:
            self.gpu_claims.forget(key.namespace, key.name)

    def pending_generation(self, key: Key) -> int | None:
        """Return the generation of a spec that no status reports as observed yet, according to the cache. None if
        there is none.
        """
        body = None if self.cache is None else next(iter(self.cache.of(KIND, (key.namespace, key.name))), None)
        if body is None:
            return None
        extra, answered = body["metadata"].get("generation"), (body.get("status") or {}).get("observedGeneration")
        return None if extra == answered else extra

    async def get_deployment(self, key: Key) -> InferenceDeployment:
        """Return the resource only, from the API server.

        Raises:
            Gone: The resource was deleted or is being deleted.
        """
        return self._snapshot(key, await self._body(key)).deployment

    async def _body(self, key: Key) -> Manifest:
        return self._require_current(await self.cluster.get(KIND, key.namespace, key.name), key)

    async def read_resource(self, key: Key) -> ClusterSnapshot:
        """Return a snapshot of the resource and its children only.

        Raises:
            Gone: The resource was deleted or is being deleted.
        """
        return await self._read_cached(key) or await self._read_live(key)

    async def _read_live(self, key: Key) -> ClusterSnapshot:
        """Read the resource and its children from the API server."""
        async with self._live_reads:
            body = await self._body(key)
            snapshot = self._snapshot(key, body)
            return replace(snapshot, children=await self.cluster.list_children(snapshot.deployment), live_resource=body)

    async def _read_cached(self, key: Key) -> ClusterSnapshot | None:
        """Read the resource and its children from the cache. None if the cache is not synced or lags behind the
        writes of this process.
        """
        owner = key.namespace, key.name
        if (
            self.cache is None
            or not self.cache.is_synced(KIND, key.namespace)
            or not await self.cache.wait_until_settled(owner)
        ):
            return None
        body = next(iter(self.cache.of(KIND, owner)), None)
        if body is None or body["metadata"]["uid"] != key.uid:
            return None  # only the API server decides that a loop ends
        snapshot = self._snapshot(key, self._require_current(body, key))
        children = await self.cluster.cached_children(snapshot.deployment, self.cache)
        return None if children is None else replace(snapshot, children=children, cached_resource=body)

    async def revalidate(
        self, key: Key, snapshot: ClusterSnapshot, preconditions: Iterable[Manifest]
    ) -> ClusterSnapshot:
        """Return the same snapshot if the preconditions still hold, else a new snapshot that is consistent as a whole.

        The new snapshot comes from the cache after it caught up, or else from the API server. It covers the resource,
        its StatefulSets and their pods, because deletions depend on all of them. Other children are overwritten with
        the desired state in any case. Engine observations are taken over, because engines report each request once.

        Raises:
            Gone: The resource was deleted or is being deleted.
        """
        if await self.cluster.are_current(preconditions):
            return snapshot
        for _ in range(MAX_CACHE_REVALIDATIONS - 1 if snapshot.cached_resource is not None else 0):
            await asyncio.sleep(CATCH_UP_SECONDS)
            known = await self._read_cached(key)
            if known is None or known.cached_resource is None:
                break
            if await self.cluster.are_current(
                (known.cached_resource, *known.children.stateful_sets, *known.children.pods)
            ):
                return _with_observations(known, snapshot)
        return _with_observations(await self._read_live(key), snapshot)

    def _require_current(self, body: Manifest | None, key: Key) -> Manifest:
        """Return the resource.

        Raises:
            Gone: It is missing, is being deleted, or has another uid or another class.
        """
        if body is None or body["metadata"]["uid"] != key.uid or is_terminating(body):
            raise Gone
        if class_of(body) != self.installation.operator_class:
            raise Gone
        return body

    def _snapshot(self, key: Key, body: Manifest) -> ClusterSnapshot:
        """Return a snapshot of the resource only; its children are added later."""
        deployment, parse_errors = self._parse(key, body)
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

    def _parse(self, key: Key, body: Manifest) -> tuple[InferenceDeployment, tuple[ValidationError, ...]]:
        """Parse the resource. The result is reused while the cache holds the same object."""
        last = self._parsed.get((key.namespace, key.name))
        if last is not None and last[0] is body:
            return last[1]
        found = parse_resource(
            body, default_image=self.default_image, allowed_privileges=self.installation.allowed_privileges
        )
        if self.cache is not None:
            self._parsed[key.namespace, key.name] = body, found
        return found

    def _sample_seconds(self, deployment: InferenceDeployment) -> float:
        """Return the interval at which metrics change at their source. 0 means at each poll."""
        if self.prometheus is None or deployment.spec.metrics.source == "Pods":
            return 0.0
        return self.prometheus.connection.scrape_seconds

    async def _nodes(self, fresh_seconds: float | None) -> tuple[Manifest, ...] | None:
        return () if fresh_seconds is None else await self.nodes.list_nodes(fresh_seconds=fresh_seconds)

    async def _partly_placed_ages(self) -> tuple[Age, ...] | None:
        """Return the ages of all partly placed groups in the cluster. None if the operator has no permission to list
        them.
        """
        try:
            sets, pods = await asyncio.gather(
                self.cluster.list("StatefulSet", None, selector=GROUP_SELECTOR),
                self.cluster.list("Pod", None, selector=GROUP_SELECTOR),
            )
        except API_ERRORS as error:
            if not is_forbidden(error):
                raise
            return None
        return ages_of_partly_placed(sets, pods)

    async def _failed_creations(self, namespace: str) -> tuple[Manifest, ...]:
        """Return the Events about pods that are not created or do not start. Empty if the operator has no permission to
        list Events.
        """
        fields = [f"reason={reason}" for reason in (*START_REASONS, *SCALE_UP_REASONS)]
        try:
            found = await asyncio.gather(*(self.cluster.list("Event", namespace, fields=each) for each in fields))
            return tuple(event for events in found for event in events)
        except API_ERRORS as error:
            if not is_forbidden(error):
                raise
            return ()


def _with_observations(snapshot: ClusterSnapshot, seen: ClusterSnapshot) -> ClusterSnapshot:
    """Return the new snapshot with everything but the children taken from the earlier one: engines report each
    request once.
    """
    return replace(
        snapshot,
        engines=seen.engines,
        nodes=seen.nodes,
        partly_placed=seen.partly_placed,
        gpu_claims=seen.gpu_claims,
        failed_creations=seen.failed_creations,
        routers=seen.routers,
    )


def _follow_routers(snapshot: ClusterSnapshot, routers: RouterPoller) -> Mapping[str, RouterReport]:
    """Return the last reports of the running router pods, which are polled from now on."""
    has_replica = any(group.serves for group in groups_of(snapshot.children))
    return routers.follow(router_targets(snapshot.children.router_pods), snapshot.tokens, has_replica=has_replica)


async def _no_result() -> None:
    return None
