"""The GPU budget: who gets how many replicas of it, who waits, what is never taken, and what is said of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from trimtab_operator.planning.gpu_budget import (
    Beside,
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


def asking_more(stake: Stake, gpus: int) -> Stake:
    """The same after an edit by which each replica takes so many GPUs."""
    forms = [stake.gpus] * (stake.running - len(stake.smaller)) + list(stake.smaller)
    return replace(stake, gpus=gpus, smaller=tuple(form for form in sorted(forms, reverse=True) if form < gpus))


def counts_now(stakes: tuple[Stake, ...], budget: GpuBudget) -> dict[str, int]:
    return {key: granted.replicas for key, granted in shares_now(stakes, budget).items()}


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
    assert counts_now((low, high), budget) == {"n/a": 3, "n/b": 0}
    draining = a_stake("a", wanted=6, running=3, draining=2)
    assert counts_now((draining, high), budget) == {"n/a": 3, "n/b": 1}
    assert counts_now((a_stake("a", wanted=6, running=3), high), budget) == {"n/a": 3, "n/b": 3}


def test_a_change_rolls_by_a_further_replica_only_where_nobody_else_is_to_have_it() -> None:
    own, other = a_stake("a", wanted=2, running=2, gpus=2), a_stake("b", wanted=4, running=2)
    assert room_beside(own, 2, (other,), GpuBudget(total=8)) == Beside(0, 0)
    assert room_beside(own, 2, (other,), GpuBudget(total=10)) == Beside(1, 1)
    with_one = replace(own, running=3, held=6)
    assert room_beside(with_one, 2, (other,), GpuBudget(total=10)) == Beside(1, 0)
    assert room_beside(with_one, 2, None, GpuBudget(total=10)) == Beside(1, 0)
    assert room_beside(own, 2, None, GpuBudget(total=10)) == Beside(0, 0)


def test_what_drains_of_its_own_is_waited_for_before_another_comes_beside() -> None:
    own = replace(a_stake("a", wanted=2, running=2, gpus=2, draining=1), draining=2)
    assert room_beside(own, 2, (), GpuBudget(total=6)) == Beside(1, 0)
    assert room_beside(own, 2, (), GpuBudget(total=8)) == Beside(2, 1)


def test_replicas_that_hold_more_than_they_are_to_have_leave_no_room_for_another_beside_them() -> None:
    own = replace(a_stake("a", wanted=1, running=1), held=3)
    assert room_beside(own, 1, (), GpuBudget(total=3)) == Beside(0, 0)
    assert room_beside(own, 1, (), GpuBudget(total=4)) == Beside(1, 1)


def test_while_a_change_to_fewer_is_tried_replicas_are_added_as_there_is_room_for_the_form_before() -> None:
    own = replace(a_stake("a", wanted=4, running=2), held=4, more_added=2)  # one of 3 GPUs, one that tries 1
    assert counts_now((own,), GpuBudget(total=9)) == {"n/a": 3}
    assert own.with_replicas(3).held == 7
    assert "with 3 GPUs" in share_of(own, (), GpuBudget(total=9)).message
    assert counts_now((replace(own, more_added=0),), GpuBudget(total=9)) == {"n/a": 4}


# --- a form that takes more -------------------------------------------------------------------------------------------


def test_a_form_that_takes_more_takes_no_replica_of_a_higher_or_an_equal_priority() -> None:
    low = asking_more(a_stake("low", wanted=1, running=1), 16)
    for priority in (100, 0):
        high = a_stake("high", wanted=8, running=8, priority=priority)
        assert targets(16, low, high) == [1, 8]
        share = share_of(low, (high,), GpuBudget(total=16))
        assert (share.replicas, share.waits_to_grow) == (1, True)


def test_a_form_that_takes_more_waits_until_what_it_takes_of_a_lower_priority_has_drained() -> None:
    high, low = asking_more(a_stake("high", wanted=1, running=1, priority=1), 4), a_stake("low", wanted=7, running=7)
    budget = GpuBudget(total=8)
    assert targets(8, high, low) == [1, 4]
    assert not shares_now((high, low), budget)["n/high"].grows
    assert not shares_now((high, a_stake("low", wanted=7, running=4, draining=3)), budget)["n/high"].grows
    assert shares_now((high, a_stake("low", wanted=7, running=4)), budget)["n/high"].grows


def test_what_the_own_replicas_give_back_is_not_there_before_they_have_drained() -> None:
    own = asking_more(a_stake("a", wanted=1, running=1, draining=2), 4)
    assert share_of(own, (), GpuBudget(total=4)).waits_to_grow
    assert share_of(own, (), GpuBudget(total=6)).waits_to_grow is False


def test_while_a_form_waits_nobody_lower_loses_a_replica_for_it_and_no_further_one_of_it_comes() -> None:
    own = asking_more(a_stake("a", wanted=3, running=2, priority=1), 4)
    assert targets(8, own, a_stake("low", wanted=6, running=4, least=4)) == [2, 6]


def test_once_it_was_granted_what_it_grows_by_is_held() -> None:
    own = asking_more(a_stake("a", wanted=3, running=2, draining=1), 4)
    assert own.with_replicas(3).held == 2 + 1 + 6 + 4
    assert own.with_replicas(2, grows=False) == own
    assert own.with_replicas(1, grows=False).smaller == (1,)


def test_of_replicas_of_two_forms_the_larger_ones_lack_nothing() -> None:
    halfway = replace(a_stake("a", wanted=1, running=2, gpus=4), smaller=(1,), held=5)
    assert (halfway.takes(1), halfway.takes(2), halfway.takes(3)) == (4, 5, 9)
    assert (halfway.lacks(1), halfway.lacks(2), halfway.lacks(3)) == (0, 3, 3)


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


def test_who_waits_to_grow_hears_what_would_change_it() -> None:
    own = asking_more(a_stake("a", wanted=2, running=2), 4)
    share = share_of(own, (a_stake("chat", wanted=4, running=4, priority=100),), GpuBudget(total=8))
    assert share.message == (
        "2 replicas of 2 wanted stay as they are (2 GPUs in all), as those that are asked for take 4 GPUs each: of the"
        " budget of 8 GPUs n/chat (priority 100) gets 4; a spec.priority above 100 here, a larger budget, fewer"
        " replicas here or fewer replicas there would change it"
    )
    assert "no replica is added until it is" in share_of(own, None, GpuBudget(total=99)).message
    assert share_of(own, None, GpuBudget(total=99)).waits_to_grow


def test_who_gets_all_is_told_nothing() -> None:
    share = share_of(a_stake("a", wanted=2, running=2), (), GpuBudget(total=2))
    assert (share.replicas, share.is_limited, share.message) == (2, False, "")


def test_while_others_are_not_known_nothing_is_taken_either() -> None:
    assert share_of(a_stake("a", wanted=2, running=3), None, GpuBudget(total=0)).replicas == 2
    assert share_of(a_stake("a", wanted=2, running=2), None, GpuBudget(total=0)).replicas == 2
    assert share_of(a_stake("a", wanted=2, gpus=0), None, GpuBudget(total=0)).replicas == 2


# --- whatever is asked for --------------------------------------------------------------------------------------------


def drawn(chance: random.Random, *, edited: float = 0.3) -> tuple[tuple[Stake, ...], GpuBudget]:
    stakes = tuple(
        _perhaps_edited(
            chance,
            edited,
            a_stake(
                f"{chance.choice('xy')}/r{index}",
                wanted=chance.randint(0, 6),
                running=chance.randint(0, 4),
                priority=chance.randint(-1, 1),
                gpus=chance.choice((0, 1, 1, 2, 4)),
                least=chance.randint(0, 3),
                since=f"2026-01-0{chance.randint(1, 3)}",
                draining=chance.choice((0, 0, 1)),
            ),
        )
        for index in range(chance.randint(1, 6))
    )
    namespaces = {"x": chance.randint(0, 10)} if chance.random() < 0.5 else {}
    return stakes, GpuBudget(total=chance.randint(0, 20), namespaces=namespaces)


def _perhaps_edited(chance: random.Random, share: float, stake: Stake) -> Stake:
    """The same, in so large a share of worlds after a change of its layout."""
    return asking_more(stake, chance.choice((1, 2, 4, 8))) if chance.random() < share else stake


def is_within(counts: dict[str, int], stakes: tuple[Stake, ...], budget: GpuBudget) -> bool:
    """Whether so many replicas of each are no more than the budget, but for those that are never taken."""
    for limit, own in [(budget.total, stakes), *((n, _of(stakes, name)) for name, n in budget.namespaces.items())]:
        taken = sum(stake.takes(counts[stake.key]) for stake in own)
        if limit is not None and taken > max(limit, sum(stake.takes(stake.kept) for stake in own)):
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
                needed = stake.takes(found[stake.key] + 1) - stake.takes(found[stake.key])
                below = [other for other in stakes if other.priority < stake.priority]
                more = [other for other in below if found[other.key] > other.kept]
                assert all(other.takes(found[other.key]) - other.takes(other.kept) < needed for other in more)
    assert taken > LOTS / 20


def test_room_that_is_left_is_too_small_for_whoever_gets_less() -> None:
    chance = random.Random(3)
    for _ in range(LOTS):
        stakes, budget = drawn(chance, edited=0.0)
        found = targets_of(stakes, budget)
        for stake in stakes:
            if found[stake.key] < stake.wanted:
                one_more = {**found, stake.key: found[stake.key] + 1}
                assert not is_within(one_more, stakes, budget)


def test_a_form_that_takes_more_costs_nobody_of_an_equal_or_a_higher_priority_a_replica() -> None:
    chance = random.Random(5)
    grown = 0
    for _ in range(LOTS):
        stakes, budget = drawn(chance)
        own = chance.choice(stakes)
        edited = asking_more(own, own.gpus + chance.choice((1, 2, 7)))
        before = targets_of(stakes, budget)
        after = targets_of([edited if stake is own else stake for stake in stakes], budget)
        grown += bool(own.running)
        for stake in stakes:
            if stake is not own and stake.priority >= own.priority:
                assert after[stake.key] >= min(before[stake.key], stake.running)
    assert grown > LOTS / 4


@dataclass
class Plant:
    """Resources whose loops take turns in any order, each by what all hold now; what goes drains for a while."""

    stakes: dict[str, Stake]
    budget: GpuBudget
    draining: dict[str, list[tuple[int, int]]]

    def held(self) -> int:
        return sum(stake.held for stake in self.stakes.values())

    def turn(self, key: str) -> bool:
        """One loop looks and acts: whether anything has changed."""
        own = self.stakes[key]
        self.draining[key] = [(left - 1, gpus) for left, gpus in self.draining[key] if left > 1]
        own = replace(own, held=own.takes(own.running) + sum(gpus for _, gpus in self.draining[key]))
        others = tuple(stake for other, stake in self.stakes.items() if other != key)
        share = share_of(own, others, self.budget)
        gone = own.takes(own.running) - own.takes(min(share.replicas, own.running))
        self.draining[key] += [(3, gone)] if gone else []
        self.stakes[key] = own.with_replicas(share.replicas, grows=not share.waits_to_grow)
        return (own.running, own.smaller) != (self.stakes[key].running, self.stakes[key].smaller)


def test_loops_that_take_their_own_shares_come_to_rest_and_never_hold_more_than_the_budget() -> None:
    chance = random.Random(4)
    for _ in range(LOTS // 4):
        stakes, budget = drawn(chance)
        begun = {stake.key: replace(stake, held=stake.takes(stake.running)) for stake in stakes}
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
