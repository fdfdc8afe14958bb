"""The search on closed-form engines with a known best setting: it is found with few runs on any engine."""

import math
import random
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_engine import SyntheticEngine
from trimtab_engine.bench.autotune.limits import Limit, Limits
from trimtab_engine.bench.autotune.search import Outcome, Purpose, Search, Steps, Trial, TrialResult
from trimtab_engine.bench.autotune.space import Candidate, Setting, Space

SPACE = Space(tuple(8 << i for i in range(6)), tuple(256 << i for i in range(6)), (90, 95))
UTILIZATION = 0.95


def drive(steps: Steps, engine: SyntheticEngine) -> list[Trial]:
    """Drive a search to its end. Return its runs."""
    made = []
    trial = next(steps, None)
    while trial is not None:
        made.append(trial)
        try:
            trial = steps.send(engine.answer(trial))
        except StopIteration:
            break
    return made


def searched(engine: SyntheticEngine, limits: Limits, space: Space = SPACE) -> tuple[Search, int]:
    """Return the search over the grid, and its number of runs."""
    search = Search(space, limits, utilization=UTILIZATION)
    return search, len(drive(search.find_candidate(), engine))


def value_of(search: Search) -> float:
    return search.verdicts[search.best].value if search.best is not None else 0.0


def load(engine: SyntheticEngine, candidate: Candidate, rate: float = math.inf) -> TrialResult:
    return engine.answer(Trial(Purpose.LOAD, Setting(candidate, UTILIZATION), rate))


def true_best(engine: SyntheticEngine, limits: Limits, space: Space = SPACE) -> float:
    """Return the maximum throughput within the limits, to three digits, over all candidates and rates."""
    best = 0.0
    for candidate in space.candidates():
        top = load(engine, candidate)
        if limits.excess(top.figures) <= 1:
            best = max(best, top.throughput)
            continue
        low, high = 0.0, top.throughput
        for _ in range(12):
            middle = (low + high) / 2
            holds = limits.excess(load(engine, candidate, middle).figures) <= 1
            low, high = (middle, high) if holds else (low, middle)
        if low > top.throughput / 16:  # lower rates are not searched
            best = max(best, low)
    return best


def runs_of_all(engine: SyntheticEngine, limits: Limits, space: Space = SPACE) -> int:
    """Return the number of runs of an exhaustive search that bisects the rate of every candidate."""
    total = 0
    for candidate in space.candidates():
        alone = Space((candidate.max_num_seqs,), (candidate.max_num_batched_tokens,), space.utilization)
        total += searched(engine, limits, alone)[1] - 1
    return total


def make_engine(seed: int) -> SyntheticEngine:
    """Return an engine between a laptop and an accelerator, with KV caches for 16 to 2,000 requests."""
    draw = random.Random(seed)

    def between(low: float, high: float) -> float:
        return math.exp(draw.uniform(math.log(low), math.log(high)))

    input_len, output_len = int(between(32, 4000)), int(between(4, 500))
    return SyntheticEngine(
        base=between(0.001, 0.05),
        per_token=between(1e-6, 1e-3),
        per_sequence=between(1e-6, 1e-3),
        kv_tokens=int(between(16, 2000) * (input_len + output_len)),
        input_len=input_len,
        output_len=output_len,
        waste=draw.choice([0, 0.1, 0.3, 1, 2]),
    )


def limits_for(engine: SyntheticEngine, seed: int, metrics: list[str]) -> Limits:
    """Return limits between the latency of a single request and that of all at once: each of them is effective
    somewhere.
    """
    draw, start = random.Random(seed), Setting(SPACE.largest(), UTILIZATION)
    alone, full = engine.answer(Trial(Purpose.SINGLE_REQUEST, start)).figures, load(engine, SPACE.largest()).figures

    def limit(metric: str) -> Limit:
        name = f"p99_{metric}_ms"
        low = (alone[name] or 0.0) * 1.2
        return Limit(metric, 99, math.exp(draw.uniform(math.log(low), math.log(max(full[name] or 0.0, low * 1.25)))))

    return Limits(tuple(limit(metric) for metric in metrics))


@pytest.mark.parametrize(
    ("metrics", "share_of_runs"),
    [
        ([], 0.4),  # every candidate costs the exhaustive search only one run
        (["ttft"], 0.2),
        (["itl"], 0.34),
        (["ttft", "itl"], 0.2),
        (["e2el"], 0.2),
    ],
)
def test_search_finds_near_optimum_with_a_third_of_the_runs(metrics: list[str], share_of_runs: float) -> None:
    """36 candidates on engines of all kinds; the fraction is the median over engines."""
    ratios, shares = [], []
    for seed in range(24):
        engine = make_engine(seed)
        limits = limits_for(engine, seed, metrics)
        if (best := true_best(engine, limits)) == 0:
            continue
        search, runs = searched(engine, limits)
        ratios.append(value_of(search) / best)
        shares.append(runs / runs_of_all(engine, limits))
    assert sum(ratio >= 0.95 for ratio in ratios) >= 0.95 * len(ratios), sorted(ratios)[:3]
    assert min(ratios) > 0.85
    assert median(shares) <= share_of_runs


ENGINES = st.integers(0, 10_000).map(make_engine)
METRICS = st.lists(st.sampled_from(["ttft", "itl", "e2el"]), unique=True)


@settings(max_examples=30, deadline=None)
@given(engine=ENGINES, metrics=METRICS, seed=st.integers(0, 1000))
def test_search_ends_and_best_meets_limits_on_any_engine(
    engine: SyntheticEngine, metrics: list[str], seed: int
) -> None:
    limits = limits_for(engine, seed, metrics)
    search, runs = searched(engine, limits)
    assert runs <= 10 * len(SPACE.candidates())
    assert set(search.verdicts) == set(SPACE.candidates())
    assert search.best is not None
    best = search.verdicts[search.best]
    if best.value:
        assert best.outcome is Outcome.HOLDS
        assert limits.excess(load(engine, search.best, best.rate).figures) <= 1


@settings(max_examples=20, deadline=None)
@given(engine=ENGINES, metrics=METRICS, seed=st.integers(0, 1000))
def test_same_results_lead_to_same_trials(engine: SyntheticEngine, metrics: list[str], seed: int) -> None:
    """Required for resuming from recorded results."""
    limits = limits_for(engine, seed, metrics)
    once, again = (drive(Search(SPACE, limits).steps(), engine) for _ in range(2))
    assert once == again
    assert len(set(once)) == len(once)  # and repeats no trial


@pytest.mark.parametrize("most", [0.95, 0.94, 0.93, 0.92, 0.91, 0.9])
def test_largest_working_utilization_is_found_by_bisection(most: float) -> None:
    engine, search = SyntheticEngine(most_utilization=most), Search(SPACE, Limits())
    runs = drive(search.find_utilization(), engine)
    assert search.utilization == most
    assert len(runs) <= 4
    assert {run.setting.candidate for run in runs} == {SPACE.largest()}  # which needs most memory
    assert all(at / 100 > most for at in search.refused)


def test_search_stops_if_no_utilization_works() -> None:
    search = Search(SPACE, Limits())
    runs = drive(search.steps(), SyntheticEngine(most_utilization=0.5))
    assert search.utilization is None
    assert {run.purpose for run in runs} == {Purpose.MEMORY}
    assert search.best is None


def test_candidate_that_cannot_win_is_skipped_with_its_bound() -> None:
    search, _ = searched(SyntheticEngine(base=0.05, per_token=1e-6), Limits())
    pruned = [verdict for verdict in search.verdicts.values() if verdict.outcome is Outcome.PRUNED]
    assert pruned
    assert all("at most" in verdict.why and "the best reaches" in verdict.why for verdict in pruned)


def test_untried_candidates_are_marked() -> None:
    search, _ = searched(SyntheticEngine(), Limits())
    untried = [verdict for verdict in search.verdicts.values() if verdict.outcome is Outcome.NOT_TRIED]
    assert untried
    assert untried[0].why == "neighbors were worse"


def test_all_candidates_option_tries_every_candidate() -> None:
    search = Search(SPACE, Limits(), tries_all=True, utilization=UTILIZATION)
    drive(search.find_candidate(), SyntheticEngine())
    assert Outcome.NOT_TRIED not in {verdict.outcome for verdict in search.verdicts.values()}


def test_limits_violated_by_single_request_name_closest() -> None:
    search, _ = searched(SyntheticEngine(), Limits((Limit("e2el", 99, 1.0),)))
    assert search.best is not None
    nearest = search.verdicts[search.best]
    assert nearest.value == 0
    assert "one request at a time: E2EL p99" in nearest.why


def test_final_run_lowers_rate_until_limits_are_met() -> None:
    """A short run may meet limits that a longer one does not."""
    engine = SyntheticEngine()
    limits = limits_for(engine, 3, ["ttft"])
    search, _ = searched(engine, limits)
    assert search.best is not None
    found = search.verdicts[search.best].rate
    slower = replace(engine, base=engine.base * 1.05)
    rates = [run.rate for run in drive(search.confirm(), slower)]
    assert rates[0] == found
    assert rates == sorted(rates, reverse=True)
    assert search.final is not None
    assert search.final.outcome is Outcome.HOLDS


def test_failed_requests_violate_limits() -> None:
    assert Limits().excess({"failed": 1.0}) == math.inf
    assert Limits().violations({"failed": 1.0}) == ["1 requests failed"]
