"""Observation reads everything once: the required objects, and others only if there is a problem."""

from __future__ import annotations

from typing import Any, cast

import aiohttp
import pytest
from kubernetes.aio.client.exceptions import ApiException
from operator_builders import NOW, a_pod, a_resource, not_ready, observed
from operator_cluster import FakeCluster, a_loop, a_reconciler
from trimtab_operator.builders.admin_token import Tokens
from trimtab_operator.builders.labels import WORKER
from trimtab_operator.engines.poller import EnginePoller
from trimtab_operator.engines.router_client import RouterPoller
from trimtab_operator.errors import Gone
from trimtab_operator.kube.client import Cluster
from trimtab_operator.kube.nodes import Nodes
from trimtab_operator.observed.engines import EngineObservation, EngineTarget, MetricsSettings
from trimtab_operator.observed.groups import MissingPods, ObservedChildren
from trimtab_operator.planning.snapshot import LOST_NODES_FRESH_SECONDS, ClusterSnapshot
from trimtab_operator.planning.state import ReconcilerState
from trimtab_operator.reconcile.observer import ClusterObserver, Key
from trimtab_operator.resource.installation import Installation
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment

WELL = observed(a_pod(), a_pod(WORKER), workers=1)
DOWN = observed(not_ready(a_pod()), a_pod(WORKER), workers=1)
STUCK = observed(a_pod(), a_pod(WORKER, node=None), workers=1)
SHORT = observed(a_pod(), workers=1)


class ListingCluster:
    """Cluster with one resource and these children; records further list calls."""

    def __init__(self, children: ObservedChildren, *, error: Exception | None = None, device: str = "cpu") -> None:
        self.children, self.error, self.listed = children, error, list[str]()
        self.body = a_resource(runtime={"device": device, "image": "engine:1"})

    async def get(self, _kind: str, _namespace: str | None, _name: str) -> Manifest:
        return self.body

    async def list_children(self, _deployment: InferenceDeployment) -> ObservedChildren:
        return self.children

    async def list(self, kind: str, _namespace: str | None, **_: str) -> list[Manifest]:
        self.listed.append(kind)
        if self.error is not None:
            raise self.error
        return []


class SilentEngines:
    """Poller in which no engine responds."""

    async def poll(
        self,
        _targets: tuple[EngineTarget, ...],
        _tokens: Tokens,
        _asked: MetricsSettings,
        *,
        allow_stale_engine_status: bool,
    ) -> dict[str, EngineObservation]:
        return {}


def make_observer(cluster: ListingCluster, nodes: Nodes | None = None) -> ClusterObserver:
    door = cast("Cluster", cluster)
    return ClusterObserver(door, nodes or Nodes(door), b"s", None, 15.0, lambda: NOW)


async def look(
    cluster: ListingCluster, state: ReconcilerState | None = None, nodes: Nodes | None = None
) -> ClusterSnapshot:
    engines = cast("EnginePoller", SilentEngines())
    routers = RouterPoller(cast("aiohttp.ClientSession", None), lambda: NOW, lambda: None)
    observer = make_observer(cluster, nodes)
    return await observer.observe(Key("n", "m", "u-m"), state or ReconcilerState(), engines, routers)


@pytest.mark.parametrize(
    ("children", "device", "listed"),
    [
        (WELL, "cpu", []),
        (WELL, "cuda", ["Node"]),  # which GPUs there are
        (DOWN, "cpu", ["Node"]),  # is its node lost?
        (STUCK, "cpu", ["Event", "Pod", "StatefulSet"]),  # who else is partly placed?
    ],
)
async def test_observe_extra_reads_depend_on_problems(
    children: ObservedChildren, device: str, listed: list[str]
) -> None:
    cluster = ListingCluster(children, device=device)
    await look(cluster)
    assert sorted(set(cluster.listed)) == listed


async def test_observe_reads_events_when_pods_are_missing() -> None:
    cluster = ListingCluster(SHORT)
    await look(cluster, ReconcilerState(missing={"m-g0": MissingPods(NOW - 60, 1)}))
    assert "Event" in cluster.listed


@pytest.mark.parametrize("children", [DOWN, STUCK, SHORT])
async def test_observe_without_list_permissions(children: ObservedChildren) -> None:
    cluster = ListingCluster(children, error=ApiException(status=403))
    snapshot = await look(cluster, ReconcilerState(missing={"m-g0": MissingPods(NOW - 60, 1)}))
    assert snapshot.children == children
    assert cluster.listed


async def test_observe_raises_other_api_errors() -> None:
    with pytest.raises(ApiException):
        await look(ListingCluster(DOWN, error=ApiException(status=500)))


async def test_lost_node_check_shares_node_list() -> None:
    cluster, now = ListingCluster(DOWN), [0.0]
    nodes = Nodes(cast("Cluster", cluster), clock=lambda: now[0])
    for now[0], lists in ((0.0, 1), (LOST_NODES_FRESH_SECONDS - 1, 1), (LOST_NODES_FRESH_SECONDS, 2)):
        for _ in range(3):
            await look(cluster, nodes=nodes)
        assert cluster.listed.count("Node") == lists


async def test_observe_unparsable_spec_has_parse_errors() -> None:
    cluster = ListingCluster(WELL)
    for bad in ("many", -5, True, 10**9):
        cluster.body = a_resource(replicas=bad)
        snapshot = await look(cluster)
        assert "spec.replicas" in str(snapshot.parse_errors[0])
        assert snapshot.deployment.replicas == 1


@pytest.mark.parametrize(("own", "other"), [(None, "blue"), ("blue", None), ("blue", "green")])
async def test_resource_of_another_class_is_gone(own: str | None, other: str | None) -> None:
    spec: dict[str, Any] = {} if other is None else {"class": other}
    cluster = FakeCluster(**spec)
    cluster.installation = Installation(operator_class=own)
    with pytest.raises(Gone):
        await a_reconciler(cluster).tick(a_loop(cluster))
    assert cluster.writes == 0


async def test_resource_of_own_class_is_served() -> None:
    spec: dict[str, Any] = {"class": "blue"}
    cluster = FakeCluster(**spec)
    cluster.installation = Installation(operator_class="blue")
    await a_reconciler(cluster).tick(a_loop(cluster))
    assert cluster.writes > 0
