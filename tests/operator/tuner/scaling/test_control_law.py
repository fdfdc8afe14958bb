"""How many replicas: for what is foreseen, out at once, in late, and later still after a regret."""

import itertools
import math
import random

import pytest
from trimtab_operator.tuner.load.demand import Case, Demand, Growth, Point
from trimtab_operator.tuner.scaling.behavior import Behavior, Policy, Rules, Unit
from trimtab_operator.tuner.scaling.control_law import (
    BURST_HOLD_COLD_STARTS,
    BURST_SECONDS,
    FORECAST_HOLD_SECONDS,
    HOLD_COLD_STARTS,
    LEARN_COLD_STARTS,
    LEVEL_SECONDS,
    LULL_HOLDS,
    REVERSAL_COOLDOWN_SECONDS,
    Caution,
    ScalingState,
    awaited_initial_replicas,
    compute_need,
    confidence,
    decide_count,
    initial_load,
    rate_to_provision,
    replicas_for_queue,
)

COLD = 120.0


def loaded(*rates: float) -> Demand:
    demand = Demand()
    for index, rate in enumerate(rates):
        demand = demand.with_point(Point(15.0 * (index + 1), 15.0, 15.0 * rate))
    return demand


def grown(factor: float) -> Growth:
    return Growth(cases=tuple(Case(float(i), 1.0, 0.0, math.log(factor)) for i in range(200)))


def test_the_growth_that_was_seen_is_provided_for() -> None:
    found = rate_to_provision(
        loaded(*[10.0] * 20, *[20.0] * 8, *[10.0] * 20), grown(1.5), Caution(), 0.9, cold_start=COLD
    )
    assert found is not None
    assert found[0] == pytest.approx(15.0)


def test_no_more_than_a_quarter_above_the_highest_rate_is_provided_for() -> None:
    found = rate_to_provision(loaded(*[10.0] * 20), grown(4.0), Caution(), 0.9, cold_start=COLD)
    assert found is not None
    assert found[0] == pytest.approx(12.5)


@pytest.mark.parametrize(
    ("forecast_load", "provided"),
    [
        (12.0, 12.0),  # less than the growth that others like it had
        (9.0, 10.0),  # never less than what comes now
        (30.0, 30.0),  # and more than a quarter above the highest of the last hours: so mornings are
    ],
)
def test_what_a_forecast_foretells_takes_the_place_of_growth(forecast_load: float, provided: float) -> None:
    found = rate_to_provision(
        loaded(*[10.0] * 20), grown(1.2), Caution(), 0.9, cold_start=COLD, forecast_load=forecast_load
    )
    assert found is not None
    assert found[0] == pytest.approx(provided)


def test_a_jump_counts_whatever_a_forecast_foretells() -> None:
    jump = loaded(*[10.0] * 20, 40.0, 40.0)
    found = rate_to_provision(jump, grown(1.0), Caution(), 0.9, cold_start=COLD, forecast_load=10.0)
    assert found is not None
    assert found[0] > 25


@pytest.mark.parametrize("times", [0.25, 4.0])
def test_before_anything_was_seen_loads_may_wander_as_far_as_a_start_up_is_long(times: float) -> None:
    """The spread of a random walk goes by the root of the time."""
    found = rate_to_provision(loaded(*[10.0] * 20), Growth(), Caution(), 0.9, cold_start=COLD)
    other = rate_to_provision(loaded(*[10.0] * 20), Growth(), Caution(), 0.9, cold_start=times * COLD)
    assert found is not None
    assert other is not None
    assert math.log(other[1]) == pytest.approx(math.sqrt(times) * math.log(found[1]))


def test_more_growth_is_provided_for_once_more_was_missed_than_is_allowed() -> None:
    assert confidence(Caution(), None) == confidence(Caution(), 1.0) == Caution().confidence
    assert confidence(Caution(), 1.1) > Caution().confidence


def test_a_jump_counts_at_once() -> None:
    found = rate_to_provision(loaded(*[10.0] * 20, 40.0, 40.0), grown(1.0), Caution(), 0.9, cold_start=COLD)
    assert found is not None
    assert found[0] > 25


def test_a_burst_is_provided_for_at_its_height_and_what_the_next_may_have_above_it() -> None:
    """Half a minute of it makes half as much of a minute's rate; 45 a second are what those who wait must hold."""
    burst = loaded(*[2.0] * 20, *[36.0] * 2)
    slow = rate_to_provision(burst, Growth(), Caution(), 0.9, cold_start=COLD)
    found = rate_to_provision(burst, Growth(), Caution(), 0.9, cold_start=COLD, is_burst=True)
    assert slow is not None
    assert found is not None
    assert slow[0] < 36.0
    assert found[0] == pytest.approx(36.0 * found[1])
    jumps = Growth(cases=tuple(Case(float(i), 1.0, burst.trend(), math.log(20.0)) for i in range(200)))
    wild = rate_to_provision(burst, jumps, Caution(), 0.9, cold_start=COLD, is_burst=True)
    assert wild is not None
    assert wild[0] == pytest.approx(36.0 * Caution().beyond_highest)


def provided_for(rates: list[float], *, seed: int) -> list[float]:
    """What is provided for at each look, while requests come by chance at these rates."""
    rng, demand, growth, found = random.Random(seed), Demand(), Growth(), []
    for index, rate in enumerate(rates):
        now, count, left = 15.0 * (index + 1), 0, rng.expovariate(1.0)
        while left < 15.0 * rate:
            count, left = count + 1, left + rng.expovariate(1.0)
        demand = demand.with_point(Point(now, 15.0, count))
        growth = growth.with_errors(demand, now)
        level = demand.level(LEVEL_SECONDS)
        assert level is not None
        up = rate_to_provision(demand, growth, Caution(), Caution().confidence, cold_start=COLD)
        assert up is not None
        found.append(up[0])
        growth = growth.with_prediction(now + COLD + 15.0, level, demand.trend())
    return found


@pytest.mark.parametrize("seed", range(4))
def test_three_requests_a_minute_are_not_six_because_six_came_in_one(seed: int) -> None:
    rate = 3 / 60
    found = provided_for([rate] * 720, seed=seed)[40:]
    assert max(found) < 2.6 * rate
    assert sorted(found)[len(found) // 2] < 1.5 * rate


@pytest.mark.parametrize("seed", range(4))
def test_a_jump_of_a_small_load_counts_within_a_minute(seed: int) -> None:
    found = provided_for([3 / 60] * 240 + [60 / 60] * 8, seed=seed)
    assert found[240 + 3] > 0.6


def test_the_fewest_replicas_that_hold_it_and_those_for_the_queue() -> None:
    need = compute_need(25.0, 20.0, 1.25, lambda n: 8.0 * n, least=1, most=10, queue_replicas=2)
    assert (need.replicas, need.for_queue) == (6, 2)
    assert compute_need(999.0, 20.0, 1.0, lambda n: 8.0 * n, least=1, most=10, queue_replicas=0).replicas == 10


@pytest.mark.parametrize(("seconds", "replicas"), [(3.0, 0), (50.0, 1), (300.0, 3)])
def test_a_queue_is_worth_replicas_once_it_eats_the_promise(seconds: float, replicas: int) -> None:
    assert replicas_for_queue(seconds, replicas=4, ttft_seconds=2.0, cold_start=COLD) == replicas


def walked(
    needs: list[int],
    *,
    may_lower: bool = True,
    start: int = 2,
    behavior: Behavior | None = None,
    burst: int | None = None,
    drain: float = 0.0,
    fewest: int = 0,
    later: int | None = None,
) -> list[int]:
    """The counts asked for, a look every 15 s. `burst` is the look at which the load has just doubled; fewer than
    `fewest` would not hold what is there."""
    state, count, counts = ScalingState(), start, []
    for index, need in enumerate(needs):
        count, state = decide_count(
            state,
            need,
            count,
            now=15.0 * index,
            cold_start=COLD,
            may_lower=may_lower,
            behavior=behavior or Behavior(),
            is_burst=index == burst,
            drain=drain,
            holds_load=lambda count: count >= fewest,
            later=later,
        )
        counts.append(count)
    return counts


def expected(needs: list[int], *, start: int) -> list[int | None]:
    """The count whose load is awaited, look by look."""
    state, found = ScalingState(), []
    for index, need in enumerate(needs):
        now = 15.0 * index
        initial_replicas = awaited_initial_replicas(state, need, start, now=now, cold_start=COLD)
        _, state = decide_count(
            state,
            need,
            start,
            now=now,
            cold_start=COLD,
            may_lower=False,
            behavior=Behavior(),
            initial_replicas=initial_replicas,
        )
        found.append(initial_replicas)
    return found


def test_the_load_that_replicas_were_started_for_is_awaited_until_it_comes() -> None:
    assert expected([1, 2, 1, 4, 1, 1], start=4) == [4, 4, 4, None, None, None]
    assert expected([4, 1, 1], start=4) == [None] * 3


def test_it_is_not_awaited_for_longer_than_a_load_must_be_seen_before_replicas_go() -> None:
    found = expected([1] * 60, start=4)
    assert 15.0 * found.index(None) == pytest.approx(LEARN_COLD_STARTS * COLD)
    assert set(found[found.index(None) :]) == {None}


def test_replicas_are_meant_for_more_than_one_fewer_of_them_holds() -> None:
    assert initial_load(4, lambda count: 5.0 * count) == pytest.approx(17.5)
    assert initial_load(1, lambda count: 5.0 * count) == pytest.approx(2.5)


def test_out_at_once_and_in_only_when_the_load_is_known_and_has_been_low_for_the_hold() -> None:
    counts = walked([2] * 4 + [5] + [2] * 100)
    assert counts[4] == 5
    first_in = 15.0 * (counts.index(2, 5))
    assert first_in >= max(LEARN_COLD_STARTS * COLD, 15.0 * 4 + HOLD_COLD_STARTS * COLD)


def test_nothing_goes_while_something_is_unknown_or_starts() -> None:
    assert set(walked([2] * 4 + [5] + [2] * 100, may_lower=False)[4:]) == {5}


def test_what_grew_slowly_goes_after_the_start_up_that_it_costs() -> None:
    counts = walked([3] * 60 + [2] * 60, start=3)
    assert 15.0 * (counts.index(2) - 59) == pytest.approx(HOLD_COLD_STARTS * COLD, abs=30.0)


def test_where_a_forecast_says_that_none_is_needed_again_it_goes_after_a_minute() -> None:
    counts = walked([3] * 60 + [2] * 60, start=3, drain=180.0, later=2)
    assert 15.0 * (counts.index(2) - 59) == pytest.approx(FORECAST_HOLD_SECONDS, abs=30.0)


def test_where_bursts_come_no_forecast_shortens_the_hold() -> None:
    """Its shape is of quarters of an hour."""
    counts = walked([3] * 60 + [2] * 60, start=3, later=2, burst=59)
    assert 15.0 * (counts.index(2) - 59) >= BURST_HOLD_COLD_STARTS * COLD - 15.0


def test_what_a_forecast_asks_for_later_stays_and_asks_for_no_more() -> None:
    assert set(walked([3] * 60 + [2] * 60, start=3, later=3)) == {3}
    assert set(walked([2] * 120, start=2, later=5)) == {2}


def test_a_replica_that_drains_for_long_is_kept_for_longer() -> None:
    """Who goes and comes again is paid while it drains and while it starts: a lull as long as both saves nothing."""
    counts = walked([3] * 60 + [2] * 60, start=3, drain=180.0)
    assert 15.0 * (counts.index(2) - 59) == pytest.approx(HOLD_COLD_STARTS * COLD + 180.0, abs=30.0)
    assert 2 in walked([3] * 60 + [2] * 90, start=3, drain=7200.0)  # however long


def test_no_more_go_than_what_is_there_allows() -> None:
    """What is needed is told by capacities; what runs and waits now may fill what is left all the same."""
    assert walked([5] * 60 + [2] * 60, start=5, fewest=4)[-1] == 4
    assert walked([5] * 60 + [2] * 60, start=5, fewest=9)[-1] == 5


def test_what_came_in_a_burst_is_held_longer_as_it_comes_back_as_fast() -> None:
    needs = [1] * 30 + [6] * 5 + [1] * 300
    slow, burst = walked(needs, start=1), walked(needs, start=1, burst=30)
    assert 15.0 * (slow.index(1, 35) - 34) == pytest.approx(HOLD_COLD_STARTS * COLD, abs=30.0)
    assert 15.0 * (burst.index(1, 35) - 34) == pytest.approx(BURST_HOLD_COLD_STARTS * COLD, abs=30.0)


def test_a_burst_is_forgotten_after_an_hour() -> None:
    hour = round(BURST_SECONDS / 15)
    needs = [3] * (60 + hour) + [2] * 60
    counts = walked(needs, start=3, burst=59)
    assert 15.0 * (counts.index(2) - 59 - hour) == pytest.approx(HOLD_COLD_STARTS * COLD, abs=30.0)


@pytest.mark.parametrize("lull", [20, 40])
def test_a_regretted_scale_in_waits_out_the_next_lull_like_it(lull: int) -> None:
    """A load that switches: it is followed into its first lull, and no more into the next ones."""
    counts = walked([3] * 60 + ([2] * lull + [3] * 40) * 2, start=3)
    first = counts.index(2)
    back = counts.index(3, first)
    assert back <= 60 + lull
    assert set(counts[back:]) == {3}
    assert LULL_HOLDS > 1.0


def test_a_regret_teaches_nothing_of_counts_above_the_one_that_was_regretted() -> None:
    """The third goes and is needed again; a fourth that comes by later goes as if nothing had been regretted."""
    needs = [3] * 60 + [2] * 20 + [3] * 40 + [4] * 4 + [3] * 40 + [2] * 200
    counts = walked(needs, start=3)
    first = counts.index(2)
    assert counts[first : first + 20].count(3) > 0  # regretted
    fourth_needed_until = 60 + 20 + 40 + 3
    assert 15.0 * (counts.index(3, fourth_needed_until) - fourth_needed_until) <= HOLD_COLD_STARTS * COLD + 30.0
    third_needed_until = fourth_needed_until + 40
    assert 15.0 * (counts.index(2, third_needed_until) - third_needed_until) >= 2 * HOLD_COLD_STARTS * COLD


def test_a_regretted_scale_in_holds_longer_than_the_owners_window() -> None:
    """Two are needed now and then, one in between: the owner's window alone would follow each time."""
    needs = ([1] * 6 + [2] * 2) * 60
    counts = walked([2] * 60 + needs, behavior=Behavior(down=Rules(stabilization_seconds=15.0)))
    changed = [index for index in range(1, len(counts)) if counts[index] != counts[index - 1]]
    assert counts[changed[0]] == 1  # it is tried
    assert all(sum(start <= index < start + 40 for index in changed) <= 2 for start in range(len(counts)))
    assert len(changed) <= 8  # of 119 that the window alone would have made in these two hours


@pytest.mark.parametrize("seed", range(4))
def test_the_count_turns_twice_in_ten_minutes_at_most_whatever_is_needed(seed: int) -> None:
    """In for what was a lull, and out again: then none goes until ten minutes have passed."""
    rng = random.Random(seed)
    needs = [rng.randint(1, 5) for _ in range(160) for _ in range(rng.randint(1, 30))]
    counts = walked(needs, behavior=Behavior(down=Rules(stabilization_seconds=15.0 * seed)))
    changes = [(15.0 * i, counts[i] > counts[i - 1]) for i in range(1, len(counts)) if counts[i] != counts[i - 1]]
    turns = [at for (_, was_up), (at, is_up) in itertools.pairwise(changes) if is_up != was_up]
    assert len(turns) > 20
    assert all(sum(start <= at < start + REVERSAL_COOLDOWN_SECONDS for at in turns) <= 2 for start in turns)


def test_after_a_restart_windows_begin_with_what_is_there() -> None:
    """What was needed before is not written down: a new operator takes its first look for no lull."""
    kept = ScalingState(3, began_at=-10_000.0)
    counts = []
    for index in range(40):
        count, kept = decide_count(kept, 1, 3, now=15.0 * index, cold_start=COLD, may_lower=True, behavior=Behavior())
        counts.append(count)
    assert 15.0 * counts.index(1) >= HOLD_COLD_STARTS * COLD


def test_the_owners_rate_limits_hold() -> None:
    slow = Behavior(up=Rules(policies=(Policy(Unit.PODS, 1, 60.0),)))
    assert walked([9] * 9, behavior=slow) == [3, 3, 3, 3, 4, 4, 4, 4, 5]
