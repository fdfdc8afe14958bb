"""Predictions: deterministic, in the right order, and with the capacities of the reference replays."""

import random
from dataclasses import replace

import pytest
from trimtab_operator.tuner.engine_model import EngineModel, EngineModelPolicy, KvBlocks, Sequence, StepCost
from trimtab_operator.tuner.load import Pair
from trimtab_operator.tuner.objectives import Itl, ItlKind, Objectives, Ttft
from trimtab_operator.tuner.prediction import Candidate, InFlightRequest, Predictor
from trimtab_operator.tuner.prediction.capacity import (
    ANSWER_STEPS,
    TOLERANCE,
    WORK_PER_STEP,
    Bracket,
)
from trimtab_operator.tuner.prediction.prediction import (
    MOST_REQUESTS,
    Load,
    attains,
    predict,
    predict_clients,
)

COST = StepCost(8e-3, 1 / 16_000, 3e-5, 4e-9)
BOTH = Objectives(Ttft(2.0, 1 / 8000, 0.99), Itl(0.08, share=0.99))
ONE = Candidate(1, 512, 1024, 1_000_000 // 16)


def pairs(prompt: float, output: float, count: int = 2000) -> tuple[Pair, ...]:
    rng = random.Random(1)
    return tuple(
        Pair(0, 1 + int(rng.expovariate(1 / prompt)), 1 + int(rng.expovariate(1 / output))) for _ in range(count)
    )


def searched(predictor: Predictor, candidate: Candidate) -> float:
    """Return the capacity, after as many steps as its search takes."""
    for _ in range(40):
        found = predictor.searched_capacity(candidate)
        if found is not None:
            return found
        predictor.begin_step()
    raise AssertionError("the search does not end")


@pytest.fixture(scope="module")
def code() -> Predictor:
    return Predictor(COST, pairs(2052, 27), BOTH, 1.0, 0.99)


def test_the_same_is_predicted_each_time(code: Predictor) -> None:
    again = Predictor(COST, code.pairs, BOTH, 1.0, 0.99)
    assert again.at(ONE, 3.0) == code.at(ONE, 3.0)


def test_higher_load_lowers_attainment(code: Predictor) -> None:
    light, heavy = code.at(ONE, 1.0), code.at(ONE, 7.0)
    assert light.attainment > 0.99
    assert heavy.attainment < 0.5
    assert light.ttft_p95 < heavy.ttft_p95
    assert light.running < heavy.running


def test_short_answers_want_small_chunks(code: Predictor) -> None:
    small, large = searched(code, ONE), searched(code, replace(ONE, max_num_batched_tokens=8192))
    assert small > 2 * large


def test_objectives_are_violated_above_capacity(code: Predictor) -> None:
    capacity = searched(code, ONE)
    assert code.at(ONE, 0.9 * capacity).attainment >= 0.985
    assert code.at(ONE, 1.3 * capacity).attainment < 0.99


def test_known_capacity_is_not_computed_again(code: Predictor) -> None:
    searched(code, ONE)
    runs = code.runs
    code.begin_step()
    code.searched_capacity(ONE)
    assert code.runs == runs


def test_token_gap_and_mean_objectives_differ() -> None:
    gaps = Objectives(Ttft(2.0, 1 / 8000, 0.95), Itl(0.05, ItlKind.TOKENS, 0.95))
    known = pairs(2052, 100)
    wide = replace(ONE, max_num_batched_tokens=8192)
    by_tokens, by_mean = Predictor(COST, known, gaps), Predictor(COST, known, replace(gaps, itl=Itl(0.05, share=0.95)))
    assert by_tokens.at(wide, 3.0).itl_share != by_mean.at(wide, 3.0).itl_share


def test_a_watermark_ends_preemption() -> None:
    known = pairs(1238, 221)
    predictor = Predictor(COST, known, BOTH)
    tight = Candidate(1, 512, 8192, 25_000 // 16)
    before, after = predictor.at(tight, 6.0), predictor.at(replace(tight, watermark=0.05), 6.0)
    assert before.recomputed_share > 0.015
    assert after.recomputed_share < before.recomputed_share / 2


def test_impossible_objective_has_no_capacity() -> None:
    impossible = Objectives(Ttft(1e-6, 0.0, 0.99))
    assert searched(Predictor(COST, pairs(1000, 10), impossible), ONE) == 0.0


def test_few_lengths_leave_a_capacity_unsure() -> None:
    few, many = Predictor(COST, pairs(1000, 200, 40), BOTH), Predictor(COST, pairs(1000, 200, 4000), BOTH)
    assert few.sampling_error > 0.1
    assert many.sampling_error < 0.02
    assert Predictor(COST, pairs(1000, 200, 1), BOTH).sampling_error == 1.0


def test_search_continues_over_steps_with_best_estimate() -> None:
    known = pairs(1238, 221)
    before = Predictor(COST, known, BOTH)
    was = searched(before, ONE)
    slower = replace(COST, per_token=2 * COST.per_token)
    after = Predictor(slower, known, BOTH, guesses=dict(before.capacities))
    true = searched(Predictor(slower, known, BOTH), ONE)
    after.work_left = 0
    assert after.searched_capacity(ONE) is None
    estimates, found = [after.capacities[ONE]], None
    while found is None:
        after.begin_step()
        found = after.searched_capacity(ONE)
        estimates.append(after.capacities[ONE])
        assert after.work_left > -MOST_REQUESTS
    assert estimates[0] == pytest.approx(was)  # the guess, until something is known
    errors = [abs(each / true - 1) for each in estimates]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.07
    assert len(estimates) <= 8


def test_predictions_are_spread_over_steps() -> None:
    predictor = Predictor(COST, pairs(1238, 221), BOTH)
    four = replace(ONE, replicas=4)
    budgets = [replace(four, max_num_batched_tokens=budget) for budget in (256, 512, 1024, 2048, 4096, 8192)]
    answers: list[bool | None] = [None]
    turns = 0
    while None in answers:
        predictor.begin_step()
        answers = [predictor.holds_rate(one, 14.0) for one in budgets]
        assert predictor.work_left > -MOST_REQUESTS
        turns += 1
    assert 1 < turns <= 1 + 6 * MOST_REQUESTS // WORK_PER_STEP
    predictor.begin_step()
    assert predictor.holds_rate(budgets[0], 13.5) in (answers[0], True)  # known without another probe
    assert predictor.work_left == WORK_PER_STEP or not answers[0]


@pytest.mark.parametrize(
    ("probes", "rate", "holds_load"),
    [
        ([], 5.0, None),
        ([(4.0, True)], 3.9, True),
        ([(4.0, True)], 4.1, None),
        ([(4.0, False)], 4.1, False),
        ([(4.0, False)], 3.9, None),
        ([(4.0, True), (6.0, False)], 5.0, None),
    ],
)
def test_bracket_holds_is_none_between_known_rates(
    probes: list[tuple[float, bool]], rate: float, holds_load: bool | None
) -> None:
    bracket = Bracket(1.15)
    for seen, is_held in probes:
        bracket.record(seen, is_held=is_held)
    assert bracket.holds(rate) is holds_load


@pytest.mark.parametrize("true", [0.3, 4.9, 5.0, 80.0])
def test_a_search_ends_at_the_highest_rate_that_is_held(true: float) -> None:
    bracket, snapshots = Bracket(1.15), 0
    while not bracket.is_narrow:
        rate = bracket.next_rate(5.0)
        if snapshots:
            bracket.widen()
        bracket.record(rate, is_held=rate <= true)
        snapshots += 1
    assert true / (1 + TOLERANCE) <= bracket.best(5.0) <= true
    assert snapshots <= 16


@pytest.mark.parametrize("rate", [2.0, 3.5, 4.2, 4.6, 6.0])
@pytest.mark.parametrize("objectives", [BOTH, Objectives(Ttft(2.0), Itl(0.05, ItlKind.TOKENS, 0.9))])
def test_a_verdict_is_that_of_the_whole_prediction(rate: float, objectives: Objectives) -> None:
    load = Load.drawn(pairs(2052, 27), variation=1.0, count=900)
    whole = predict(ONE, COST, load, rate, objectives)
    is_held, served = attains(ONE, COST, load, rate, objectives, 0.97)
    assert is_held == (whole.attainment >= 0.97)
    assert served <= 900
    if rate > 5:
        assert served < 600  # decided long before the end


@pytest.mark.parametrize(("kv_blocks", "rate"), [(62_500, 20.0), (450, 14.0)], ids=["room", "preemption"])
def test_lazy_least_request_routing_equals_full_simulation(kv_blocks: int, rate: float) -> None:
    """Only replicas in which something may have ended are simulated for an arrival; the result is the same."""
    three = replace(ONE, replicas=3, kv_blocks=kv_blocks)
    load = Load.drawn(pairs(600, 150), variation=1.5, count=900)
    engines = [EngineModel(COST, EngineModelPolicy(512, 1024), KvBlocks(kv_blocks, 16)) for _ in range(3)]
    at, sent = 0.0, []
    for pair, gap in zip(load.pairs, load.gaps, strict=True):
        at += gap / rate
        for engine in engines:
            engine.run_until(at)
        counts = [engine.in_flight(at) for engine in engines]
        sent.append(Sequence(at, pair.prompt, pair.output))
        engines[counts.index(min(counts))].add(sent[-1])
    for engine in engines:
        engine.drain()
    judged = sent[180:]
    prediction = predict(three, COST, load, rate, BOTH)
    met = sum(BOTH.is_met(prompt=s.num_prompt, ttft=s.ttft, mean_gap=s.mean_gap) for s in judged)
    assert prediction.attainment == met / len(judged)
    assert prediction.ttft_p95 == pytest.approx(sorted(s.ttft or 0.0 for s in judged)[int(0.95 * len(judged))])
    assert prediction.itl_p95 == pytest.approx(sorted(s.mean_gap or 0.0 for s in judged if s.mean_gap)[-37], rel=0.02)
    if kv_blocks < 10_000:
        assert prediction.recomputed_share > 0.01


def test_clients_that_wait_send_less_where_they_are_served_worse() -> None:
    load = Load.drawn(pairs(300, 100), variation=1.0, count=900)
    found = [InFlightRequest(1.0, 300, 100, 10 * (i % 9)) for i in range(32)]
    easy = Objectives(Ttft(1000.0))
    many = predict_clients(ONE, COST, load, 10.0, easy, found)
    few = predict_clients(replace(ONE, max_num_seqs=4), COST, load, 10.0, easy, found)
    assert many.attainment == few.attainment == 1.0
    assert few.good_share < 0.5 * many.good_share
    per_second = 10.0 * few.good_share  # four at a time, without other delays
    step = COST.seconds(4, 4, 4 * 350, 4 * 350)
    assert per_second == pytest.approx(4 / (100 * step), rel=0.25)


def test_good_share_of_open_loop_load_equals_attainment() -> None:
    load = Load.drawn(pairs(300, 100), variation=1.0, count=900)
    predictor = predict(ONE, COST, load, 3.0, BOTH)
    assert predictor.good_share == predictor.attainment


def test_requests_in_flight_worsen_predictions() -> None:
    small = replace(ONE, kv_blocks=2000)
    empty = Predictor(COST, pairs(500, 300), BOTH)
    full = Predictor(COST, empty.pairs, BOTH)
    full.begin_step(lambda: [InFlightRequest(5.0, 500, 2000, 400)] * 60)
    before, then = empty.at(small, 1.0), full.at(small, 1.0)
    assert then.ttft_p95 > 2 * before.ttft_p95
    assert then.recomputed_share > before.recomputed_share
    assert searched(full, small) == searched(empty, small)  # capacities start with empty replicas


def test_each_simulated_replica_has_as_much_to_do_as_a_real_one() -> None:
    asked: list[int] = []

    def there() -> list[InFlightRequest]:
        asked.append(1)
        return [InFlightRequest(1.0, 100, 50, 10)] * 80

    predictor = Predictor(COST, pairs(1000, 10), BOTH)
    predictor.begin_step(there)
    many, four = replace(ONE, replicas=8), replace(ONE, replicas=4)
    assert len(predictor.found_by(four, many)) == 40
    assert len(predictor.found_by(four, four)) == 80
    assert asked == [1]


def test_mean_work_grows_with_output_length() -> None:
    few, many = Predictor(COST, pairs(1000, 200), BOTH), Predictor(COST, pairs(1000, 400), BOTH)
    assert 1.3 < many.mean_work / few.mean_work < 2.0


def asked(predictor: Predictor, tokens: int, rate: float = 1.0) -> tuple[bool, int]:
    """Return whether the objectives are attained with this many tokens in two requests in flight, and the simulations
    that it took.
    """
    runs = predictor.runs
    predictor.begin_step(lambda: [InFlightRequest(1.0, tokens // 2, tokens, 1)] * 2)
    return predictor.attains_after(ONE, rate, 120.0, 0.98).is_attained, predictor.runs - runs


def test_answers_are_reused_for_some_steps() -> None:
    predictor = Predictor(COST, pairs(600, 150), BOTH)
    found = [asked(predictor, 10_000) for _ in range(2 * (ANSWER_STEPS + 1))]
    assert found == [(True, 1), *[(True, 0)] * ANSWER_STEPS] * 2


def test_answers_are_reused_only_for_load_that_they_decide() -> None:
    predictor = Predictor(COST, pairs(600, 150), BOTH)
    assert [asked(predictor, tokens)[1] for tokens in (10_000, 10_400, 10_700)] == [1, 0, 1]
    assert [asked(predictor, 10_000, rate)[1] for rate in (1.2, 0.5, 1.0)] == [1, 0, 0]
    assert [asked(predictor, 10_000, rate) for rate in (100.0, 120.0, 90.0)] == [(False, 1), (False, 0), (False, 1)]


def test_requests_in_flight_decide_the_answer() -> None:
    """Long prompts wait: the same rate is attained without them, and not while they are computed."""
    predictor = Predictor(COST, pairs(600, 150), BOTH)
    predictor.begin_step(lambda: [InFlightRequest(1.0, 100_000, 10, 0)] * 20)
    assert not predictor.attains_after(ONE, 2.0, 60.0, 0.98).is_attained
    predictor.begin_step(lambda: ())
    assert predictor.attains_after(ONE, 2.0, 60.0, 0.98).is_attained


def test_capacity_of_long_answers_begins_in_equilibrium() -> None:
    """Answers of 2,000 tokens take a minute: from empty replicas, 900 requests end before the KV cache is full."""
    known = pairs(2100, 2000)
    reasoning = Objectives(Ttft(4.0, 1 / 4000, 0.99), Itl(0.08, share=0.99))
    one = replace(ONE, max_num_batched_tokens=8192)
    capacity = searched(Predictor(COST, known, reasoning), one)
    long = Load.drawn(known, variation=1.0, count=9000)
    assert attains(one, COST, long, 0.9 * capacity, reasoning, 0.97)[0]
    assert not attains(one, COST, long, 1.25 * capacity, reasoning, 0.97)[0]
