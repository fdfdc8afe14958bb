"""Load of engines from pairs of samples: rates, shares and percentiles."""

from __future__ import annotations

import math
from typing import Any

import pytest
from trimtab_operator.observed.engine_load import Limits, Target, limits_of, measure_load, percentile_of
from trimtab_operator.tuner.samples import Counters, Gauges, Histogram, Sample, Work

EDGES = (0.1, 0.2, 0.4, math.inf)


def make_sample(at: float, tokens: float, *, steps: float = 0, preempted: float = 0) -> Sample:
    counters = Counters(
        generated_tokens=tokens,
        prompt_tokens=0,
        finished=0,
        preemptions={"capacity": preempted},
        arrived=tokens / 100,
        decode=Work(steps=steps, tokens=steps * 64),
    )
    counts = (tokens / 2, tokens, tokens, tokens)
    return Sample(at, counters, Gauges(32, 3, 0.5), ttft=Histogram(EDGES, counts, 0), itl=None)


def test_load_of_two_engines_adds_rates() -> None:
    pairs = [(make_sample(0, 0), make_sample(10, 1000, steps=5, preempted=2))] * 2
    load = measure_load(pairs, Limits(64, 128, ttft=Target(95, 0.3)))
    assert load is not None
    assert (load.running, load.waiting, load.kv_usage) == (64, 6, 0.5)
    assert (load.slots_used, load.budget_used) == (0.5, 0.5)
    assert (load.tokens_per_second, load.requests_per_second, load.preemptions_per_minute) == (200, 2, 24)
    assert load.ttft == pytest.approx(0.19)
    assert load.itl is None


def test_load_leaves_restarted_engine_out() -> None:
    restarted = (make_sample(0, 1000), make_sample(10, 5))
    assert measure_load([restarted], Limits()) is None
    load = measure_load([restarted, (make_sample(0, 0), make_sample(10, 100))], Limits())
    assert load is not None
    assert (load.running, load.slots_used, load.budget_used) == (32, None, None)


@pytest.mark.parametrize(
    ("counts", "percentile", "expected"),
    [((0, 10, 10, 10), 50, 0.15), ((10, 10, 10, 10), 90, 0.09), ((0, 0, 0, 10), 95, 0.4), ((0, 0, 0, 0), 95, None)],
)
def test_percentile_interpolates_in_its_bucket(
    counts: tuple[float, ...], percentile: int, expected: float | None
) -> None:
    found = percentile_of([(Histogram(EDGES, (0, 0, 0, 0), 0), Histogram(EDGES, counts, 0))], percentile)
    assert found == (None if expected is None else pytest.approx(expected))


def test_percentile_of_different_edges_is_unknown() -> None:
    other = Histogram((1.0, math.inf), (1, 1), 0)
    same = Histogram(EDGES, (1, 1, 1, 1), 0)
    assert percentile_of([(other, other), (same, same)], 95) is None


def test_limits_prefer_objectives_of_the_status() -> None:
    resource: dict[str, Any] = {
        "spec": {"objectives": {"ttft": {"target": "2s", "percentile": 90}}},
        "status": {"engine": {"effective": {"maxNumSeqs": "64", "maxNumBatchedTokens": "odd"}}},
    }
    assert limits_of(resource) == Limits(64.0, None, ttft=Target(90, 2.0))
    resource["status"]["tuning"] = {"objectives": {"itl": {"target": "50ms", "percentile": 99}}}
    assert limits_of(resource) == Limits(64.0, None, itl=Target(99, 0.05))


def test_objective_that_grows_with_the_prompt_has_no_single_limit() -> None:
    objective = {"target": "3ms", "perPromptToken": "900us", "percentile": 99}
    assert limits_of({"spec": {"objectives": {"ttft": objective}}}).ttft == Target(99, None)
