"""GPU claims: concurrent reservations never exceed the budget, and changed grants enqueue their resources."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_builders import a_resource, a_stateful_set
from operator_cluster import FakeCluster, a_loop, a_reconciler
from prometheus_client import generate_latest
from trimtab_operator.errors import Gone
from trimtab_operator.kube.informer_cache import STALE_SECONDS, Cache, Store
from trimtab_operator.planning.gpu_budget import GpuClaim
from trimtab_operator.reconcile.gpu_claims import GpuClaims
from trimtab_operator.resource.installation import GpuBudget, Installation
from trimtab_operator.resource.spec import KIND

GPU = {"device": "cuda", "image": "engine:1"}


def make_claim(name: str, wanted: int, running: int = 0, *, priority: int = 0) -> GpuClaim:
    return GpuClaim(f"n/{name}", priority, "2026-01-01", 1, 1, wanted, running, running)


class Rung:
    """GPU claims with a recorded queue and a cache of these resources."""

    def __init__(self, total: int, *resources: dict[str, Any], has_cache: bool = False) -> None:
        self.now = 0.0
        self.rung: list[str] = []
        self.stores = {kind: Store(kind) for kind in (KIND, "StatefulSet", "Pod")}
        self.cache = Cache(self.stores.values(), clock=lambda: self.now)
        self.told(KIND, *resources)
        self.told("StatefulSet")
        self.told("Pod")
        budget = GpuBudget(total=total)
        self.gpu_claims = GpuClaims(budget, lambda _, name: self.rung.append(name), self.cache if has_cache else None)

    def told(self, kind: str, *manifests: dict[str, Any]) -> None:
        """Apply a complete list of a kind."""
        self.cache.replace_all(self.stores[kind], manifests, 1)


def test_concurrent_reservation_exceeding_budget_fails() -> None:
    known = Rung(4)
    assert known.gpu_claims.reserve(make_claim("a", 3), 3)
    assert not known.gpu_claims.reserve(make_claim("b", 3), 3)
    assert known.gpu_claims.reserve(make_claim("b", 3), 1)


def test_concurrent_surges_share_the_budget() -> None:
    known = Rung(5)
    first, second = make_claim("a", 2, 2), make_claim("b", 2, 2)
    assert known.gpu_claims.reserve(first, 2)
    assert known.gpu_claims.reserve(second, 2)
    assert known.gpu_claims.reserve(first, 2, beside=1)
    assert not known.gpu_claims.reserve(second, 2, beside=1)
    assert known.gpu_claims.reserve(second, 2)
    assert known.gpu_claims.reserve(replace(first, running=3, held=3), 2, beside=1)  # it is there already


def test_concurrent_growth_shares_the_budget() -> None:
    known = Rung(5)
    first, second = (replace(make_claim(name, 1, 1), gpus=4, smaller_replicas=(1,)) for name in "ab")
    assert known.gpu_claims.reserve(first, 1, grows=False)
    assert known.gpu_claims.reserve(second, 1, grows=False)
    assert known.gpu_claims.reserve(first, 1)
    assert not known.gpu_claims.reserve(second, 1)
    assert known.gpu_claims.reserve(second, 1, grows=False)
    known.rung.clear()
    known.gpu_claims.forget("n", "a")
    assert known.rung == ["b"]
    assert known.gpu_claims.reserve(second, 1)


def test_waiting_change_takes_nothing_from_higher_priority() -> None:
    known = Rung(16)
    high = make_claim("high", 8, 8, priority=100)
    assert known.gpu_claims.reserve(high, 8)
    waits = replace(make_claim("low", 1, 1), gpus=16, smaller_replicas=(1,))
    assert not known.gpu_claims.reserve(waits, 1)
    assert known.gpu_claims.reserve(waits, 1, grows=False)
    assert known.rung == []
    assert known.gpu_claims.reserve(replace(high, wanted=15), 15)


def test_scale_in_is_always_reserved() -> None:
    known = Rung(1)
    assert known.gpu_claims.reserve(make_claim("a", 5, 4), 2)
    assert known.gpu_claims.reserve(make_claim("b", 2, 2), 2)


def test_reserve_enqueues_changed_grants_only() -> None:
    known = Rung(4)
    known.gpu_claims.reserve(make_claim("low", 4), 4)
    assert known.rung == []
    known.gpu_claims.reserve(make_claim("high", 3, priority=1), 0)
    assert known.rung == ["low"]
    known.rung.clear()
    known.gpu_claims.reserve(make_claim("low", 4, 4), 1)
    known.gpu_claims.reserve(replace(make_claim("low", 4, 1), held=4), 1)
    assert known.rung == []  # it still drains
    known.gpu_claims.reserve(make_claim("low", 4, 1), 1)
    assert known.rung == ["high"]


def test_forget_releases_claim() -> None:
    known = Rung(4)
    known.gpu_claims.reserve(make_claim("a", 4), 4)
    known.gpu_claims.reserve(make_claim("b", 3), 0)
    known.gpu_claims.forget("n", "a")
    assert known.rung == ["b"]
    assert known.gpu_claims.reserve(make_claim("b", 3), 3)


def test_unreserved_claim_comes_from_cache() -> None:
    asks = a_resource(name="asks", runtime=GPU, status={"desiredReplicas": 1, "wantedReplicas": 4}, priority=3)
    known = Rung(9, asks, a_resource(name="paused", replicas="many"), a_resource(), has_cache=True)
    template = {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "2"}}}]}}
    a_set = a_stateful_set(name="paused")
    known.told("StatefulSet", {**a_set, "spec": {"replicas": 1, "template": template}})
    others = known.gpu_claims.other_claims("n", "m")
    assert others is not None
    (first, second) = sorted(others, key=lambda gpu_claim: gpu_claim.key)
    assert (first.key, first.priority, first.wanted, first.running) == ("n/asks", 3, 4, 0)
    assert (second.key, second.wanted, second.running, second.min_replicas, second.held) == ("n/paused", 1, 1, 1, 2)


def test_unreserved_change_counts_running_gpus() -> None:
    known = Rung(16, a_resource(name="a", runtime=GPU, parallelism={"tensor": 8}), a_resource(), has_cache=True)
    template = {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]}}
    known.told("StatefulSet", {**a_stateful_set(name="a"), "spec": {"replicas": 1, "template": template}})
    (gpu_claim,) = known.gpu_claims.other_claims("n", "m") or ()
    assert (gpu_claim.gpus, gpu_claim.running, gpu_claim.held, gpu_claim.smaller_replicas) == (8, 1, 1, (1,))


def test_reserved_claim_overrides_cache() -> None:
    known = Rung(9, a_resource(name="a", runtime=GPU), a_resource(), has_cache=True)
    known.gpu_claims.reserve(make_claim("a", 3), 2)
    (gpu_claim,) = known.gpu_claims.other_claims("n", "m") or ()
    assert (gpu_claim.wanted, gpu_claim.running, gpu_claim.held) == (3, 2, 2)


def test_uncached_resource_holds_no_claim() -> None:
    known = Rung(9, a_resource(name="a", runtime=GPU), a_resource(), has_cache=True)
    known.gpu_claims.other_claims("n", "m")
    known.gpu_claims.reserve(make_claim("a", 9), 9)
    known.gpu_claims.reserve(make_claim("m", 3), 0)
    known.told(KIND, a_resource())
    assert known.gpu_claims.other_claims("n", "m") == ()
    assert known.rung == ["m"]


def test_stale_cache_yields_no_other_claims() -> None:
    known = Rung(9, a_resource(), has_cache=True)
    known.now = STALE_SECONDS + 1
    assert known.gpu_claims.other_claims("n", "m") is None


# --- in the loop ------------------------------------------------------------------------------------------------------


def a_loop_with_a_budget(cluster: FakeCluster, total: int) -> tuple[Any, Any, GpuClaims]:
    budget = GpuBudget(total=total)
    cluster.installation = Installation(gpu_budget=budget)
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    gpu_claims = GpuClaims(budget, lambda *_: None)
    return replace(reconciler, observer=replace(reconciler.observer, gpu_claims=gpu_claims)), loop, gpu_claims


async def test_tick_reserves_before_apply() -> None:
    cluster = FakeCluster(runtime=GPU, replicas=3)
    reconciler, loop, gpu_claims = a_loop_with_a_budget(cluster, 4)
    gpu_claims.reserve(make_claim("other", 2), 2)
    await reconciler.tick(loop)
    assert len(cluster.groups) == 2
    assert not gpu_claims.reserve(make_claim("third", 1), 1)
    page = generate_latest(reconciler.executor.metrics.registry).decode()
    assert 'trimtab_desired_replicas{name="m",namespace="n"} 2.0' in page
    assert 'trimtab_wanted_replicas{name="m",namespace="n"} 3.0' in page


async def test_claim_change_during_planning_plans_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(runtime=GPU, replicas=3)
    reconciler, loop, gpu_claims = a_loop_with_a_budget(cluster, 4)
    look = gpu_claims.other_claims
    seen = iter([(), None])

    def before_the_other_came(namespace: str, name: str) -> tuple[GpuClaim, ...] | None:
        found = next(seen)
        return look(namespace, name) if found is None else found

    monkeypatch.setattr(gpu_claims, "other_claims", before_the_other_came)
    gpu_claims.reserve(make_claim("other", 2), 2)
    await reconciler.tick(loop)
    assert len(cluster.groups) == 2
    assert cluster.status["wantedReplicas"] == 3


async def test_deleted_resource_releases_claim() -> None:
    cluster = FakeCluster(runtime=GPU, replicas=3)
    reconciler, loop, gpu_claims = a_loop_with_a_budget(cluster, 4)
    await reconciler.tick(loop)
    cluster.body = None
    with pytest.raises(Gone):
        await reconciler.tick(loop)
    await reconciler.run("n", "m", "u-m")
    assert gpu_claims.reserve(make_claim("other", 4), 4)
