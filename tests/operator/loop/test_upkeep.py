"""Upkeep reads nodes and other groups only when something is amiss, and does without the right to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from kubernetes.aio.client.exceptions import ApiException
from trimtab_operator.builders.labels import DEPLOYMENT_LABEL, GROUP_LABEL, LEADER, ROLE_LABEL, WORKER
from trimtab_operator.edge.cluster import Cluster
from trimtab_operator.edge.nodes import Nodes
from trimtab_operator.loop.upkeep import NODES_FRESH_SECONDS, Upkeep, upkeep
from trimtab_operator.observed.groups import Observed
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.time import timestamp

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
LONG_AGO = timestamp(NOW - timedelta(hours=1))


class FakeCluster:
    """Lists what it was given, and remembers what it was asked for."""

    def __init__(self, error: Exception | None = None, **lists: list[Manifest]) -> None:
        self.lists, self.error, self.asked = lists, error, list[str]()

    async def list(self, kind: str, _namespace: str | None, *, selector: str | None = None) -> list[Manifest]:
        self.asked.append(kind)
        if self.error is not None:
            raise self.error
        return self.lists.get(kind, [])


def a_pod(role: str, node: str | None, *, ready: bool = True) -> Manifest:
    labels = {DEPLOYMENT_LABEL: "m", GROUP_LABEL: "0", ROLE_LABEL: role}
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    if node is not None:
        conditions.append({"type": "PodScheduled", "status": "True", "lastTransitionTime": LONG_AGO})
    else:
        words = "Insufficient nvidia.com/gpu"
        conditions.append({"type": "PodScheduled", "status": "False", "message": words, "lastTransitionTime": LONG_AGO})
    name = "m-g0-0" if role == LEADER else "m-g0-w-0"
    spec = {"nodeName": node} if node else {}
    metadata = {"name": name, "namespace": "n", "uid": f"u-{name}", "labels": labels}
    return {"metadata": metadata, "spec": spec, "status": {"conditions": conditions}}


def a_set(role: str) -> Manifest:
    name = "m-g0" if role == LEADER else "m-g0-w"
    labels = {DEPLOYMENT_LABEL: "m", GROUP_LABEL: "0", ROLE_LABEL: role}
    metadata = {"name": name, "namespace": "n", "uid": f"u-{name}", "labels": labels, "creationTimestamp": LONG_AGO}
    return {"metadata": metadata, "spec": {"replicas": 1}}


SETS = (a_set(LEADER), a_set(WORKER))


async def care_of(cluster: FakeCluster, observed: Observed) -> Upkeep:
    found = cast("Cluster", cluster)
    return await upkeep(found, Nodes(found), observed, now=NOW, asked="r1")


def observed(*pods: Manifest) -> Observed:
    return Observed(stateful_sets=SETS, pods=pods)


async def test_while_all_is_well_nothing_is_read() -> None:
    cluster = FakeCluster()
    care = await care_of(cluster, observed(a_pod(LEADER, "one"), a_pod(WORKER, "two")))
    assert (care.deletions, care.held, care.notes) == ((), {}, ())
    assert cluster.asked == []


async def test_a_lost_node_is_told_and_its_pods_are_given_up() -> None:
    condition = {"type": "Ready", "status": "Unknown", "lastTransitionTime": LONG_AGO}
    node: dict[str, Any] = {"metadata": {"name": "two"}, "status": {"conditions": [condition]}}
    well: dict[str, Any] = {"metadata": {"name": "one"}}
    cluster = FakeCluster(Node=[well, node])
    pods = observed(a_pod(LEADER, "one"), a_pod(WORKER, "two", ready=False))
    care = await care_of(cluster, pods)
    assert [(deletion.name, deletion.grace_seconds) for deletion in care.deletions] == [("m-g0-w-0", 0)]
    assert [note.reason for note in care.notes] == ["NodeLost"]


async def test_a_group_that_is_stuck_gives_its_pods_back_and_says_so_once() -> None:
    pods = observed(a_pod(LEADER, "one"), a_pod(WORKER, None, ready=False))
    care = await care_of(FakeCluster(StatefulSet=list(SETS), Pod=list(pods.pods)), pods)
    assert care.held is not None
    assert not care.held[0].has_pods
    assert [note.reason for note in care.notes] == ["GaveBack"]
    assert "Insufficient nvidia.com/gpu" in care.notes[0].message


@pytest.mark.parametrize("pods", [(a_pod(LEADER, "one", ready=False),), (a_pod(LEADER, "one"), a_pod(WORKER, None))])
async def test_without_the_right_to_look_further_it_goes_on(pods: tuple[Manifest, ...]) -> None:
    cluster = FakeCluster(error=ApiException(status=403))
    await care_of(cluster, observed(*pods))
    assert cluster.asked


async def test_other_errors_of_the_api_server_are_not_swallowed() -> None:
    cluster = FakeCluster(error=ApiException(status=500))
    with pytest.raises(ApiException):
        await care_of(cluster, observed(a_pod(LEADER, "one", ready=False)))


async def test_all_resources_on_a_lost_node_are_judged_by_one_list_of_nodes() -> None:
    cluster, moment = FakeCluster(), [0.0]
    known = cast("Cluster", cluster)
    nodes, pods = Nodes(known, clock=lambda: moment[0]), observed(a_pod(LEADER, "one", ready=False))
    for moment[0], lists in ((0.0, 1), (NODES_FRESH_SECONDS - 1, 1), (NODES_FRESH_SECONDS, 2)):
        for _ in range(3):
            await upkeep(known, nodes, pods, now=NOW, asked="r1")
        assert cluster.asked.count("Node") == lists
