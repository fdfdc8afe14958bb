"""The two preemption rules as a table: what is moved, how far, and what is said."""

from __future__ import annotations

import pytest
from trimtab_operator.tuner.preemptions.decision import Move, decide, round_down
from trimtab_operator.tuner.preemptions.diagnosis import KnobRange, Situation
from trimtab_operator.tuner.preemptions.explanation import explain
from trimtab_operator.tuner.preemptions.observation import EngineLoad, Knob, Pressure
from trimtab_operator.tuner.preemptions.state import Mode, Reason

UTILIZATION, SEQS, TOKENS = Knob.GPU_MEMORY_UTILIZATION, Knob.MAX_NUM_SEQS, Knob.MAX_NUM_BATCHED_TOKENS
ROOM = KnobRange(0.74, 0.7, 0.95, is_live=True)
NO_ROOM = KnobRange(0.95, 0.7, 0.95, is_live=True)
FIXED = KnobRange(0.74, 0.74, 0.74, is_live=False)


def a_situation(
    *,
    utilization: KnobRange | None = NO_ROOM,
    seqs: KnobRange | None = None,
    tokens: KnobRange | None = None,
    running: float = 8,
    waiting: float = 8,
    blocks: int = 151,
    blocks_per_request: float = 18,
    max_model_len: int = 2048,
) -> Situation:
    latest = EngineLoad(60, 1, 37, 5000, running, waiting, 0.98, blocks, 148, 16, 737_280, 1_572_864_000)
    worst = Pressure(
        group="smollm2-0",
        seconds=60,
        preemptions=37,
        generated_tokens=5000,
        intervals_with_preemption=5,
        is_recent=True,
        demand=running + waiting,
        running=running,
        waiting=waiting,
        kv_usage_peak=0.98,
        running_when_full=running,
        blocks_per_request=blocks_per_request,
        latest=latest,
    )
    ranges = {
        SEQS: seqs or KnobRange(32, 1, 64, is_live=True),
        TOKENS: tokens or KnobRange(2048, 64, 4096, is_live=True),
    }
    if utilization is not None:
        ranges[UTILIZATION] = utilization
    return Situation(worst, ranges, max_model_len)


def change(move: Move) -> tuple[Knob | None, float | None, float | None]:
    return move.knob, move.before, move.after


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        # headroom: the waiting requests want 281 blocks more, 0.13 of the device; 0.6 of the headroom at most
        (a_situation(utilization=ROOM), (UTILIZATION, 0.74, 0.86)),
        # few requests wait: a step of the least size, 0.35 of the headroom
        (a_situation(utilization=ROOM, waiting=0), (UTILIZATION, 0.74, 0.81)),
        # little headroom is taken whole
        (a_situation(utilization=KnobRange(0.91, 0.7, 0.95, True)), (UTILIZATION, 0.91, 0.95)),
        (a_situation(utilization=KnobRange(0.945, 0.7, 0.95, True)), (UTILIZATION, 0.945, 0.95)),
        # at the bound, fixed by a flag, or unknown to the engine: fewer sequences, from those that the cache holds
        (a_situation(utilization=NO_ROOM), (SEQS, 32, 6)),
        (a_situation(utilization=FIXED), (SEQS, 32, 6)),
        (a_situation(utilization=None), (SEQS, 32, 6)),
        # less than one KV block of headroom is none
        (a_situation(utilization=KnobRange(0.9499, 0.7, 0.95, True)), (SEQS, 32, 6)),
        # multiplicative, from the present value when that is the smaller one
        (a_situation(seqs=KnobRange(6, 1, 64, True)), (SEQS, 6, 4)),
        (a_situation(seqs=KnobRange(2, 1, 64, True)), (SEQS, 2, 1)),
        # never below the bound …
        (a_situation(seqs=KnobRange(32, 12, 64, True)), (SEQS, 32, 12)),
        # … nor below what fits whatever the requests' lengths: 600 blocks hold 4 requests of 128 blocks
        (a_situation(seqs=KnobRange(5, 1, 64, True), blocks=600, blocks_per_request=128), (SEQS, 5, 4)),
        # the sequences at their floor or pinned: the token budget
        (a_situation(seqs=KnobRange(1, 1, 64, True)), (TOKENS, 2048, 1024)),
        (a_situation(seqs=KnobRange(32, 32, 32, True)), (TOKENS, 2048, 1024)),
        (a_situation(seqs=KnobRange(1, 1, 64, True), tokens=KnobRange(100, 64, 4096, True)), (TOKENS, 100, 64)),
        # everything at its bound
        (a_situation(seqs=KnobRange(1, 1, 64, True), tokens=KnobRange(64, 64, 64, True)), (None, None, None)),
    ],
)
def test_the_first_rule_that_can_move_something_does(
    situation: Situation, expected: tuple[Knob | None, float | None, float | None]
) -> None:
    assert change(decide(situation)) == expected


def test_a_pinned_utilisation_is_no_headroom() -> None:
    assert decide(a_situation(utilization=KnobRange(0.8, 0.8, 0.8, True))).reason is Reason.TOO_MANY_SEQS


@pytest.mark.parametrize(
    ("value", "above", "rounded"),
    [(0.8667, 0.74, 0.86), (0.7449, 0.74, 0.7449), (0.90001, 0.89, 0.9), (0.7, 0.6, 0.7)],
)
def test_utilisations_are_rounded_down_to_what_people_read_unless_that_undoes_the_step(
    value: float, above: float, rounded: float
) -> None:
    assert round_down(value, above=above) == rounded


def test_a_raise_reads_as_a_sentence_with_its_numbers() -> None:
    situation = a_situation(utilization=ROOM)
    assert explain(decide(situation), situation, Mode.AUTO) == (
        "Raised gpu_memory_utilization from 0.74 to 0.86: 37 preemptions in 60 s (98% of the KV cache used) and the "
        "device has 315 MiB of headroom; expect about 4,096 more KV tokens."
    )


def test_a_recommendation_is_in_the_imperative() -> None:
    situation = a_situation(utilization=ROOM)
    assert explain(decide(situation), situation, Mode.RECOMMEND).startswith("Raise gpu_memory_utilization from 0.74")


def test_fewer_sequences_read_as_a_sentence_with_the_reason_why_memory_was_not_raised() -> None:
    situation = a_situation()
    assert explain(decide(situation), situation, Mode.AUTO) == (
        "Lowered max_num_seqs from 32 to 6: 37 preemptions in 60 s (98% of the KV cache used), gpu_memory_utilization "
        "may not rise above 0.95, and the KV cache holds about 8 requests of 18 blocks; expect at most 6 at once, the "
        "others wait their turn instead of being recomputed."
    )


def test_a_smaller_budget_reads_as_a_sentence() -> None:
    situation = a_situation(utilization=FIXED, seqs=KnobRange(1, 1, 64, True))
    sentence = explain(decide(situation), situation, Mode.AUTO)
    assert sentence.startswith("Lowered max_num_batched_tokens from 2,048 to 1,024: 37 preemptions in 60 s")
    assert "the size of the KV cache is fixed" in sentence


def test_saturation_names_the_bounds_and_what_is_left_to_do() -> None:
    situation = a_situation(seqs=KnobRange(1, 1, 64, True), tokens=KnobRange(64, 64, 64, True))
    sentence = explain(decide(situation), situation, Mode.AUTO)
    assert sentence.startswith("Saturated: 37 preemptions in 60 s")
    assert "max_num_seqs 1" in sentence
    assert "add replicas" in sentence
