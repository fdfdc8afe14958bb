"""Stakes in the GPU budget: nobody takes what another one has taken meanwhile, and whose share changes is rung."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_builders import a_resource, a_stateful_set
from operator_cluster import FakeCluster, a_loop, a_reconciler
from prometheus_client import generate_latest
from trimtab_operator.errors import Gone
from trimtab_operator.kube.informer_cache import SILENT_SECONDS, Cache, Store
from trimtab_operator.planning.gpu_budget import GpuClaim
from trimtab_operator.reconcile.gpu_claims import Stakes
from trimtab_operator.resource.installation import GpuBudget, Installation
from trimtab_operator.resource.spec import KIND

GPU = {"device": "cuda", "image": "engine:1"}


def a_stake(name: str, wanted: int, running: int = 0, *, priority: int = 0) -> GpuClaim:
    return GpuClaim(f"n/{name}", priority, "2026-01-01", 1, 1, wanted, running, running)


class Rung:
    """Stakes in a budget, who was rung, and a cache that knows these resources."""

    def __init__(self, total: int, *resources: dict[str, Any], has_cache: bool = False) -> None:
        self.now = 0.0
        self.rung: list[str] = []
        self.stores = {kind: Store(kind) for kind in (KIND, "StatefulSet", "Pod")}
        self.cache = Cache(self.stores.values(), clock=lambda: self.now)
        self.told(KIND, *resources)
        self.told("StatefulSet")
        self.told("Pod")
        budget = GpuBudget(total=total)
        self.gpu_claims = Stakes(budget, lambda _, name: self.rung.append(name), self.cache if has_cache else None)

    def told(self, kind: str, *manifests: dict[str, Any]) -> None:
        """A list of all that there is of a kind."""
        self.cache.listed(self.stores[kind], manifests, 1)


def test_of_two_that_decided_at_once_the_second_decides_again() -> None:
    known = Rung(4)
    assert known.gpu_claims.put(a_stake("a", 3), 3)
    assert not known.gpu_claims.put(a_stake("b", 3), 3)
    assert known.gpu_claims.put(a_stake("b", 3), 1)


def test_of_two_that_roll_at_once_one_gets_the_replica_that_is_left() -> None:
    known = Rung(5)
    first, second = a_stake("a", 2, 2), a_stake("b", 2, 2)
    assert known.gpu_claims.put(first, 2)
    assert known.gpu_claims.put(second, 2)
    assert known.gpu_claims.put(first, 2, beside=1)
    assert not known.gpu_claims.put(second, 2, beside=1)
    assert known.gpu_claims.put(second, 2)
    assert known.gpu_claims.put(replace(first, running=3, held=3), 2, beside=1)  # it is there already


def test_of_two_that_take_more_for_each_replica_at_once_one_gets_what_is_left() -> None:
    known = Rung(5)
    first, second = (replace(a_stake(name, 1, 1), gpus=4, smaller_replicas=(1,)) for name in "ab")
    assert known.gpu_claims.put(first, 1, grows=False)
    assert known.gpu_claims.put(second, 1, grows=False)
    assert known.gpu_claims.put(first, 1)
    assert not known.gpu_claims.put(second, 1)
    assert known.gpu_claims.put(second, 1, grows=False)
    known.rung.clear()
    known.gpu_claims.forget("n", "a")
    assert known.rung == ["b"]
    assert known.gpu_claims.put(second, 1)


def test_a_change_that_waits_takes_nothing_from_a_higher_priority() -> None:
    known = Rung(16)
    high = a_stake("high", 8, 8, priority=100)
    assert known.gpu_claims.put(high, 8)
    waits = replace(a_stake("low", 1, 1), gpus=16, smaller_replicas=(1,))
    assert not known.gpu_claims.put(waits, 1)
    assert known.gpu_claims.put(waits, 1, grows=False)
    assert known.rung == []
    assert known.gpu_claims.put(replace(high, wanted=15), 15)


def test_fewer_can_always_be_taken() -> None:
    known = Rung(1)
    assert known.gpu_claims.put(a_stake("a", 5, 4), 2)
    assert known.gpu_claims.put(a_stake("b", 2, 2), 2)


def test_whose_share_changes_is_rung_and_nobody_else() -> None:
    known = Rung(4)
    known.gpu_claims.put(a_stake("low", 4), 4)
    assert known.rung == []
    known.gpu_claims.put(a_stake("high", 3, priority=1), 0)
    assert known.rung == ["low"]
    known.rung.clear()
    known.gpu_claims.put(a_stake("low", 4, 4), 1)
    known.gpu_claims.put(replace(a_stake("low", 4, 1), held=4), 1)
    assert known.rung == []  # it still drains
    known.gpu_claims.put(a_stake("low", 4, 1), 1)
    assert known.rung == ["high"]


def test_what_is_gone_leaves_its_share_to_others() -> None:
    known = Rung(4)
    known.gpu_claims.put(a_stake("a", 4), 4)
    known.gpu_claims.put(a_stake("b", 3), 0)
    known.gpu_claims.forget("n", "a")
    assert known.rung == ["b"]
    assert known.gpu_claims.put(a_stake("b", 3), 3)


def test_a_resource_whose_loop_has_not_spoken_counts_as_its_children_and_its_status_say() -> None:
    asks = a_resource(name="asks", runtime=GPU, status={"desiredReplicas": 1, "wantedReplicas": 4}, priority=3)
    known = Rung(9, asks, a_resource(name="paused", replicas="many"), a_resource(), has_cache=True)
    template = {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "2"}}}]}}
    a_set = a_stateful_set(name="paused")
    known.told("StatefulSet", {**a_set, "spec": {"replicas": 1, "template": template}})
    others = known.gpu_claims.of_others("n", "m")
    assert others is not None
    (first, second) = sorted(others, key=lambda gpu_claim: gpu_claim.key)
    assert (first.key, first.priority, first.wanted, first.running) == ("n/asks", 3, 4, 0)
    assert (second.key, second.wanted, second.running, second.min_replicas, second.held) == ("n/paused", 1, 1, 1, 2)


def test_a_change_that_no_loop_has_looked_at_yet_counts_with_the_gpus_that_run() -> None:
    known = Rung(16, a_resource(name="a", runtime=GPU, parallelism={"tensor": 8}), a_resource(), has_cache=True)
    template = {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]}}
    known.told("StatefulSet", {**a_stateful_set(name="a"), "spec": {"replicas": 1, "template": template}})
    (gpu_claim,) = known.gpu_claims.of_others("n", "m") or ()
    assert (gpu_claim.gpus, gpu_claim.running, gpu_claim.held, gpu_claim.smaller_replicas) == (8, 1, 1, (1,))


def test_what_a_loop_has_said_counts_and_not_what_the_cache_says() -> None:
    known = Rung(9, a_resource(name="a", runtime=GPU), a_resource(), has_cache=True)
    known.gpu_claims.put(a_stake("a", 3), 2)
    (gpu_claim,) = known.gpu_claims.of_others("n", "m") or ()
    assert (gpu_claim.wanted, gpu_claim.running, gpu_claim.held) == (3, 2, 2)


def test_a_resource_that_the_cache_does_not_know_any_more_holds_nothing() -> None:
    known = Rung(9, a_resource(name="a", runtime=GPU), a_resource(), has_cache=True)
    known.gpu_claims.of_others("n", "m")
    known.gpu_claims.put(a_stake("a", 9), 9)
    known.gpu_claims.put(a_stake("m", 3), 0)
    known.told(KIND, a_resource())
    assert known.gpu_claims.of_others("n", "m") == ()
    assert known.rung == ["m"]


def test_a_cache_that_is_silent_does_not_say_which_others_there_are() -> None:
    known = Rung(9, a_resource(), has_cache=True)
    known.now = SILENT_SECONDS + 1
    assert known.gpu_claims.of_others("n", "m") is None


# --- in the loop ------------------------------------------------------------------------------------------------------


def a_loop_with_a_budget(cluster: FakeCluster, total: int) -> tuple[Any, Any, Stakes]:
    budget = GpuBudget(total=total)
    cluster.installation = Installation(gpu_budget=budget)
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    gpu_claims = Stakes(budget, lambda *_: None)
    return replace(reconciler, eyes=replace(reconciler.eyes, gpu_claims=gpu_claims)), loop, gpu_claims


async def test_a_loop_takes_its_share_before_it_acts() -> None:
    cluster = FakeCluster(runtime=GPU, replicas=3)
    reconciler, loop, gpu_claims = a_loop_with_a_budget(cluster, 4)
    gpu_claims.put(a_stake("other", 2), 2)
    await reconciler.tick(loop)
    assert len(cluster.groups) == 2
    assert not gpu_claims.put(a_stake("third", 1), 1)
    page = generate_latest(reconciler.hands.metrics.registry).decode()
    assert 'trimtab_desired_replicas{name="m",namespace="n"} 2.0' in page
    assert 'trimtab_wanted_replicas{name="m",namespace="n"} 3.0' in page


async def test_what_others_took_while_a_turn_was_taken_is_decided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(runtime=GPU, replicas=3)
    reconciler, loop, gpu_claims = a_loop_with_a_budget(cluster, 4)
    look = gpu_claims.of_others
    seen = iter([(), None])

    def before_the_other_came(namespace: str, name: str) -> tuple[GpuClaim, ...] | None:
        found = next(seen)
        return look(namespace, name) if found is None else found

    monkeypatch.setattr(gpu_claims, "of_others", before_the_other_came)
    gpu_claims.put(a_stake("other", 2), 2)
    await reconciler.tick(loop)
    assert len(cluster.groups) == 2
    assert cluster.status["wantedReplicas"] == 3


async def test_a_resource_that_is_gone_gives_its_share_back() -> None:
    cluster = FakeCluster(runtime=GPU, replicas=3)
    reconciler, loop, gpu_claims = a_loop_with_a_budget(cluster, 4)
    await reconciler.tick(loop)
    cluster.body = None
    with pytest.raises(Gone):
        await reconciler.tick(loop)
    await reconciler.run("n", "m", "u-m")
    assert gpu_claims.put(a_stake("other", 4), 4)
