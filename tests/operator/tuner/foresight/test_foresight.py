"""Predictions: the same each time, in the right order, and capacities that the replays of the reference had."""

import random
from dataclasses import replace

import pytest
from trimtab_operator.tuner.foresight import Candidate, Foresight, Found
from trimtab_operator.tuner.foresight.capacity import RUNS_PER_TURN
from trimtab_operator.tuner.load import Pair
from trimtab_operator.tuner.objectives import Itl, ItlKind, Objectives, Ttft
from trimtab_operator.tuner.twin import StepCost

COST = StepCost(8e-3, 1 / 16_000, 3e-5, 4e-9)
BOTH = Objectives(Ttft(2.0, 1 / 8000, 0.99), Itl(0.08, share=0.99))
ONE = Candidate(1, 512, 1024, 1_000_000 // 16)


def pairs(prompt: float, output: float, count: int = 2000) -> tuple[Pair, ...]:
    rng = random.Random(1)
    return tuple(
        Pair(0, 1 + int(rng.expovariate(1 / prompt)), 1 + int(rng.expovariate(1 / output))) for _ in range(count)
    )


@pytest.fixture(scope="module")
def code() -> Foresight:
    return Foresight(COST, pairs(2052, 27), BOTH, 1.0, 0.99)


def test_the_same_is_predicted_each_time(code: Foresight) -> None:
    again = Foresight(COST, code.pairs, BOTH, 1.0, 0.99)
    assert again.at(ONE, 3.0) == code.at(ONE, 3.0)


def test_more_load_is_felt(code: Foresight) -> None:
    light, heavy = code.at(ONE, 1.0), code.at(ONE, 7.0)
    assert light.attainment > 0.99
    assert heavy.attainment < 0.5
    assert light.ttft_p95 < heavy.ttft_p95
    assert light.running < heavy.running


def test_short_answers_want_small_chunks(code: Foresight) -> None:
    small, large = code.capacity(ONE), code.capacity(replace(ONE, max_num_batched_tokens=8192))
    assert small > 2 * large


def test_capacity_is_where_promises_begin_to_break(code: Foresight) -> None:
    capacity = code.capacity(ONE)
    assert code.at(ONE, 0.9 * capacity).attainment >= 0.985
    assert code.at(ONE, 1.3 * capacity).attainment < 0.99


def test_more_replicas_hold_more(code: Foresight) -> None:
    assert code.capacity(replace(ONE, replicas=3)) > 2.5 * code.capacity(ONE)
    assert code.needed(ONE, 2.2 * code.capacity(ONE), range(1, 9)) in (2, 3)


def test_asked_again_nothing_is_computed_again(code: Foresight) -> None:
    code.capacity(ONE)
    runs = code.runs
    code.capacity(ONE)
    assert code.runs == runs


def test_token_gaps_are_another_promise_than_means() -> None:
    gaps = Objectives(Ttft(2.0, 1 / 8000, 0.95), Itl(0.05, ItlKind.TOKENS, 0.95))
    known = pairs(2052, 100)
    wide = replace(ONE, max_num_batched_tokens=8192)
    by_tokens, by_mean = Foresight(COST, known, gaps), Foresight(COST, known, replace(gaps, itl=Itl(0.05, share=0.95)))
    assert by_tokens.at(wide, 3.0).itl_share != by_mean.at(wide, 3.0).itl_share


def test_a_watermark_ends_preemption() -> None:
    known = pairs(1238, 221)
    foresight = Foresight(COST, known, BOTH)
    tight = Candidate(1, 512, 8192, 25_000 // 16)
    before, after = foresight.at(tight, 6.0), foresight.at(replace(tight, watermark=0.05), 6.0)
    assert before.recomputed_share > 0.015
    assert after.recomputed_share < before.recomputed_share / 2


def test_nothing_that_cannot_be_promised_is_held() -> None:
    impossible = Objectives(Ttft(1e-6, 0.0, 0.99))
    assert Foresight(COST, pairs(1000, 10), impossible).capacity(ONE) == 0.0


def test_few_lengths_leave_a_capacity_unsure() -> None:
    few, many = Foresight(COST, pairs(1000, 200, 40), BOTH), Foresight(COST, pairs(1000, 200, 4000), BOTH)
    assert few.sampling_error > 0.1
    assert many.sampling_error < 0.02
    assert Foresight(COST, pairs(1000, 200, 1), BOTH).sampling_error == 1.0


def test_what_is_searched_anew_is_as_it_was_until_it_is_found() -> None:
    known = pairs(1238, 221)
    before = Foresight(COST, known, BOTH)
    was = before.capacity(ONE)
    slower = replace(COST, per_token=2 * COST.per_token)
    after = Foresight(slower, known, BOTH, guesses=dict(before.capacities))
    assert after.capacity(ONE) == was
    turns = 0
    while after.capacity(ONE) == was:
        runs = after.runs
        after.begin_turn()
        after.capacity(ONE)
        assert after.runs - runs <= RUNS_PER_TURN
        turns += 1
    assert turns <= 8
    assert after.capacity(ONE) == pytest.approx(Foresight(slower, known, BOTH).capacity(ONE), rel=0.07)


def test_what_can_wait_is_computed_over_some_turns() -> None:
    foresight = Foresight(COST, pairs(1238, 221), BOTH)
    budgets = [replace(ONE, max_num_batched_tokens=budget) for budget in (256, 512, 2048, 4096, 8192)]
    assert [foresight.attains_later(one, 3.0) for one in budgets].count(None) == 5 - RUNS_PER_TURN
    for _ in range(2):
        foresight.begin_turn()
        answers = [foresight.attains_later(one, 3.0) for one in budgets]
    assert None not in answers


def test_what_is_there_already_is_felt_by_those_who_come() -> None:
    small = replace(ONE, kv_blocks=2000)
    empty = Foresight(COST, pairs(500, 300), BOTH)
    full = Foresight(COST, empty.pairs, BOTH)
    full.begin_turn(lambda: [Found(5.0, 500, 2000, 400)] * 60)
    before, then = empty.at(small, 1.0), full.at(small, 1.0)
    assert then.ttft_p95 > 2 * before.ttft_p95
    assert then.recomputed_share > before.recomputed_share
    assert full.capacity(small) == empty.capacity(small)  # that of any day, not of this minute


def test_each_simulated_replica_has_as_much_to_do_as_a_real_one() -> None:
    asked: list[int] = []

    def there() -> list[Found]:
        asked.append(1)
        return [Found(1.0, 100, 50, 10)] * 80

    foresight = Foresight(COST, pairs(1000, 10), BOTH)
    foresight.begin_turn(there)
    many, four = replace(ONE, replicas=8), replace(ONE, replicas=4)
    assert len(foresight.found_by(four, many)) == 40
    assert len(foresight.found_by(four, four)) == 80
    assert asked == [1]


def test_a_capacity_of_another_mix_is_taken_to_change_as_the_work_does() -> None:
    few, many = Foresight(COST, pairs(1000, 200), BOTH), Foresight(COST, pairs(1000, 400), BOTH)
    assert 1.3 < many.mean_work / few.mean_work < 2.0
