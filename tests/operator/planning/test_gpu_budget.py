"""Shares of the GPU budget: grants, waiting, preemption and messages."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from trimtab_operator.planning.gpu_budget import (
    GpuClaim,
    SurgeRoom,
    compute_share,
    current_grants,
    final_replicas,
    surge_room,
)
from trimtab_operator.resource.installation import GpuBudget

LOTS = 300  # drawn worlds


def a_stake(
    name: str,
    *,
    wanted: int,
    running: int = 0,
    priority: int = 0,
    gpus: int = 1,
    min_replicas: int = 1,
    since: str = "2026-01-01",
    draining: int = 0,
) -> GpuClaim:
    key = name if "/" in name else f"n/{name}"
    return GpuClaim(key, priority, since, gpus, min_replicas, wanted, running, (running + draining) * gpus)


def asking_more(gpu_claim: GpuClaim, gpus: int) -> GpuClaim:
    """Return the claim after an edit to more GPUs per replica."""
    forms = [gpu_claim.gpus] * (gpu_claim.running - len(gpu_claim.smaller_replicas)) + list(gpu_claim.smaller_replicas)
    return replace(
        gpu_claim, gpus=gpus, smaller_replicas=tuple(form for form in sorted(forms, reverse=True) if form < gpus)
    )


def counts_now(gpu_claims: tuple[GpuClaim, ...], budget: GpuBudget) -> dict[str, int]:
    return {key: granted.replicas for key, granted in current_grants(gpu_claims, budget).items()}


def targets(total: int | None, *gpu_claims: GpuClaim, **namespaces: int) -> list[int]:
    found = final_replicas(gpu_claims, GpuBudget(total=total, namespaces=namespaces))
    return [found[gpu_claim.key] for gpu_claim in gpu_claims]


# --- final replicas ---------------------------------------------------------------------------------------------------


def test_sufficient_budget_grants_all_wanted_replicas() -> None:
    assert targets(8, a_stake("a", wanted=3), a_stake("b", wanted=5)) == [3, 5]
    assert targets(None, a_stake("a", wanted=300)) == [300]


def test_the_higher_priority_is_served_first() -> None:
    assert targets(6, a_stake("a", wanted=5), a_stake("b", wanted=5, priority=1)) == [1, 5]


def test_equal_priority_grows_evenly_by_gpus() -> None:
    assert targets(8, a_stake("a", wanted=9), a_stake("b", wanted=9)) == [4, 4]
    assert targets(8, a_stake("a", wanted=9), a_stake("b", wanted=9, gpus=2)) == [4, 2]


def test_equal_priority_does_not_preempt() -> None:
    assert targets(6, a_stake("a", wanted=6, running=6), a_stake("b", wanted=6)) == [6, 0]


def test_higher_priority_preempts_down_to_minimum() -> None:
    low = a_stake("a", wanted=6, running=6, min_replicas=2)
    assert targets(6, low, a_stake("b", wanted=6, priority=1)) == [2, 4]


def test_lower_priority_minimum_does_not_preempt() -> None:
    assert targets(4, a_stake("a", wanted=3, min_replicas=2), a_stake("b", wanted=4, running=4, priority=1)) == [0, 4]


def test_equal_priority_gets_minimum_first_oldest_first() -> None:
    young = a_stake("a", wanted=4, min_replicas=2, since="2026-02-01")
    assert targets(3, young, a_stake("b", wanted=4, min_replicas=2)) == [1, 2]


def test_smaller_claim_uses_gpus_too_few_for_first() -> None:
    assert targets(7, a_stake("a", wanted=2, gpus=4, priority=1), a_stake("b", wanted=9)) == [1, 3]


def test_lowered_budget_preempts_lowest_priority_first() -> None:
    high, low = a_stake("a", wanted=4, running=4, priority=1), a_stake("b", wanted=4, running=4, min_replicas=2)
    assert targets(6, high, low) == [4, 2]
    assert targets(1, high, low) == [1, 2]


def test_a_namespace_has_its_own_limit_within_the_whole() -> None:
    ours, theirs = a_stake("team/a", wanted=9, priority=5), a_stake("other/b", wanted=9)
    assert targets(8, ours, theirs, team=2) == [2, 6]
    assert targets(None, ours, theirs, team=2) == [2, 9]
    assert targets(1, ours, theirs, team=2) == [1, 0]


def test_claim_without_gpus_is_not_limited() -> None:
    assert targets(0, a_stake("a", wanted=9, gpus=0)) == [9]


# --- current grants ---------------------------------------------------------------------------------------------------


def test_new_replicas_wait_for_draining_gpus() -> None:
    budget = GpuBudget(total=6)
    low, high = a_stake("a", wanted=6, running=6), a_stake("b", wanted=3, priority=1)
    assert counts_now((low, high), budget) == {"n/a": 3, "n/b": 0}
    draining = a_stake("a", wanted=6, running=3, draining=2)
    assert counts_now((draining, high), budget) == {"n/a": 3, "n/b": 1}
    assert counts_now((a_stake("a", wanted=6, running=3), high), budget) == {"n/a": 3, "n/b": 3}


def test_surge_uses_only_unclaimed_gpus() -> None:
    own, other = a_stake("a", wanted=2, running=2, gpus=2), a_stake("b", wanted=4, running=2)
    assert surge_room(own, 2, (other,), GpuBudget(total=8)) == SurgeRoom(0, 0)
    assert surge_room(own, 2, (other,), GpuBudget(total=10)) == SurgeRoom(1, 1)
    with_one = replace(own, running=3, held=6)
    assert surge_room(with_one, 2, (other,), GpuBudget(total=10)) == SurgeRoom(1, 0)
    assert surge_room(with_one, 2, None, GpuBudget(total=10)) == SurgeRoom(1, 0)
    assert surge_room(own, 2, None, GpuBudget(total=10)) == SurgeRoom(0, 0)


def test_surge_waits_for_own_draining_replica() -> None:
    own = replace(a_stake("a", wanted=2, running=2, gpus=2, draining=1), draining=2)
    assert surge_room(own, 2, (), GpuBudget(total=6)) == SurgeRoom(1, 0)
    assert surge_room(own, 2, (), GpuBudget(total=8)) == SurgeRoom(2, 1)


def test_oversized_replicas_leave_no_surge_room() -> None:
    own = replace(a_stake("a", wanted=1, running=1), held=3)
    assert surge_room(own, 1, (), GpuBudget(total=3)) == SurgeRoom(0, 0)
    assert surge_room(own, 1, (), GpuBudget(total=4)) == SurgeRoom(1, 1)


def test_shrinking_canary_adds_replicas_of_old_size() -> None:
    own = replace(a_stake("a", wanted=4, running=2), held=4, extra_gpus_per_added=2)  # one of 3 GPUs, one that tries 1
    assert counts_now((own,), GpuBudget(total=9)) == {"n/a": 3}
    assert own.with_grant(3).held == 7
    assert "needs 3 GPUs" in compute_share(own, (), GpuBudget(total=9)).message
    assert counts_now((replace(own, extra_gpus_per_added=0),), GpuBudget(total=9)) == {"n/a": 4}


# --- growing revisions ------------------------------------------------------------------------------------------------


def test_growth_does_not_preempt_equal_or_higher_priority() -> None:
    low = asking_more(a_stake("low", wanted=1, running=1), 16)
    for priority in (100, 0):
        high = a_stake("high", wanted=8, running=8, priority=priority)
        assert targets(16, low, high) == [1, 8]
        share = compute_share(low, (high,), GpuBudget(total=16))
        assert (share.replicas, share.is_growth_pending) == (1, True)


def test_growth_waits_for_preempted_replicas_to_drain() -> None:
    high, low = asking_more(a_stake("high", wanted=1, running=1, priority=1), 4), a_stake("low", wanted=7, running=7)
    budget = GpuBudget(total=8)
    assert targets(8, high, low) == [1, 4]
    assert not current_grants((high, low), budget)["n/high"].grows
    assert not current_grants((high, a_stake("low", wanted=7, running=4, draining=3)), budget)["n/high"].grows
    assert current_grants((high, a_stake("low", wanted=7, running=4)), budget)["n/high"].grows


def test_growth_waits_for_own_replicas_to_drain() -> None:
    own = asking_more(a_stake("a", wanted=1, running=1, draining=2), 4)
    assert compute_share(own, (), GpuBudget(total=4)).is_growth_pending
    assert compute_share(own, (), GpuBudget(total=6)).is_growth_pending is False


def test_pending_growth_neither_preempts_nor_adds() -> None:
    own = asking_more(a_stake("a", wanted=3, running=2, priority=1), 4)
    assert targets(8, own, a_stake("low", wanted=6, running=4, min_replicas=4)) == [2, 6]


def test_granted_growth_is_held() -> None:
    own = asking_more(a_stake("a", wanted=3, running=2, draining=1), 4)
    assert own.with_grant(3).held == 2 + 1 + 6 + 4
    assert own.with_grant(2, grows=False) == own
    assert own.with_grant(1, grows=False).smaller_replicas == (1,)


def test_mixed_sizes_miss_gpus_of_smaller_replicas_only() -> None:
    halfway = replace(a_stake("a", wanted=1, running=2, gpus=4), smaller_replicas=(1,), held=5)
    assert (halfway.gpus_for(1), halfway.gpus_for(2), halfway.gpus_for(3)) == (4, 5, 9)
    assert (halfway.missing_gpus(1), halfway.missing_gpus(2), halfway.missing_gpus(3)) == (0, 3, 3)


# --- messages ---------------------------------------------------------------------------------------------------------


def test_limited_share_message_names_users_and_fixes() -> None:
    own = a_stake("a", wanted=5, running=2)
    others = (a_stake("chat", wanted=4, running=4, priority=100), a_stake("code", wanted=2, running=2, priority=7))
    share = compute_share(own, others, GpuBudget(total=8))
    assert (share.replicas, share.wanted, share.is_limited, share.is_below_min) == (2, 5, True, False)
    assert share.message == (
        "2 of 5 wanted replicas (1 GPU each): of the budget of 8 GPUs n/chat (priority 100) uses 4, n/code (priority 7)"
        " uses 2; needs a spec.priority above 7 here, a larger budget or fewer replicas there"
    )


@pytest.mark.parametrize(
    ("others", "budget", "words"),
    [
        ((), GpuBudget(total=3), "the budget of 3 GPUs has no more; needs a larger budget"),
        ((), GpuBudget(namespaces={"n": 2}), "the budget of 2 GPUs for namespace n has no more"),
        (
            (a_stake("low", wanted=2, running=2, min_replicas=2),),
            GpuBudget(total=4),
            "n/low (priority 0) uses 2; needs a larger budget or fewer replicas there",
        ),
        (
            tuple(a_stake(f"b{i}", wanted=1, running=1, priority=1) for i in range(5)),
            GpuBudget(total=7),
            "n/b2 (priority 1) uses 1 and 2 more; needs a larger budget",
        ),
        (
            (a_stake("low", wanted=4, running=2, priority=-1, draining=2),),
            GpuBudget(total=6),
            "more start after n/low released GPUs of the budget",
        ),
        (None, GpuBudget(total=9), "is unknown; no replica is added until it is known"),
    ],
)
def test_each_limit_has_its_message(others: tuple[GpuClaim, ...] | None, budget: GpuBudget, words: str) -> None:
    share = compute_share(a_stake("a", wanted=5, running=2), others, budget)
    assert share.is_limited
    assert words in share.message


def test_pending_growth_message_names_fixes() -> None:
    own = asking_more(a_stake("a", wanted=2, running=2), 4)
    share = compute_share(own, (a_stake("chat", wanted=4, running=4, priority=100),), GpuBudget(total=8))
    assert share.message == (
        "2 replicas of 2 wanted stay as they are (2 GPUs in all), because the new revision needs 4 GPUs each: of the"
        " budget of 8 GPUs n/chat (priority 100) uses 4; needs a spec.priority above 100 here, a larger budget, fewer"
        " replicas here or fewer replicas there"
    )
    assert "no replica is added until it is known" in compute_share(own, None, GpuBudget(total=99)).message
    assert compute_share(own, None, GpuBudget(total=99)).is_growth_pending


def test_full_share_has_no_message() -> None:
    share = compute_share(a_stake("a", wanted=2, running=2), (), GpuBudget(total=2))
    assert (share.replicas, share.is_limited, share.message) == (2, False, "")


def test_unknown_claims_preempt_nothing() -> None:
    assert compute_share(a_stake("a", wanted=2, running=3), None, GpuBudget(total=0)).replicas == 2
    assert compute_share(a_stake("a", wanted=2, running=2), None, GpuBudget(total=0)).replicas == 2
    assert compute_share(a_stake("a", wanted=2, gpus=0), None, GpuBudget(total=0)).replicas == 2


# --- random claims --------------------------------------------------------------------------------------------------


def drawn(chance: random.Random, *, edited: float = 0.3) -> tuple[tuple[GpuClaim, ...], GpuBudget]:
    gpu_claims = tuple(
        _perhaps_edited(
            chance,
            edited,
            a_stake(
                f"{chance.choice('xy')}/r{index}",
                wanted=chance.randint(0, 6),
                running=chance.randint(0, 4),
                priority=chance.randint(-1, 1),
                gpus=chance.choice((0, 1, 1, 2, 4)),
                min_replicas=chance.randint(0, 3),
                since=f"2026-01-0{chance.randint(1, 3)}",
                draining=chance.choice((0, 0, 1)),
            ),
        )
        for index in range(chance.randint(1, 6))
    )
    namespaces = {"x": chance.randint(0, 10)} if chance.random() < 0.5 else {}
    return gpu_claims, GpuBudget(total=chance.randint(0, 20), namespaces=namespaces)


def _perhaps_edited(chance: random.Random, share: float, gpu_claim: GpuClaim) -> GpuClaim:
    """Return random claims, some of them after a change of the layout."""
    return asking_more(gpu_claim, chance.choice((1, 2, 4, 8))) if chance.random() < share else gpu_claim


def is_within(counts: dict[str, int], gpu_claims: tuple[GpuClaim, ...], budget: GpuBudget) -> bool:
    """Return True if the replicas fit into the budget, not counting guaranteed ones."""
    for limit, own in [
        (budget.total, gpu_claims),
        *((n, _of(gpu_claims, name)) for name, n in budget.namespaces.items()),
    ]:
        taken = sum(gpu_claim.gpus_for(counts[gpu_claim.key]) for gpu_claim in own)
        if limit is not None and taken > max(limit, sum(gpu_claim.gpus_for(gpu_claim.guaranteed) for gpu_claim in own)):
            return False
    return True


def _of(gpu_claims: tuple[GpuClaim, ...], namespace: str) -> tuple[GpuClaim, ...]:
    return tuple(gpu_claim for gpu_claim in gpu_claims if gpu_claim.namespace == namespace)


def test_random_shares_respect_budget_wish_and_minimum() -> None:
    chance = random.Random(1)
    for _ in range(LOTS):
        gpu_claims, budget = drawn(chance)
        found = final_replicas(gpu_claims, budget)
        assert is_within(found, gpu_claims, budget)
        for gpu_claim in gpu_claims:
            assert gpu_claim.guaranteed <= found[gpu_claim.key] <= max(gpu_claim.wanted, gpu_claim.guaranteed)
        assert found == final_replicas(chance.sample(gpu_claims, len(gpu_claims)), budget)


def test_random_preemption_starts_with_lowest_priority() -> None:
    chance = random.Random(2)
    taken = 0
    for _ in range(LOTS):
        gpu_claims, budget = drawn(chance)
        if budget.namespaces:
            continue  # a namespace's budget cannot be freed in another namespace
        found = final_replicas(gpu_claims, budget)
        for gpu_claim in gpu_claims:
            if found[gpu_claim.key] < min(gpu_claim.running, gpu_claim.wanted):
                taken += 1
                needed = gpu_claim.gpus_for(found[gpu_claim.key] + 1) - gpu_claim.gpus_for(found[gpu_claim.key])
                below = [other for other in gpu_claims if other.priority < gpu_claim.priority]
                more = [other for other in below if found[other.key] > other.guaranteed]
                assert all(
                    other.gpus_for(found[other.key]) - other.gpus_for(other.guaranteed) < needed for other in more
                )
    assert taken > LOTS / 20


def test_random_free_gpus_do_not_fit_limited_claims() -> None:
    chance = random.Random(3)
    for _ in range(LOTS):
        gpu_claims, budget = drawn(chance, edited=0.0)
        found = final_replicas(gpu_claims, budget)
        for gpu_claim in gpu_claims:
            if found[gpu_claim.key] < gpu_claim.wanted:
                one_more = {**found, gpu_claim.key: found[gpu_claim.key] + 1}
                assert not is_within(one_more, gpu_claims, budget)


def test_random_growth_never_preempts_equal_or_higher_priority() -> None:
    chance = random.Random(5)
    grown = 0
    for _ in range(LOTS):
        gpu_claims, budget = drawn(chance)
        own = chance.choice(gpu_claims)
        edited = asking_more(own, own.gpus + chance.choice((1, 2, 7)))
        before = final_replicas(gpu_claims, budget)
        after = final_replicas([edited if gpu_claim is own else gpu_claim for gpu_claim in gpu_claims], budget)
        grown += bool(own.running)
        for gpu_claim in gpu_claims:
            if gpu_claim is not own and gpu_claim.priority >= own.priority:
                assert after[gpu_claim.key] >= min(before[gpu_claim.key], gpu_claim.running)
    assert grown > LOTS / 4


@dataclass
class Plant:
    """Resources whose loops run in any order with the present claims; removed replicas drain for a while."""

    gpu_claims: dict[str, GpuClaim]
    budget: GpuBudget
    draining: dict[str, list[tuple[int, int]]]

    def held(self) -> int:
        return sum(gpu_claim.held for gpu_claim in self.gpu_claims.values())

    def plan_reconcile(self, key: str) -> bool:
        """Run one loop; return True if it changed anything."""
        own = self.gpu_claims[key]
        self.draining[key] = [(left - 1, gpus) for left, gpus in self.draining[key] if left > 1]
        own = replace(own, held=own.gpus_for(own.running) + sum(gpus for _, gpus in self.draining[key]))
        others = tuple(gpu_claim for other, gpu_claim in self.gpu_claims.items() if other != key)
        share = compute_share(own, others, self.budget)
        gone = own.gpus_for(own.running) - own.gpus_for(min(share.replicas, own.running))
        self.draining[key] += [(3, gone)] if gone else []
        self.gpu_claims[key] = own.with_grant(share.replicas, grows=not share.is_growth_pending)
        return (own.running, own.smaller_replicas) != (
            self.gpu_claims[key].running,
            self.gpu_claims[key].smaller_replicas,
        )


def test_random_loops_converge_within_budget() -> None:
    chance = random.Random(4)
    for _ in range(LOTS // 4):
        gpu_claims, budget = drawn(chance)
        begun = {
            gpu_claim.key: replace(gpu_claim, held=gpu_claim.gpus_for(gpu_claim.running)) for gpu_claim in gpu_claims
        }
        plant = Plant(begun, budget, {gpu_claim.key: [] for gpu_claim in gpu_claims})
        most = max(budget.total or 0, plant.held())
        still = turns = 0
        while still < 6:
            for key in chance.sample(sorted(plant.gpu_claims), len(plant.gpu_claims)):
                still = -1 if plant.plan_reconcile(key) else still
                assert plant.held() <= most
            still, turns = still + 1, turns + 1
            assert turns < 60
        settled = tuple(plant.gpu_claims.values())
        assert {gpu_claim.key: gpu_claim.running for gpu_claim in settled} == final_replicas(settled, budget)
