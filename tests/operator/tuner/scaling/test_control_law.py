"""Control law: provisioning for the expected load, immediate scale-out, and delayed scale-in."""

import itertools
import math
import random

import pytest
from trimtab_operator.tuner.load.demand import Case, Demand, Growth, Point
from trimtab_operator.tuner.scaling.behavior import Behavior, Policy, Rules, Unit
from trimtab_operator.tuner.scaling.control_law import (
    BURST_GROWTH,
    BURST_HOLD_SECONDS,
    FORECAST_HOLD_SECONDS,
    LEARN_SECONDS,
    LEVEL_SECONDS,
    REVERSAL_COOLDOWN_SECONDS,
    Caution,
    ScalingState,
    confidence,
    decide_count,
    find_fewest,
    lead_seconds,
    rate_to_provision,
    usual_hold,
)

COLD = 120.0
LEAD = lead_seconds(COLD, 15.0)
HOLD = usual_hold(COLD, 0.0)


def loaded(*rates: float) -> Demand:
    demand = Demand()
    for index, rate in enumerate(rates):
        demand = demand.with_point(Point(15.0 * (index + 1), 15.0, 15.0 * rate))
    return demand


def grown(factor: float) -> Growth:
    return Growth(cases=tuple(Case(float(i), 1.0, math.log(factor)) for i in range(200)))


def test_observed_growth_is_provisioned() -> None:
    found = rate_to_provision(loaded(*[10.0] * 20, *[20.0] * 8, *[10.0] * 20), grown(1.5), Caution(), 0.9, lead=LEAD)
    assert found is not None
    assert found[0] == pytest.approx(15.0)


def test_provisioned_rate_is_capped_above_highest_rate() -> None:
    found = rate_to_provision(loaded(*[10.0] * 20), grown(4.0), Caution(), 0.9, lead=LEAD)
    assert found is not None
    assert found[0] == pytest.approx(12.5)


@pytest.mark.parametrize(
    ("forecast_load", "provided"),
    [
        (12.0, 12.0),  # less than the observed growth
        (9.0, 10.0),  # at least the present rate
        (30.0, 30.0),  # more than a quarter above the recent maximum, as in the morning
    ],
)
def test_forecast_replaces_growth(forecast_load: float, provided: float) -> None:
    found = rate_to_provision(loaded(*[10.0] * 20), grown(1.2), Caution(), 0.9, lead=LEAD, forecast_load=forecast_load)
    assert found is not None
    assert found[0] == pytest.approx(provided)


def test_jump_counts_in_addition_to_forecast() -> None:
    jump = loaded(*[10.0] * 20, 40.0, 40.0)
    found = rate_to_provision(jump, grown(1.0), Caution(), 0.9, lead=LEAD, forecast_load=10.0)
    assert found is not None
    assert found[0] > 25


@pytest.mark.parametrize("times", [0.25, 4.0])
def test_prior_growth_scales_with_root_of_lead_time(times: float) -> None:
    """The spread of a random walk grows with the square root of time."""
    found = rate_to_provision(loaded(*[10.0] * 20), Growth(), Caution(), 0.9, lead=LEAD)
    other = rate_to_provision(loaded(*[10.0] * 20), Growth(), Caution(), 0.9, lead=times * LEAD)
    assert found is not None
    assert other is not None
    assert math.log(other[1]) == pytest.approx(math.sqrt(times) * math.log(found[1]))


def test_exhausted_error_budget_raises_confidence() -> None:
    assert confidence(Caution(), None) == confidence(Caution(), 1.0) == Caution().confidence
    assert confidence(Caution(), 1.1) > Caution().confidence


def test_a_jump_counts_at_once() -> None:
    found = rate_to_provision(loaded(*[10.0] * 20, 40.0, 40.0), grown(1.0), Caution(), 0.9, lead=LEAD)
    assert found is not None
    assert found[0] > 25


def provisioned_rates(rates: list[float], *, seed: int) -> list[float]:
    """Return the provisioned rate at each sample for Poisson arrivals at these rates."""
    rng, demand, growth, found = random.Random(seed), Demand(), Growth(), []
    for index, rate in enumerate(rates):
        now, count, left = 15.0 * (index + 1), 0, rng.expovariate(1.0)
        while left < 15.0 * rate:
            count, left = count + 1, left + rng.expovariate(1.0)
        demand = demand.with_point(Point(now, 15.0, count))
        growth = growth.with_errors(demand, now)
        level = demand.level(LEVEL_SECONDS)
        assert level is not None
        up = rate_to_provision(demand, growth, Caution(), Caution().confidence, lead=LEAD)
        assert up is not None
        found.append(up[0])
        growth = growth.with_prediction(now + LEAD, level)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_few_requests_do_not_raise_the_provisioned_rate(seed: int) -> None:
    rate = 3 / 60
    found = provisioned_rates([rate] * 720, seed=seed)[40:]
    assert max(found) < 3 * rate
    assert sorted(found)[len(found) // 2] < 1.5 * rate


@pytest.mark.parametrize("seed", range(4))
def test_a_jump_of_a_small_load_counts_within_a_minute(seed: int) -> None:
    found = provisioned_rates([3 / 60] * 240 + [60 / 60] * 8, seed=seed)
    assert found[240 + 3] > 0.6


@pytest.mark.parametrize("fewest", [1, 2, 3, 7, 11, 28])
@pytest.mark.parametrize("start", [1, 4, 28])
def test_find_fewest_searches_from_present_count(fewest: int, start: int) -> None:
    asked: list[int] = []

    def attains(count: int) -> bool:
        asked.append(count)
        return count >= fewest

    assert find_fewest(attains, least=1, most=28, start=start) == fewest
    assert len(asked) <= 10
    assert find_fewest(lambda count: False, least=1, most=28, start=start) == 28


@pytest.mark.parametrize("cold_start", [5.0, 30.0, 300.0])
def test_hold_time_scales_with_start_up_time(cold_start: float) -> None:
    state, count = ScalingState(began_at=-1e4), 3
    for index in range(120):
        need = 3 if index < 40 else 2
        count, state = decide_count(
            state,
            need,
            count,
            now=15.0 * index,
            hold=usual_hold(cold_start, 0.0),
            may_lower=True,
            behavior=Behavior(),
        )
        if count == 2:
            break
    assert 15.0 * (index - 39) == pytest.approx(max(60.0, cold_start), abs=15.0)


def run_counts(
    needs: list[int],
    *,
    may_lower: bool = True,
    start: int = 2,
    behavior: Behavior | None = None,
    drain: float = 0.0,
    growth: float = 1.0,
    fewest: int = 0,
    later: int | None = None,
) -> list[int]:
    """Return the requested counts, one sample every 15 s. Fewer than `fewest` replicas would not hold the load."""
    state, count, counts = ScalingState(), start, []
    for index, need in enumerate(needs):
        count, state = decide_count(
            state,
            need,
            count,
            now=15.0 * index,
            hold=usual_hold(COLD, drain),
            growth=growth,
            may_lower=may_lower,
            behavior=behavior or Behavior(),
            holds_load=lambda count: count >= fewest,
            later=later,
        )
        counts.append(count)
    return counts


def test_scale_out_at_once_and_scale_in_after_hold_time() -> None:
    counts = run_counts([2] * 4 + [5] + [2] * 100)
    assert counts[4] == 5
    first_in = 15.0 * (counts.index(2, 5))
    assert first_in >= max(LEARN_SECONDS, 15.0 * 4 + HOLD)


def test_no_scale_in_unless_allowed() -> None:
    assert set(run_counts([2] * 4 + [5] + [2] * 100, may_lower=False)[4:]) == {5}


def test_scale_in_after_one_lead_time() -> None:
    counts = run_counts([3] * 60 + [2] * 60, start=3)
    assert 15.0 * (counts.index(2) - 59) == pytest.approx(HOLD, abs=30.0)


def test_bursty_load_is_held_for_ten_minutes() -> None:
    needs = [3] * 60 + [2] * 60
    counts = run_counts(needs, start=3, growth=BURST_GROWTH)
    assert 15.0 * (counts.index(2) - 59) == pytest.approx(BURST_HOLD_SECONDS, abs=30.0)
    forecast = run_counts(needs, start=3, growth=BURST_GROWTH, later=2)  # the season has quarter-hour buckets
    assert 15.0 * (forecast.index(2) - 59) == pytest.approx(BURST_HOLD_SECONDS, abs=30.0)


def test_forecast_shortens_hold_time_to_a_minute() -> None:
    counts = run_counts([3] * 60 + [2] * 60, start=3, drain=180.0, later=2)
    assert 15.0 * (counts.index(2) - 59) == pytest.approx(FORECAST_HOLD_SECONDS, abs=30.0)


def test_forecast_need_keeps_replicas_without_adding() -> None:
    assert set(run_counts([3] * 60 + [2] * 60, start=3, later=3)) == {3}
    assert set(run_counts([2] * 120, start=2, later=5)) == {2}


def test_hold_time_includes_drain_time() -> None:
    """A replica is billed while it drains and while it starts, so removing it for a shorter lull saves nothing."""
    counts = run_counts([3] * 60 + [2] * 60, start=3, drain=180.0)
    assert 15.0 * (counts.index(2) - 59) == pytest.approx(usual_hold(COLD, 180.0), abs=30.0)
    assert 2 in run_counts([3] * 60 + [2] * 90, start=3, drain=7200.0)  # bounded


def test_scale_in_stops_at_replicas_that_hold_the_load() -> None:
    """The requests in flight may still fill the remaining replicas."""
    assert run_counts([5] * 60 + [2] * 60, start=5, fewest=4)[-1] == 4
    assert run_counts([5] * 60 + [2] * 60, start=5, fewest=9)[-1] == 5


@pytest.mark.parametrize("seed", range(4))
def test_count_reverses_at_most_twice_in_ten_minutes(seed: int) -> None:
    """After a scale-in and a scale-out, no scale-in until ten minutes have passed."""
    rng = random.Random(seed)
    needs = [rng.randint(1, 5) for _ in range(160) for _ in range(rng.randint(1, 30))]
    counts = run_counts(needs, behavior=Behavior(down=Rules(stabilization_seconds=15.0 * seed)))
    changes = [(15.0 * i, counts[i] > counts[i - 1]) for i in range(1, len(counts)) if counts[i] != counts[i - 1]]
    turns = [at for (_, was_up), (at, is_up) in itertools.pairwise(changes) if is_up != was_up]
    assert len(turns) > 20
    assert all(sum(start <= at < start + REVERSAL_COOLDOWN_SECONDS for at in turns) <= 2 for start in turns)


def test_scale_in_removes_a_third_at_a_time() -> None:
    """Predictions for far fewer replicas are extrapolations, so each step is observed for the hold time."""
    counts = run_counts([9] * 60 + [1] * 200, start=9)
    levels = [count for index, count in enumerate(counts) if index == 0 or count != counts[index - 1]]
    assert levels == [9, 6, 4, 2, 1]


def test_windows_start_with_present_count_after_restart() -> None:
    """Earlier needs are not stored: a new operator does not take its first sample for a lull."""
    kept = ScalingState(3, began_at=-10_000.0)
    counts = []
    for index in range(40):
        count, kept = decide_count(kept, 1, 3, now=15.0 * index, hold=HOLD, may_lower=True, behavior=Behavior())
        counts.append(count)
    assert 15.0 * counts.index(2) >= HOLD


def test_behavior_rate_limits_apply() -> None:
    slow = Behavior(up=Rules(policies=(Policy(Unit.PODS, 1, 60.0),)))
    assert run_counts([9] * 9, behavior=slow) == [3, 3, 3, 3, 4, 4, 4, 4, 5]


def run_times(
    times: list[float], needs: list[int], *, start: int, behavior: Behavior | None = None
) -> list[tuple[int, ScalingState]]:
    """Return the counts and states of samples at these times."""
    state, count, found = ScalingState(), start, []
    for now, need in zip(times, needs, strict=True):
        count, state = decide_count(
            state, need, count, now=now, hold=HOLD, may_lower=True, behavior=behavior or Behavior()
        )
        found.append((count, state))
    return found


@pytest.mark.parametrize("gap", [400.0, 86_400.0, -3600.0])
def test_gap_in_samples_restarts_hold(gap: float) -> None:
    """The gap is an outage, a pause, or a step of the clock in either direction."""
    times = [15.0 * index for index in range(60)]
    times += [times[-1] + gap + 15.0 * index for index in range(40)]
    counts = [count for count, _ in run_times(times, [4] * 60 + [1] * 40, start=4)]
    assert set(counts[:60]) == {4}
    first_in = next(index for index, count in enumerate(counts) if count < 4)
    assert times[first_in] - times[60] >= HOLD
    assert counts[-1] == 1


@pytest.mark.parametrize("seed", range(40))
def test_scale_in_needs_observed_hold(seed: int) -> None:
    """Property: at every scale-in, samples without a gap showed a low need for the whole hold time."""
    rng = random.Random(seed)
    times, now = [], 1e6
    for _ in range(500):
        steps = ([10.0], [15.0], [90.0, 400.0, 7200.0], [-600.0, -7200.0])
        now += rng.choice(rng.choices(steps, [50, 50, 3, 1])[0])
        times.append(now)
    needs, need = [], 4
    for _ in times:
        need = rng.randint(1, 6) if rng.random() < 0.05 else need
        needs.append(need)
    found = run_times(times, needs, start=4)
    for index in range(1, len(found)):
        count, before = found[index][0], found[index - 1][0]
        if count >= before:
            continue
        first = index
        while first > 0 and times[index] - times[first] < HOLD - 1.0:
            assert 0 < times[first] - times[first - 1] <= 60.0, (index, first)
            assert needs[first] <= count
            first -= 1


def test_gap_does_not_count_as_observed_load() -> None:
    """The first scale-in needs LEARN_SECONDS of observed load."""
    times = [0.0, 15.0] + [7200.0 + 15.0 * index for index in range(40)]
    counts = [count for count, _ in run_times(times, [1] * 42, start=3)]
    first_in = next(index for index, count in enumerate(counts) if count < 3)
    assert times[first_in] - 7200.0 >= LEARN_SECONDS - 30.0


def test_rate_limit_survives_clock_set_back() -> None:
    slow = Behavior(up=Rules(policies=(Policy(Unit.PODS, 1, 60.0),)))
    times = [7200.0, 7215.0, 0.0, 15.0, 30.0, 45.0, 60.0, 75.0]
    counts = [count for count, _ in run_times(times, [9] * 8, start=2, behavior=slow)]
    assert counts[1] == 3
    assert counts[-1] >= 4
