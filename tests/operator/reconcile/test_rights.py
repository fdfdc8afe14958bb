"""Permissions: the chart's roles contain exactly what the operator needs in the lifecycle of a resource.

The operator's real API client runs against an in-memory cluster that enforces RBAC.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, cast

import aiohttp
import pytest
from guarded_cluster import Grant, GuardedDoor
from operator_builders import a_spec
from operator_cluster import FakeCluster, a_loop
from rendered_chart import HELM, NAMESPACE, NO_HELM, Manifest, render
from trimtab_operator.kube.client import OPTIONAL, RESOURCES
from trimtab_operator.kube.leader_election import LeaderLease
from trimtab_operator.kube.nodes import Nodes
from trimtab_operator.kube.watches import REQUIRED
from trimtab_operator.kube.webhook import Webhook
from trimtab_operator.observed.actions import Event
from trimtab_operator.reconcile.executor import Executor
from trimtab_operator.reconcile.health import Heartbeats, OperatorMetrics
from trimtab_operator.reconcile.observer import ClusterObserver
from trimtab_operator.reconcile.reconciler import ReconcileLoop, Reconciler
from trimtab_operator.reconcile.work_queue import WorkQueue
from trimtab_operator.resource.installation import (
    Alerts,
    Installation,
    NetworkAccess,
    PodMonitoring,
    RouterDefaults,
    RouterRole,
)
from trimtab_operator.resource.spec import GROUP, KIND, PLURAL
from trimtab_operator.resource.time import timestamp

pytestmark = pytest.mark.skipif(HELM is None, reason=NO_HELM)

TWO_PODS = {"pipeline": 2, "gpusPerNode": 1}
ROUTER = RouterDefaults(image="router:1", role=RouterRole(kind="ClusterRole", name="trimtab-router"))
EVERYTHING = Installation(NetworkAccess(operator={"podSelector": {}}), PodMonitoring(), Alerts(), router=ROUTER)
HELD_FOR_ROUTERS = {Grant("discovery.k8s.io", "endpointslices", verb) for verb in ("get", "list", "watch")}
"""What the operator grants to routers, and therefore must hold."""
WATCHED = {Grant(RESOURCES[kind][0], RESOURCES[kind][2], "watch") for kind in (*REQUIRED, *OPTIONAL)}
"""What Kopf and the cache do beside what the door is used for here."""


def granted(*settings: str) -> set[Grant]:
    """Return the permissions of the chart's roles."""
    roles = (made for made in render(*settings) if made["kind"] in ("Role", "ClusterRole"))
    return {grant for made in roles if not made["metadata"]["name"].endswith(("-view", "-edit")) for grant in _of(made)}


def _of(role: Manifest) -> Iterable[Grant]:
    namespace = role["metadata"].get("namespace")
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    for name in rule.get("resourceNames", [None]):
                        yield Grant(group, resource, verb, namespace, name)


def a_world(**spec: Any) -> FakeCluster:
    """Return a cluster that serves every kind, with a new resource."""
    runtime = {"device": "cuda", "image": "engine:1"}  # so that nodes matter
    quick = {"startTimeout": "30s", "drainTimeout": "1s"}
    made = a_spec(**{"runtime": runtime, "rollout": quick, "router": {}, **spec})
    cluster = FakeCluster(knows_the_model=False, **made)
    cluster.serves, cluster.installation = set(OPTIONAL), EVERYTHING
    return cluster


def a_reconciler_at(door: GuardedDoor) -> Reconciler:
    cluster = door.cluster
    clock = lambda: cluster.now  # noqa: E731 - the cluster's
    nodes = Nodes(door, clock)
    observer = ClusterObserver(
        door, nodes, cluster.secret, cluster.default_image, 15.0, clock, installation=cluster.installation
    )
    executor = Executor(door, OperatorMetrics(), clock)
    return Reconciler(
        observer, executor, cast("aiohttp.ClientSession", None), Heartbeats(max_age_seconds=60.0), WorkQueue()
    )


async def ticks(reconciler: Reconciler, loop: ReconcileLoop, number: int) -> None:
    """Run ticks, each followed by the cluster. Objects that are cached for a minute are read again."""
    door = cast("GuardedDoor", reconciler.observer.cluster)
    for _ in range(number):
        door._optional.clear()
        await reconciler.guarded_tick(loop)
        door.cluster.now += 5.0
        door.cluster.controllers()


async def lead(door: GuardedDoor) -> None:
    """Run the steps of a process before and after leading."""
    secret = {"key": b"k"}
    await door.get_or_create_secret(NAMESPACE, "trimtab-operator", secret)
    lease = LeaderLease(door, namespace=NAMESPACE, name="trimtab-operator", identity="a")
    await lease.try_acquire()
    await lease.try_acquire()
    await lease.release()


async def serve_the_webhook(door: GuardedDoor) -> None:
    name = f"{NAMESPACE}-trimtab"
    path = door._path("ValidatingWebhookConfiguration", None, name)
    door.others[path] = {"metadata": {"name": name}, "webhooks": [{"name": "w", "clientConfig": {}}]}
    webhook = Webhook(
        door,
        Nodes(door),
        namespace=NAMESPACE,
        service="trimtab-webhook",
        secret="trimtab-webhook",
        state_secret="trimtab",
        configuration=name,
        default_image=None,
    )
    await webhook.refresh()
    made = await door.get_or_create_secret(NAMESPACE, "trimtab-webhook", {})
    assert await door.replace_secret(NAMESPACE, "trimtab-webhook", made, {"ca.crt": b"of another service"})
    webhook._loaded = None
    await webhook.refresh()


async def names_are_taken(reconciler: Reconciler, loop: ReconcileLoop, keys: Iterable[tuple[str, str]]) -> None:
    """Create foreign objects of each of these kinds and names for one tick, one after the other."""
    door = cast("GuardedDoor", reconciler.observer.cluster)
    for kind, name in keys:
        ours = door.cluster.objects.pop((kind, name), None)
        door.cluster.objects[kind, name] = {"metadata": {"namespace": "n", "name": name}}
        door._optional.clear()
        await reconciler.guarded_tick(loop)
        del door.cluster.objects[kind, name]
        if ours is not None:
            door.cluster.objects[kind, name] = ours


async def live(door: GuardedDoor) -> None:
    """Run the lifecycle of a resource: create, read, disturb, change, scale in, delete."""
    cluster = door.cluster
    reconciler, loop = a_reconciler_at(door), a_loop(cluster)
    cluster.nodes = 1  # the first replica of two pods finds room for one
    await names_are_taken(reconciler, loop, [("Job", "m-facts")])
    await ticks(reconciler, loop, 6)
    cluster.nodes = 99
    await ticks(reconciler, loop, 3)
    taken = [key for key in cluster.objects if key[0] not in ("Secret", "StatefulSet")]
    await names_are_taken(reconciler, loop, taken)
    for (kind, _), made in cluster.objects.items():  # every object is changed externally
        if kind not in ("Job", "StatefulSet"):
            made["metadata"]["labels"].pop("app.kubernetes.io/part-of", None)
    await ticks(reconciler, loop, 1)
    cluster.objects = {key: made for key, made in cluster.objects.items() if key[0] not in ("Service", "StatefulSet")}
    cluster.pods.clear()
    await ticks(reconciler, loop, 6)
    deleted = timestamp(datetime.fromtimestamp(cluster.now + 1.0, UTC))
    for name, pod in cluster.pods.items():
        if "-w-" in name:  # a worker is deleted: its leader ends with it
            pod["metadata"] |= {"deletionTimestamp": deleted, "deletionGracePeriodSeconds": 0}
    await ticks(reconciler, loop, 6)
    cluster.edit(template={"metadata": {"labels": {"edited": "yes"}}})
    await ticks(reconciler, loop, 6)
    cluster.edit(template={"metadata": {"labels": {"edited": "again"}}}, rollout={"maxSurge": 0, "bakeTime": "0s"})
    await ticks(reconciler, loop, 6)
    cluster.pods.clear()  # a quota: no pod is made for a minute
    for _ in range(3):
        cluster.now += 30.0
        await reconciler.guarded_tick(loop)
    cluster.controllers()
    cluster.edit(replicas=0, router={"enabled": False})
    await ticks(reconciler, loop, 3)
    cluster.installation = Installation()
    await ticks(a_reconciler_at(door), loop, 2)
    for _ in range(2):
        await reconciler.executor.emit_event(cluster.deployment, Event("Normal", "Said", "twice"))


async def test_full_lifecycle_needs_exactly_the_chart_permissions() -> None:
    grants = granted()
    door = GuardedDoor(a_world(parallelism=TWO_PODS), grants)
    await door.list(KIND, None)
    await lead(door)
    await serve_the_webhook(door)
    await live(door)
    assert grants - door.used - WATCHED == HELD_FOR_ROUTERS
    assert grants >= WATCHED


async def test_operator_cannot_write_spec() -> None:
    assert Grant(GROUP, PLURAL, "patch") not in granted()
    assert Grant(GROUP, PLURAL, "update") not in granted()


async def test_namespaced_roles_suffice_in_one_namespace() -> None:
    grants = granted("watchNamespaces={n}", "webhook.enabled=false")
    assert all(grant.namespace in ("n", NAMESPACE) for grant in grants)
    door = GuardedDoor(a_world(), grants)
    await lead(door)
    await ticks(a_reconciler_at(door), a_loop(door.cluster), 6)
    assert door.cluster.condition("Ready")["status"] == "True"


OF_OPTIONAL_KINDS = {(RESOURCES[kind][0], RESOURCES[kind][2]) for kind in OPTIONAL}
DONE_WITHOUT = {
    ("", "events"),
    ("", "nodes"),
    ("", "pods/eviction"),
    ("discovery.k8s.io", "endpointslices"),
} | OF_OPTIONAL_KINDS
NEEDED_TO_TELL = {(PLURAL, "get"), (f"{PLURAL}/status", "patch"), (PLURAL, "list")}


def needed() -> list[Grant]:
    """Return the permissions on workloads that are required and whose absence can be reported."""
    if HELM is None:
        return []
    grants = granted("watchNamespaces={n}", "webhook.enabled=false")
    of_workloads = (grant for grant in grants if grant.namespace == "n" and grant.verb != "watch")
    return sorted(
        (
            g
            for g in of_workloads
            if (g.group, g.resource) not in DONE_WITHOUT and (g.resource, g.verb) not in NEEDED_TO_TELL
        ),
        key=str,
    )


@pytest.mark.parametrize("lacked", needed(), ids=lambda grant: f"{grant.verb}-{grant.resource}")
async def test_removed_permission_is_named_in_conditions(lacked: Grant) -> None:
    door = GuardedDoor(
        a_world(parallelism=TWO_PODS), granted("watchNamespaces={n}", "webhook.enabled=false") - {lacked}
    )
    told = set[str]()
    world_status = door.cluster.write_status

    def write_status(status: Any) -> None:
        told.update(c["message"] for c in status["conditions"] if c["reason"] == "Forbidden")
        world_status(status)

    door.cluster.write_status = write_status  # type: ignore[method-assign]
    await live(door)
    kind = f"{lacked.resource}.{lacked.group}" if lacked.group else lacked.resource
    assert any(f"no permission to {lacked.verb} {kind} in namespace n" in message for message in told), told


@pytest.mark.parametrize("kind", sorted(OPTIONAL))
@pytest.mark.parametrize("verb", ["list", "create", "patch"])
async def test_engines_run_without_optional_permissions(kind: str, verb: str) -> None:
    group, _, plural, _ = RESOURCES[kind]
    lacked = {grant for grant in granted() if (grant.group, grant.resource, grant.verb) == (group, plural, verb)}
    door = GuardedDoor(a_world(), granted() - lacked)
    await ticks(a_reconciler_at(door), a_loop(door.cluster), 6)
    assert door.cluster.condition("Ready")["status"] == "True"
    assert door.cluster.condition("Degraded")["status"] == "False"
