"""The chart's roles hold what the operator does in a whole life of a resource, and nothing else.

The operator's real door to the API server is used on a cluster in memory that asks for every right, as RBAC does.
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
from trimtab_operator.reconcile.executor import Hands
from trimtab_operator.reconcile.health import Heartbeats, OperatorMetrics
from trimtab_operator.reconcile.observer import Eyes
from trimtab_operator.reconcile.reconciler import Loop, Reconciler
from trimtab_operator.reconcile.wakeups import WakeUps
from trimtab_operator.resource.installation import Alerts, Installation, NetworkAccess, PodMonitoring
from trimtab_operator.resource.spec import GROUP, KIND, PLURAL
from trimtab_operator.resource.time import timestamp

pytestmark = pytest.mark.skipif(HELM is None, reason=NO_HELM)

TWO_PODS = {"pipeline": 2, "gpusPerNode": 1}
EVERYTHING = Installation(NetworkAccess(operator={"podSelector": {}}), PodMonitoring(), Alerts())
WATCHED = {Grant(RESOURCES[kind][0], RESOURCES[kind][2], "watch") for kind in (*REQUIRED, *OPTIONAL)}
"""What Kopf and the cache do beside what the door is used for here."""


def granted(*settings: str) -> set[Grant]:
    """What the chart's roles allow the operator."""
    return {grant for made in render(*settings) if made["kind"] in ("Role", "ClusterRole") for grant in _of(made)}


def _of(role: Manifest) -> Iterable[Grant]:
    namespace = role["metadata"].get("namespace")
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    for name in rule.get("resourceNames", [None]):
                        yield Grant(group, resource, verb, namespace, name)


def a_world(**spec: Any) -> FakeCluster:
    """A cluster that serves every kind, and a resource of which nothing is known yet."""
    runtime = {"device": "cuda", "image": "engine:1"}  # so that nodes matter
    quick = {"startTimeout": "30s", "drainTimeout": "1s"}
    cluster = FakeCluster(knows_the_model=False, **a_spec(**{"runtime": runtime, "rollout": quick, **spec}))
    cluster.serves, cluster.installation = set(OPTIONAL), EVERYTHING
    return cluster


def a_reconciler_at(door: GuardedDoor) -> Reconciler:
    cluster = door.cluster
    clock = lambda: cluster.now  # noqa: E731 - the world's
    nodes = Nodes(door, clock)
    eyes = Eyes(door, nodes, cluster.secret, cluster.default_image, 15.0, clock, installation=cluster.installation)
    hands = Hands(door, OperatorMetrics(), clock)
    return Reconciler(eyes, hands, cast("aiohttp.ClientSession", None), Heartbeats(max_age_seconds=60.0), WakeUps())


async def ticks(reconciler: Reconciler, loop: Loop, number: int) -> None:
    """Turns of one loop, each followed by the cluster. What was only looked at for a minute is looked at anew."""
    door = cast("GuardedDoor", reconciler.eyes.cluster)
    for _ in range(number):
        door._optional.clear()
        await reconciler.guarded_tick(loop)
        door.cluster.now += 5.0
        door.cluster.controllers()


async def lead(door: GuardedDoor) -> None:
    """What a process does before and after it looks after resources."""
    secret = {"key": b"k"}
    await door.secret(NAMESPACE, "trimtab-operator", secret)
    lease = LeaderLease(door, namespace=NAMESPACE, name="trimtab-operator", identity="a")
    await lease.attempt()
    await lease.attempt()
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
        configuration=name,
        default_image=None,
    )
    await webhook.refresh()
    made = await door.secret(NAMESPACE, "trimtab-webhook", {})
    assert await door.replace_secret(NAMESPACE, "trimtab-webhook", made, {"ca.crt": b"of another service"})
    webhook._loaded = None
    await webhook.refresh()


async def names_are_taken(reconciler: Reconciler, loop: Loop, keys: Iterable[tuple[str, str]]) -> None:
    """Somebody else has an object of each of these kinds and names for a turn, one after the other."""
    door = cast("GuardedDoor", reconciler.eyes.cluster)
    for kind, name in keys:
        ours = door.cluster.objects.pop((kind, name), None)
        door.cluster.objects[kind, name] = {"metadata": {"namespace": "n", "name": name}}
        door._optional.clear()
        await reconciler.guarded_tick(loop)
        del door.cluster.objects[kind, name]
        if ours is not None:
            door.cluster.objects[kind, name] = ours


async def live(door: GuardedDoor) -> None:
    """A resource is made, read, disturbed in every way, changed, shrunk and watched no more."""
    cluster = door.cluster
    reconciler, loop = a_reconciler_at(door), a_loop(cluster)
    cluster.nodes = 1  # the first replica of two pods finds room for one
    await names_are_taken(reconciler, loop, [("Job", "m-facts")])
    await ticks(reconciler, loop, 6)
    cluster.nodes = 99
    await ticks(reconciler, loop, 3)
    taken = [key for key in cluster.objects if key[0] not in ("Secret", "StatefulSet")]
    await names_are_taken(reconciler, loop, taken)
    for (kind, _), made in cluster.objects.items():  # somebody meddles with everything
        if kind not in ("Job", "StatefulSet"):
            made["metadata"]["labels"].pop("app.kubernetes.io/part-of", None)
    await ticks(reconciler, loop, 1)
    cluster.objects = {key: made for key, made in cluster.objects.items() if key[0] not in ("Service", "StatefulSet")}
    cluster.pods.clear()
    await ticks(reconciler, loop, 6)
    deleted = timestamp(datetime.fromtimestamp(cluster.now + 1.0, UTC))
    for name, pod in cluster.pods.items():
        if "-w-" in name:  # somebody deletes a worker: its leader ends with it
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
    cluster.edit(replicas=0)
    await ticks(reconciler, loop, 3)
    cluster.installation = Installation()
    await ticks(a_reconciler_at(door), loop, 2)
    for _ in range(2):
        await reconciler.hands.tell(cluster.deployment, Event("Normal", "Said", "twice"))


async def test_a_whole_life_needs_the_rights_of_the_chart_and_no_others() -> None:
    grants = granted()
    door = GuardedDoor(a_world(parallelism=TWO_PODS), grants)
    await door.list(KIND, None)
    await lead(door)
    await serve_the_webhook(door)
    await live(door)
    assert grants - door.used - WATCHED == set()
    assert grants >= WATCHED


async def test_the_owners_spec_cannot_be_written() -> None:
    assert Grant(GROUP, PLURAL, "patch") not in granted()
    assert Grant(GROUP, PLURAL, "update") not in granted()


async def test_with_roles_alone_in_one_namespace_everything_works_there() -> None:
    grants = granted("watchNamespaces={n}", "webhook.enabled=false")
    assert all(grant.namespace in ("n", NAMESPACE) for grant in grants)
    door = GuardedDoor(a_world(), grants)
    await lead(door)
    await ticks(a_reconciler_at(door), a_loop(door.cluster), 6)
    assert door.cluster.condition("Ready")["status"] == "True"


OF_OPTIONAL_KINDS = {(RESOURCES[kind][0], RESOURCES[kind][2]) for kind in OPTIONAL}
DONE_WITHOUT = {("", "events"), ("", "nodes"), ("", "pods/eviction")} | OF_OPTIONAL_KINDS
NEEDED_TO_TELL = {(PLURAL, "get"), (f"{PLURAL}/status", "patch"), (PLURAL, "list")}


def needed() -> list[Grant]:
    """The rights on workloads that engines cannot be looked after without, and whose lack can be told."""
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
async def test_a_right_that_is_taken_away_is_named_in_the_conditions(lacked: Grant) -> None:
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
    assert any(f"no right to {lacked.verb} {kind} in namespace n" in message for message in told), told


@pytest.mark.parametrize("kind", sorted(OPTIONAL))
@pytest.mark.parametrize("verb", ["list", "create", "patch"])
async def test_engines_run_without_what_can_be_done_without(kind: str, verb: str) -> None:
    group, _, plural, _ = RESOURCES[kind]
    lacked = {grant for grant in granted() if (grant.group, grant.resource, grant.verb) == (group, plural, verb)}
    door = GuardedDoor(a_world(), granted() - lacked)
    await ticks(a_reconciler_at(door), a_loop(door.cluster), 6)
    assert door.cluster.condition("Ready")["status"] == "True"
    assert door.cluster.condition("Degraded")["status"] == "False"
