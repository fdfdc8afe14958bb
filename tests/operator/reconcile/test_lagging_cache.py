"""Lagging cache: with any lag per kind, the operator converges like one with a current cache.

Its own writes are always visible, because observations wait for them (tests/operator/kube/test_informer_cache.py).
"""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any, cast

import pytest
from coming_to_rest import come_to_rest, end_state
from operator_builders import a_spec
from operator_cluster import BROKEN, FakeCluster, FakeEnginePoller, Killed, a_loop, a_reconciler
from trimtab_operator.builders.admin_token import Tokens
from trimtab_operator.kube.client import CHILDREN, Cluster
from trimtab_operator.kube.informer_cache import Cache
from trimtab_operator.observed.actions import Apply
from trimtab_operator.observed.engines import EngineObservation, EngineTarget, MetricsSettings
from trimtab_operator.observed.groups import ObservedChildren
from trimtab_operator.reconcile.reconciler import ReconcileLoop, Reconciler
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import KIND, InferenceDeployment

SHARE = 0.02
BATCHES = 2
ROUNDS = 20
QUICK = {"startTimeout": "20s", "drainTimeout": "1s", "bakeTime": "0s"}
LAYOUTS: tuple[dict[str, Any], ...] = ({}, {}, {"pipeline": 2, "gpusPerNode": 1})


class LaggingCache:
    """Cache that has received each kind up to some moment, and all own writes."""

    def __init__(self, cluster: FakeCluster, chance: random.Random) -> None:
        self.cluster, self.chance = cluster, chance
        self.moments = [self._now()]
        self.heard = dict.fromkeys((KIND, *CHILDREN), 0)

    def _now(self) -> dict[str, list[Manifest]]:
        cluster = self.cluster
        found: dict[str, list[Manifest]] = {kind: [] for kind in (KIND, *CHILDREN)}
        found[KIND] = [] if cluster.body is None else [versioned(KIND, cluster.body)]
        found["Pod"] = [versioned("Pod", pod) for _, pod in sorted(cluster.pods.items())]
        for (kind, _), made in sorted(cluster.objects.items()):
            if kind in found:
                found[kind].append(versioned(kind, made))
        return found

    def hear(self, *kinds: str) -> None:
        """Advance time. These kinds become current, all others get a random lag."""
        self.moments.append(self._now())
        last = len(self.moments) - 1
        for kind, before in self.heard.items():
            self.heard[kind] = (
                last if kind in kinds else self.chance.choice((before, self.chance.randint(before, last)))
            )

    def is_synced(self, _kind: str, _namespace: str) -> bool:
        return True

    async def wait_until_settled(self, _owner: tuple[str, str]) -> bool:
        return True

    def of(self, kind: str, _owner: tuple[str, str]) -> tuple[Manifest, ...]:
        return tuple(self.moments[self.heard[kind]][kind])


class LaggingDoor:
    """API client of an operator with a lagging cache. Its writes arrive at once."""

    def __init__(self, cluster: FakeCluster, cache: LaggingCache) -> None:
        self.cluster, self.known = cluster, cache
        self.confirmed: list[set[str]] = []
        """What was confirmed, each time: names, the resource's own among them."""
        self.refused = 0

    async def get(self, _kind: str, _namespace: str | None, _name: str) -> Manifest | None:
        return self.cluster.body and copy.deepcopy(self.cluster.body)

    async def list_children(self, _deployment: InferenceDeployment) -> ObservedChildren:
        return self.cluster.children()

    async def list(self, kind: str, namespace: str | None, **options: Any) -> list[Manifest]:
        return await self.cluster.list(kind, namespace, **options)

    async def cached_children(self, _deployment: InferenceDeployment, _cache: object) -> ObservedChildren:
        found = {kind: self.known.of(kind, ("n", "m")) for kind in CHILDREN}
        return ObservedChildren(
            services=found["Service"],
            stateful_sets=found["StatefulSet"],
            config_maps=found["ConfigMap"],
            pods=found["Pod"],
            jobs=found["Job"],
            accounts=found["ServiceAccount"],
            secrets=self.cluster.children().secrets,
        )

    async def are_current(self, grounds: Iterable[Manifest]) -> bool:
        manifests = list(grounds)
        present = {
            (kind, made["metadata"]["name"]): made["metadata"]["resourceVersion"]
            for kind, found in self.known._now().items()
            for made in found
        }
        self.confirmed.append({made["metadata"]["name"] for made in manifests})
        is_so = all(
            present.get((m["kind"], m["metadata"]["name"])) == m["metadata"]["resourceVersion"] for m in manifests
        )
        self.refused += not is_so
        return is_so

    async def apply(self, manifest: Manifest, _owner: InferenceDeployment, *, is_new: bool) -> None:
        is_missing = (manifest["kind"], manifest["metadata"]["name"]) not in self.cluster.objects
        self.cluster.apply_now(Apply(manifest, is_missing, "", manifest))
        self.known.hear(manifest["kind"])

    async def delete(
        self, kind: str, _namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> None:
        present = self.cluster.pods.get(name) if kind == "Pod" else self.cluster.objects.get((kind, name))
        if present is not None and present["metadata"].get("uid", "") == uid:
            self.cluster.delete_now(kind, name, uid, grace_seconds)
            self.known.hear(kind)

    async def apply_status(self, _deployment: InferenceDeployment, status: Any) -> Any:
        self.cluster.write_status(status)
        self.known.hear(KIND)
        return self.cluster.status

    async def event(
        self, deployment: InferenceDeployment, *, kind: str, reason: str, message: str, now: datetime, key: str
    ) -> None:
        await self.cluster.event(deployment, kind=kind, reason=reason, message=message, now=now, key=key)


class EnginesThatAreThere(FakeEnginePoller):
    """Poller in which deleted pods do not respond."""

    async def poll(
        self,
        targets: Iterable[EngineTarget],
        tokens: Tokens,
        asked: MetricsSettings | None = None,
        *,
        allow_stale_engine_status: bool = False,
    ) -> dict[str, EngineObservation]:
        there = {pod["metadata"]["uid"] for pod in self.cluster.pods.values()}
        wanted = list(targets)
        said = await super().poll([target for target in wanted if target.instance in there], tokens, asked)
        return {target.group: said.get(target.group, EngineObservation(target.ready, "no answer")) for target in wanted}


def versioned(kind: str, made: Any) -> Manifest:
    """Return a copy with a resourceVersion derived from the content."""
    found: dict[str, Any] = {"kind": kind, **json.loads(json.dumps(made, default=str))}
    found["metadata"]["resourceVersion"] = str(hash(json.dumps(made, sort_keys=True, default=str)))
    return found


def lagging(cluster: FakeCluster, chance: random.Random) -> tuple[Reconciler, ReconcileLoop, LaggingDoor]:
    """Return an operator with a cache that lags from now on."""
    known = LaggingCache(cluster, chance)
    door, live = LaggingDoor(cluster, known), a_reconciler(cluster)
    observer = replace(live.observer, cluster=cast("Cluster", door), cache=cast("Cache", known))
    executor = replace(live.executor, cluster=cast("Cluster", door))
    return replace(live, observer=observer, executor=executor), a_loop(cluster, EnginesThatAreThere(cluster)), door


async def ticks(
    cluster: FakeCluster, chance: random.Random, operator: tuple[Reconciler, ReconcileLoop, LaggingDoor]
) -> None:
    """Run ticks with a lagging cache, then until idle with a current one."""
    reconciler, loop, door = operator
    for _ in range(chance.randrange(ROUNDS)):
        await reconciler.tick(loop)
        cluster.now += 5.0
        if chance.random() < 0.7:
            cluster.controllers()
        door.known.hear()
    for _ in range(ROUNDS):
        door.known.hear(KIND, *CHILDREN)
        before = cluster.writes
        await come_to_rest(cluster, CatchingUp(reconciler, door), loop)  # type: ignore[arg-type]
        if cluster.writes == before:
            return


class CatchingUp:
    """Reconciler whose cache becomes current before each tick."""

    def __init__(self, reconciler: Reconciler, door: LaggingDoor) -> None:
        self.reconciler, self.door = reconciler, door

    async def tick(self, loop: ReconcileLoop) -> float:
        self.door.known.hear(KIND, *CHILDREN)
        return await self.reconciler.tick(loop)


def a_world(chance: random.Random) -> FakeCluster:
    """Return an idle cluster."""
    spec = a_spec(
        runtime={"device": "cpu", "image": "engine:1"},
        rollout={**QUICK, "maxSurge": chance.choice((0, 1))},
        parallelism=chance.choice(LAYOUTS),
        tuning={"mode": chance.choice(("Off", "Auto"))},
    )
    cluster = FakeCluster(replicas=chance.randrange(1, 4), **spec)
    cluster.settle()
    return cluster


def disturb(cluster: FakeCluster, chance: random.Random) -> None:
    """Apply a random edit or external change."""
    kind = chance.choice(("scale", "edit", "edit", "break", "lose a child", "lose a pod"))
    if kind == "scale":
        cluster.edit(replicas=chance.randrange(4))
    elif kind == "edit":
        cluster.edit(runtime={"device": "cpu", "image": "engine:1", "args": [f"--seed={chance.randrange(3)}"]})
    elif kind == "break":
        cluster.edit(runtime={"device": "cpu", "image": "engine:1", "args": [BROKEN]})
    elif kind == "lose a child":
        del cluster.objects[chance.choice(sorted(cluster.objects))]
    elif cluster.pods:
        del cluster.pods[chance.choice(sorted(cluster.pods))]


@pytest.mark.parametrize("batch", range(BATCHES))
async def test_lagging_cache_converges_like_current_one(batch: int, worlds: int) -> None:
    refused, count = 0, int(SHARE * worlds) // BATCHES
    for seed in range(batch * count, (batch + 1) * count):
        chance = random.Random(seed)
        seeing = a_world(chance)
        blinking = pickle.loads(pickle.dumps(seeing))
        operator = lagging(blinking, chance)
        for cluster in (seeing, blinking):
            disturb(cluster, random.Random(seed))
        await come_to_rest(seeing, a_reconciler(seeing), a_loop(seeing))
        await ticks(blinking, chance, operator)
        assert end_state(blinking) == end_state(seeing), f"seed {seed}"
        refused += operator[2].refused
    assert refused > 0, "the cache never lagged when it mattered"


async def test_idle_observation_sends_no_requests() -> None:
    chance = random.Random(0)
    cluster = a_world(chance)
    reconciler, loop, door = lagging(cluster, chance)
    cluster.writes = 0
    for _ in range(5):
        await reconciler.tick(loop)
        door.known.hear()
    assert cluster.writes == 0
    assert door.confirmed == []


async def test_deletions_revalidate_remaining_objects() -> None:
    cluster = FakeCluster(replicas=1, rollout={**QUICK, "maxSurge": 1})
    cluster.settle()
    reconciler, loop, door = lagging(cluster, random.Random(0))
    replay_idle_period = CatchingUp(reconciler, door)
    cluster.edit(runtime={"device": "cpu", "image": "engine:1", "args": ["--seed=1"]})
    await replay_idle_period.tick(loop)
    assert [group.ordinal for group in cluster.groups] == [0, 1]
    assert door.confirmed == []
    cluster.now += 5.0
    cluster.controllers()
    for _ in range(3):
        await replay_idle_period.tick(loop)
        cluster.now += 5.0
        cluster.controllers()
    assert [group.ordinal for group in cluster.groups] == [1]
    assert door.confirmed == [{"m", "m-g1", "m-g1-0"}]


class Scribe(LaggingDoor):
    """API client that records its writes: verbs and kinds, Event reasons, status phases."""

    def __init__(self, cluster: FakeCluster, cache: LaggingCache) -> None:
        super().__init__(cluster, cache)
        self.written: list[str] = []

    async def apply(self, manifest: Manifest, owner: InferenceDeployment, *, is_new: bool) -> None:
        self.written.append(f"apply {manifest['kind']}")
        await super().apply(manifest, owner, is_new=is_new)

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None) -> None:
        self.written.append(f"delete {kind}")
        await super().delete(kind, namespace, name, uid=uid, grace_seconds=grace_seconds)

    async def apply_status(self, deployment: InferenceDeployment, status: Any) -> Any:
        self.written.append(f"status {status['phase']}")
        return await super().apply_status(deployment, status)

    async def event(
        self, deployment: InferenceDeployment, *, kind: str, reason: str, message: str, now: datetime, key: str
    ) -> None:
        self.written.append(reason)
        await super().event(deployment, kind=kind, reason=reason, message=message, now=now, key=key)


async def rolled(*, lives: int | None) -> tuple[FakeCluster, list[str]]:
    """Return a cluster after an edit, and the writes of the operator, and of its successor if it is killed after a
    number of writes.
    """
    cluster = FakeCluster(replicas=1, rollout={**QUICK, "maxSurge": 1})
    cluster.settle()
    cluster.edit(runtime={"device": "cpu", "image": "engine:1", "args": ["--seed=1"]})
    door = Scribe(cluster, LaggingCache(cluster, random.Random(0)))
    live = a_reconciler(cluster)
    observer = replace(live.observer, cluster=cast("Cluster", door), cache=cast("Cache", door.known))
    reconciler = CatchingUp(
        replace(live, observer=observer, executor=replace(live.executor, cluster=cast("Cluster", door))), door
    )
    loop, cluster.lives = a_loop(cluster), lives
    for _ in range(8):
        try:
            await reconciler.tick(loop)
        except Killed:
            loop, cluster.lives = a_loop(cluster), None
        cluster.now += 5.0
        cluster.controllers()
    return cluster, door.written


async def test_single_replica_edit_takes_eight_writes() -> None:
    _, written = await rolled(lives=None)
    assert written == [
        *("apply StatefulSet", "ReplicaCreated", "status RollingOut"),
        *("apply ConfigMap", "delete StatefulSet", "ReplicaRemoved"),
        *("status Ready", "ReplicasReady"),
    ]


@pytest.mark.parametrize("lives", range(1, 9))
async def test_deferred_status_is_written_by_next_tick(lives: int) -> None:
    undisturbed, _ = await rolled(lives=None)
    cluster, _ = await rolled(lives=lives)
    assert end_state(cluster) == end_state(undisturbed)
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.condition("Progressing")["status"] == "False"
    assert cluster.status["observedGeneration"] == cluster.deployment.generation
