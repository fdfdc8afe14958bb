"""A look reads everything once: what is always needed, and the rest only when something is amiss."""

from __future__ import annotations

from typing import cast

import pytest
from kubernetes.aio.client.exceptions import ApiException
from operator_builders import NOW, a_pod, a_resource, not_ready, observed
from trimtab_operator.builders.admin_token import Tokens
from trimtab_operator.builders.labels import WORKER
from trimtab_operator.engines.poller import Engines
from trimtab_operator.kube.client import Cluster
from trimtab_operator.kube.nodes import Nodes
from trimtab_operator.observed.engines import EngineObservation, EngineTarget, MetricsSettings
from trimtab_operator.observed.groups import MissingPods, ObservedChildren
from trimtab_operator.planning.snapshot import LOST_NODES_FRESH_SECONDS, ClusterSnapshot
from trimtab_operator.planning.state import ReconcilerState
from trimtab_operator.reconcile.observer import Eyes, Key
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment

WELL = observed(a_pod(), a_pod(WORKER), workers=1)
DOWN = observed(not_ready(a_pod()), a_pod(WORKER), workers=1)
STUCK = observed(a_pod(), a_pod(WORKER, node=None), workers=1)
SHORT = observed(a_pod(), workers=1)


class ListingCluster:
    """Has one resource with these children, and remembers what else it was asked to list."""

    def __init__(self, children: ObservedChildren, *, error: Exception | None = None, device: str = "cpu") -> None:
        self.children, self.error, self.listed = children, error, list[str]()
        self.body = a_resource(runtime={"device": device, "image": "engine:1"})

    async def get(self, _kind: str, _namespace: str | None, _name: str) -> Manifest:
        return self.body

    async def observe(self, _deployment: InferenceDeployment) -> ObservedChildren:
        return self.children

    async def list(self, kind: str, _namespace: str | None, **_: str) -> list[Manifest]:
        self.listed.append(kind)
        if self.error is not None:
            raise self.error
        return []


class SilentEngines:
    """Nobody answers."""

    async def look(
        self, _targets: tuple[EngineTarget, ...], _tokens: Tokens, _asked: MetricsSettings, *, believes_last_words: bool
    ) -> dict[str, EngineObservation]:
        return {}


def eyes_at(cluster: ListingCluster, nodes: Nodes | None = None) -> Eyes:
    door = cast("Cluster", cluster)
    return Eyes(door, nodes or Nodes(door), b"s", None, 15.0, lambda: NOW)


async def look(
    cluster: ListingCluster, state: ReconcilerState | None = None, nodes: Nodes | None = None
) -> ClusterSnapshot:
    engines = cast("Engines", SilentEngines())
    return await eyes_at(cluster, nodes).look(Key("n", "m", "u-m"), state or ReconcilerState(), engines)


@pytest.mark.parametrize(
    ("children", "device", "listed"),
    [
        (WELL, "cpu", []),
        (WELL, "cuda", ["Node"]),  # which GPUs there are
        (DOWN, "cpu", ["Node"]),  # is its node lost?
        (STUCK, "cpu", ["Pod", "StatefulSet"]),  # who else is partly placed?
    ],
)
async def test_what_else_is_read_depends_on_what_is_amiss(
    children: ObservedChildren, device: str, listed: list[str]
) -> None:
    cluster = ListingCluster(children, device=device)
    await look(cluster)
    assert sorted(cluster.listed) == listed


async def test_events_are_read_when_pods_are_missing_for_a_while() -> None:
    cluster = ListingCluster(SHORT)
    await look(cluster, ReconcilerState(missing={"m-g0": MissingPods(NOW - 60, 1)}))
    assert "Event" in cluster.listed


@pytest.mark.parametrize("children", [DOWN, STUCK, SHORT])
async def test_without_the_right_to_look_further_it_goes_on(children: ObservedChildren) -> None:
    cluster = ListingCluster(children, error=ApiException(status=403))
    snapshot = await look(cluster, ReconcilerState(missing={"m-g0": MissingPods(NOW - 60, 1)}))
    assert snapshot.children == children
    assert cluster.listed


async def test_other_errors_of_the_api_server_are_not_swallowed() -> None:
    with pytest.raises(ApiException):
        await look(ListingCluster(DOWN, error=ApiException(status=500)))


async def test_all_resources_on_a_lost_node_are_judged_by_one_list_of_nodes() -> None:
    cluster, now = ListingCluster(DOWN), [0.0]
    nodes = Nodes(cast("Cluster", cluster), clock=lambda: now[0])
    for now[0], lists in ((0.0, 1), (LOST_NODES_FRESH_SECONDS - 1, 1), (LOST_NODES_FRESH_SECONDS, 2)):
        for _ in range(3):
            await look(cluster, nodes=nodes)
        assert cluster.listed.count("Node") == lists


async def test_a_spec_that_cannot_be_read_is_a_world_with_a_refusal() -> None:
    cluster = ListingCluster(WELL)
    for bad in ("many", -5, True, 10**9):
        cluster.body = a_resource(replicas=bad)
        snapshot = await look(cluster)
        assert "spec.replicas" in str(snapshot.parse_errors[0])
        assert snapshot.deployment.replicas == 1
