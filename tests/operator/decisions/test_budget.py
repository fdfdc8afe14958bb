"""The GPU budget: who gets how many replicas of it, who waits, what is never taken, and what is said of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from trimtab_operator.decisions.budget import (
    Stake,
    room_beside,
    share_of,
    shares_now,
    targets_of,
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
    least: int = 1,
    since: str = "2026-01-01",
    draining: int = 0,
) -> Stake:
    key = name if "/" in name else f"n/{name}"
    return Stake(key, priority, since, gpus, least, wanted, running, (running + draining) * gpus)


def targets(total: int | None, *stakes: Stake, **namespaces: int) -> list[int]:
    found = targets_of(stakes, GpuBudget(total=total, namespaces=namespaces))
    return [found[stake.key] for stake in stakes]


# --- who gets what ----------------------------------------------------------------------------------------------------


def test_where_there_is_room_for_all_everybody_gets_what_is_wanted() -> None:
    assert targets(8, a_stake("a", wanted=3), a_stake("b", wanted=5)) == [3, 5]
    assert targets(None, a_stake("a", wanted=300)) == [300]


def test_the_higher_priority_is_served_first() -> None:
    assert targets(6, a_stake("a", wanted=5), a_stake("b", wanted=5, priority=1)) == [1, 5]


def test_equals_grow_evenly_by_the_gpus_that_they_get() -> None:
    assert targets(8, a_stake("a", wanted=9), a_stake("b", wanted=9)) == [4, 4]
    assert targets(8, a_stake("a", wanted=9), a_stake("b", wanted=9, gpus=2)) == [4, 2]


def test_what_runs_is_not_taken_for_an_equal() -> None:
    assert targets(6, a_stake("a", wanted=6, running=6), a_stake("b", wanted=6)) == [6, 0]


def test_a_running_replica_makes_room_for_a_higher_priority_but_not_within_the_fewest() -> None:
    low = a_stake("a", wanted=6, running=6, least=2)
    assert targets(6, low, a_stake("b", wanted=6, priority=1)) == [2, 4]


def test_the_fewest_of_a_lower_priority_that_do_not_run_yet_take_nothing_from_a_higher_one() -> None:
    assert targets(4, a_stake("a", wanted=3, least=2), a_stake("b", wanted=4, running=4, priority=1)) == [0, 4]


def test_of_equals_that_do_not_run_the_fewest_come_before_more_and_the_oldest_first() -> None:
    young = a_stake("a", wanted=4, least=2, since="2026-02-01")
    assert targets(3, young, a_stake("b", wanted=4, least=2)) == [1, 2]


def test_a_smaller_one_takes_what_is_too_little_for_the_first() -> None:
    assert targets(7, a_stake("a", wanted=2, gpus=4, priority=1), a_stake("b", wanted=9)) == [1, 3]


def test_a_lowered_budget_takes_the_lowest_priority_first_and_never_the_fewest() -> None:
    high, low = a_stake("a", wanted=4, running=4, priority=1), a_stake("b", wanted=4, running=4, least=2)
    assert targets(6, high, low) == [4, 2]
    assert targets(1, high, low) == [1, 2]


def test_a_namespace_has_its_own_limit_within_the_whole() -> None:
    ours, theirs = a_stake("team/a", wanted=9, priority=5), a_stake("other/b", wanted=9)
    assert targets(8, ours, theirs, team=2) == [2, 6]
    assert targets(None, ours, theirs, team=2) == [2, 9]
    assert targets(1, ours, theirs, team=2) == [1, 0]


def test_what_takes_no_gpu_is_not_limited() -> None:
    assert targets(0, a_stake("a", wanted=9, gpus=0)) == [9]


# --- now --------------------------------------------------------------------------------------------------------------


def test_what_is_to_come_waits_until_what_goes_has_drained() -> None:
    budget = GpuBudget(total=6)
    low, high = a_stake("a", wanted=6, running=6), a_stake("b", wanted=3, priority=1)
    assert shares_now((low, high), budget) == {"n/a": 3, "n/b": 0}
    draining = a_stake("a", wanted=6, running=3, draining=2)
    assert shares_now((draining, high), budget) == {"n/a": 3, "n/b": 1}
    assert shares_now((a_stake("a", wanted=6, running=3), high), budget) == {"n/a": 3, "n/b": 3}


def test_a_change_rolls_by_a_further_replica_only_where_nobody_else_is_to_have_it() -> None:
    own, other = a_stake("a", wanted=2, running=2, gpus=2), a_stake("b", wanted=4, running=2)
    assert room_beside(own, 2, (other,), GpuBudget(total=8)) == 0
    assert room_beside(own, 2, (other,), GpuBudget(total=10)) == 1
    with_one = replace(own, running=3, held=6)
    assert room_beside(with_one, 2, (other,), GpuBudget(total=10)) == 1
    assert room_beside(with_one, 2, None, GpuBudget(total=10)) == 1
    assert room_beside(own, 2, None, GpuBudget(total=10)) == 0


# --- what is said -----------------------------------------------------------------------------------------------------


def test_who_gets_less_hears_of_what_on_whom_and_what_would_change_it() -> None:
    own = a_stake("a", wanted=5, running=2)
    others = (a_stake("chat", wanted=4, running=4, priority=100), a_stake("code", wanted=2, running=2, priority=7))
    share = share_of(own, others, GpuBudget(total=8))
    assert (share.replicas, share.wanted, share.is_limited, share.is_below_least) == (2, 5, True, False)
    assert share.message == (
        "2 of 5 wanted replicas (1 GPU each): of the budget of 8 GPUs n/chat (priority 100) gets 4, n/code (priority 7)"
        " gets 2; a spec.priority above 7 here, a larger budget or fewer replicas there would change it"
    )


@pytest.mark.parametrize(
    ("others", "budget", "words"),
    [
        ((), GpuBudget(total=3), "the budget of 3 GPUs holds no more; a larger budget would"),
        ((), GpuBudget(namespaces={"n": 2}), "the budget of 2 GPUs for namespace n holds no more"),
        (
            (a_stake("low", wanted=2, running=2, least=2),),
            GpuBudget(total=4),
            "n/low (priority 0) gets 2; a larger budget or fewer replicas there would change it",
        ),
        (
            tuple(a_stake(f"b{i}", wanted=1, running=1, priority=1) for i in range(5)),
            GpuBudget(total=7),
            "n/b2 (priority 1) gets 1 and 2 more; a larger budget",
        ),
        (
            (a_stake("low", wanted=4, running=2, priority=-1, draining=2),),
            GpuBudget(total=6),
            "more come once n/low gave GPUs of the budget back",
        ),
        (None, GpuBudget(total=9), "is not known now; no replica is added until it is"),
    ],
)
def test_each_reason_for_less_has_its_words(others: tuple[Stake, ...] | None, budget: GpuBudget, words: str) -> None:
    share = share_of(a_stake("a", wanted=5, running=2), others, budget)
    assert share.is_limited
    assert words in share.message


def test_who_gets_all_is_told_nothing() -> None:
    share = share_of(a_stake("a", wanted=2, running=2), (), GpuBudget(total=2))
    assert (share.replicas, share.is_limited, share.message) == (2, False, "")


def test_while_others_are_not_known_nothing_is_taken_either() -> None:
    assert share_of(a_stake("a", wanted=2, running=3), None, GpuBudget(total=0)).replicas == 2
    assert share_of(a_stake("a", wanted=2, running=2), None, GpuBudget(total=0)).replicas == 2
    assert share_of(a_stake("a", wanted=2, gpus=0), None, GpuBudget(total=0)).replicas == 2


# --- whatever is asked for --------------------------------------------------------------------------------------------


def drawn(chance: random.Random) -> tuple[tuple[Stake, ...], GpuBudget]:
    stakes = tuple(
        a_stake(
            f"{chance.choice('xy')}/r{index}",
            wanted=chance.randint(0, 6),
            running=chance.randint(0, 4),
            priority=chance.randint(-1, 1),
            gpus=chance.choice((0, 1, 1, 2, 4)),
            least=chance.randint(0, 3),
            since=f"2026-01-0{chance.randint(1, 3)}",
            draining=chance.choice((0, 0, 1)),
        )
        for index in range(chance.randint(1, 6))
    )
    namespaces = {"x": chance.randint(0, 10)} if chance.random() < 0.5 else {}
    return stakes, GpuBudget(total=chance.randint(0, 20), namespaces=namespaces)


def is_within(counts: dict[str, int], stakes: tuple[Stake, ...], budget: GpuBudget) -> bool:
    """Whether so many replicas of each are no more than the budget, but for those that are never taken."""
    for limit, own in [(budget.total, stakes), *((n, _of(stakes, name)) for name, n in budget.namespaces.items())]:
        taken = sum(counts[stake.key] * stake.gpus for stake in own)
        if limit is not None and taken > max(limit, sum(stake.kept * stake.gpus for stake in own)):
            return False
    return True


def _of(stakes: tuple[Stake, ...], namespace: str) -> tuple[Stake, ...]:
    return tuple(stake for stake in stakes if stake.namespace == namespace)


def test_no_share_is_beyond_the_budget_or_the_wish_nor_takes_what_is_never_taken() -> None:
    chance = random.Random(1)
    for _ in range(LOTS):
        stakes, budget = drawn(chance)
        found = targets_of(stakes, budget)
        assert is_within(found, stakes, budget)
        for stake in stakes:
            assert stake.kept <= found[stake.key] <= max(stake.wanted, stake.kept)
        assert found == targets_of(chance.sample(stakes, len(stakes)), budget)


def test_a_running_replica_is_taken_only_where_nothing_of_a_lower_priority_is_left_to_take() -> None:
    chance = random.Random(2)
    taken = 0
    for _ in range(LOTS):
        stakes, budget = drawn(chance)
        if budget.namespaces:
            continue  # what a namespace lacks cannot be taken from another one
        found = targets_of(stakes, budget)
        for stake in stakes:
            if found[stake.key] < min(stake.running, stake.wanted):
                taken += 1
                below = [other for other in stakes if other.priority < stake.priority and other.gpus >= stake.gpus]
                assert all(found[other.key] == other.kept for other in below)
    assert taken > LOTS / 20


def test_room_that_is_left_is_too_small_for_whoever_gets_less() -> None:
    chance = random.Random(3)
    for _ in range(LOTS):
        stakes, budget = drawn(chance)
        found = targets_of(stakes, budget)
        for stake in stakes:
            if found[stake.key] < stake.wanted:
                one_more = {**found, stake.key: found[stake.key] + 1}
                assert not is_within(one_more, stakes, budget)


@dataclass
class Plant:
    """Resources whose loops take turns in any order, each by what all hold now; what goes drains for a while."""

    stakes: dict[str, Stake]
    budget: GpuBudget
    draining: dict[str, list[int]]

    def held(self) -> int:
        return sum(stake.held for stake in self.stakes.values())

    def turn(self, key: str) -> int:
        """One loop looks and acts: by how many replicas its count has changed."""
        own = self.stakes[key]
        self.draining[key] = [left - 1 for left in self.draining[key] if left > 1]
        own = replace(own, held=(own.running + len(self.draining[key])) * own.gpus)
        others = tuple(stake for other, stake in self.stakes.items() if other != key)
        count = share_of(own, others, self.budget).replicas
        change = count - own.running
        self.draining[key] += [3] * max(0, -change)
        self.stakes[key] = replace(own, running=count, held=(count + len(self.draining[key])) * own.gpus)
        return change


def test_loops_that_take_their_own_shares_come_to_rest_and_never_hold_more_than_the_budget() -> None:
    chance = random.Random(4)
    for _ in range(LOTS // 4):
        stakes, budget = drawn(chance)
        begun = {stake.key: replace(stake, held=stake.running * stake.gpus) for stake in stakes}
        plant = Plant(begun, budget, {stake.key: [] for stake in stakes})
        most = max(budget.total or 0, plant.held())
        still = turns = 0
        while still < 6:
            for key in chance.sample(sorted(plant.stakes), len(plant.stakes)):
                still = -1 if plant.turn(key) else still
                assert plant.held() <= most
            still, turns = still + 1, turns + 1
            assert turns < 60
        settled = tuple(plant.stakes.values())
        assert {stake.key: stake.running for stake in settled} == targets_of(settled, budget)
