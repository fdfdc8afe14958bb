"""What a turn rests on: nothing where it only adds, else the resource and those that stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_cluster import FakeCluster
from trimtab_operator.planning.plan import turn
from trimtab_operator.planning.preconditions import grounds_of


def grounds(cluster: FakeCluster) -> set[str]:
    """Names of what the next turn rests on, if it comes from a cache."""
    world = replace(cluster.look(), remembered=cluster.body)
    return {manifest["metadata"]["name"] for manifest in grounds_of(world, turn(world, cluster.memory))}


def a_settled_cluster(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(rollout={"maxSurge": 0, "bakeTime": "0s"}, **spec)
    cluster.settle()
    return cluster


def test_a_turn_at_rest_and_one_that_only_adds_rest_on_nothing() -> None:
    cluster = a_settled_cluster(replicas=1)
    assert grounds(cluster) == set()
    cluster.edit(replicas=2)
    assert cluster.decide().children
    assert grounds(cluster) == set()


def test_a_replica_goes_because_of_those_that_stay() -> None:
    cluster = a_settled_cluster(replicas=3)
    cluster.edit(replicas=2)
    assert grounds(cluster) == {"m", "m-g0", "m-g0-0", "m-g1", "m-g1-0"}


def test_a_replica_that_goes_as_it_does_not_serve_yet_may_serve_by_now() -> None:
    cluster = FakeCluster(replicas=2, start_seconds=60.0)
    while len(cluster.pods) < 2:
        cluster.tick()
    cluster.edit(replicas=1)
    assert grounds(cluster) == {"m", "m-g0", "m-g0-0", "m-g1-0"}


def test_what_is_written_over_and_the_pods_that_go_for_it_are_confirmed() -> None:
    cluster = a_settled_cluster(replicas=2)
    cluster.edit(engine={"maxNumSeqs": 16})
    everybody = {"m", "m-g0", "m-g0-0", "m-g1", "m-g1-0"}
    assert grounds(cluster) == everybody
    cluster.turn()
    cluster.controllers()
    assert cluster.decide().care
    assert grounds(cluster) == everybody


def test_a_verdict_on_a_change_is_confirmed_though_nothing_goes() -> None:
    cluster = FakeCluster(replicas=1)
    while not cluster.decide().remember or cluster.memory.rollout is None or not cluster.pods:
        cluster.tick()
    decided = cluster.decide()
    assert not decided.children
    assert grounds(cluster) == {"m", "m-g0", "m-g0-0"}


@pytest.mark.parametrize("kind", ["Service", "ServiceAccount"])
def test_what_somebody_changed_is_written_over_by_a_spec_that_still_stands(kind: str) -> None:
    cluster = a_settled_cluster(replicas=1)
    name = "m" if kind == "Service" else "m-engine"
    cluster.objects[kind, name]["metadata"]["labels"]["app.kubernetes.io/part-of"] = "another"
    assert grounds(cluster) >= {"m"}


def test_an_operator_that_asks_the_api_server_itself_confirms_nothing() -> None:
    cluster = a_settled_cluster(replicas=2)
    cluster.edit(replicas=1)
    world = cluster.look()
    assert grounds_of(world, turn(world, cluster.memory)) == ()
