"""Figures in sentences differ as printed, and decisions gain more than chance."""

from __future__ import annotations

import functools
import random
import re
from dataclasses import dataclass, replace
from typing import cast

import pytest
from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.explanation import figure, format_distinct, percent, sentence_of, why
from trimtab_operator.tuner.load.clients import Clients, Count
from trimtab_operator.tuner.moves import Decision, Expectation, Measure, Move, Reason
from trimtab_operator.tuner.objectives import Itl, Objectives, Ttft
from trimtab_operator.tuner.observation import Observation, observe
from trimtab_operator.tuner.observation.track import FaultTimeouts, Track
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.prediction import Candidate, Prediction, Predictor
from trimtab_operator.tuner.rules import LIVE_RULES
from trimtab_operator.tuner.settings import Mode, Settings
from trimtab_operator.tuner.situation import Range, Situation
from trimtab_operator.tuner.state import TunerState
from tuner_snapshots import PARAMETERS, make_replica_snapshot, make_sample

NOW = 10_000.0
CLOSED_LOOP = Clients(tuple(Count(1, 16, 6, 9) for _ in range(4)))
DIFFERING_FIGURES = (
    re.compile(r"from ([\d.,]+%?)[^;:]*? to ([\d.,]+%?)"),
    re.compile(r"([\d.,]+%?) [^;:]*?instead of ([\d.,]+%?)"),
    re.compile(r"takes ([\d.,]+) ms; the ITL objective is ([\d.,]+) ms"),
)


@dataclass
class RandomPredictor:
    """Predictor that rates each candidate at random."""

    seed: int
    spread: float
    rate: float
    is_closed_loop: bool

    def at(self, candidate: Candidate, _rate: float) -> Prediction:
        chance = self._chance(candidate)
        scale = 10 ** self._chance("scale").uniform(-1, 3)
        met = min(1.0, max(0.0, self._chance("met").random() + chance.gauss(0, self.spread)))
        good = met * max(0.0, 1 + chance.gauss(0, self.spread)) if self.is_closed_loop else met
        ttft, twice = scale * (1 + abs(chance.gauss(0, self.spread))), abs(chance.gauss(0, self.spread))
        tokens = scale * max(0.1, 1 + chance.gauss(0, self.spread))
        return Prediction(met, met, met, ttft / 2, ttft, 0.05, 0.1, min(1.0, twice), tokens, 9.0, 900, good)

    def searched_capacity(self, candidate: Candidate) -> float:
        return self.rate * max(0.0, 1 + self._chance(candidate).gauss(-0.2, self.spread))

    def known_capacity(self, candidate: Candidate) -> float:
        return self.searched_capacity(candidate)

    def holds_rate(self, candidate: Candidate, rate: float) -> bool:
        return self.searched_capacity(candidate) >= rate

    @property
    def sampling_error(self) -> float:
        return 0.02

    def _chance(self, of: object) -> random.Random:
        return random.Random(f"{self.seed} {of}")


def make_observation(*, is_pressed: bool, waits_for_slots: bool) -> Observation:
    tracks: dict[str, Track] = {}
    for now in (NOW - 30, NOW - 15, NOW):
        sample = make_sample(
            now,
            kv_usage=0.99 if is_pressed else 0.4,
            preemptions={"capacity": is_pressed * now},
            recomputed_tokens=20.0 * is_pressed * now,
            blocked_seconds={"seqs": 0.3 * waits_for_slots * now},
        )
        observation, tracks = observe(tracks, [make_replica_snapshot(sample=sample)], now=now, timeouts=FaultTimeouts())
    return observation


OBSERVATIONS = [
    make_observation(is_pressed=is_pressed, waits_for_slots=waits_for_slots)
    for is_pressed, waits_for_slots in ((True, False), (True, True), (False, True), (False, False))
]


def make_situation(rng: random.Random) -> Situation:
    """Return a random engine: full or not, with or without objectives, headroom and closed-loop clients."""
    observation = rng.choice(OBSERVATIONS)
    window, ledger = observation.total(seconds=60.0), observation.trusted[0].ledger
    assert window is not None
    assert ledger is not None
    cost, rate = StepCost(8e-3, 6e-5, 3e-5, 4e-9), 10 ** rng.uniform(-2, 2)
    gap = rng.choice([0.00836, 0.0083, 0.05])
    objectives = rng.choice(
        [Objectives(Ttft(2.0)), Objectives(itl=Itl(gap)), Objectives(Ttft(0.1), Itl(gap), are_given=False)]
    )
    clients = rng.choice([Clients(), CLOSED_LOOP])
    predictor = RandomPredictor(
        rng.randrange(1 << 30), rng.choice([0.0, 0.003, 0.05, 0.3]), rate, clients.are_closed_loop
    )
    return Situation(
        now=NOW,
        settings=Settings(Mode.AUTO, objectives, starts=PARAMETERS),
        state=TunerState(clients=clients, quiet_since=rng.choice([NOW, NOW - 4000.0]), starts=PARAMETERS),
        observation=observation,
        window=window,
        ranges={
            Parameter.GPU_MEMORY_UTILIZATION: Range(rng.choice([0.8, 0.9]), 0.5, rng.choice([0.9, 0.9012, 0.95]), True),
            Parameter.WATERMARK: Range(rng.choice([0.0, 0.05]), 0.0, 0.1, True),
            Parameter.MAX_NUM_SEQS: Range(rng.choice([16, 64]), 1, 96, True),
            Parameter.MAX_NUM_BATCHED_TOKENS: Range(2048, 64, 8192, True),
        },
        ledger=replace(
            ledger,
            blocks_total=rng.choice([50, 10_000]),
            free_bytes=rng.choice([0, 3_000_000_000]),
            bytes_per_block=rng.choice([10**6, 10**9]),
        ),
        objectives=objectives,
        cost=cost,
        predictor=cast("Predictor", predictor),
        rate=rate,
        replicas=1,
        starting=0,
        attained=rng.choice([None, 0.5]),
    )


@functools.cache
def all_moves() -> list[tuple[Situation, Move]]:
    """Return the moves of all rules in 400 situations."""
    situations = [make_situation(random.Random(seed)) for seed in range(400)]
    return [(s, move) for s in situations for rule in LIVE_RULES if (move := rule(s)) is not None]


def test_differing_figures_differ_as_printed() -> None:
    assert {move.reason for _, move in all_moves()} >= {
        Reason.KV_CACHE_TOO_SMALL, Reason.KV_CACHE_LARGER_THAN_NEEDED, Reason.ADMITTED_TOO_EARLY,
        Reason.WATERMARK_NOT_NEEDED, Reason.CHUNKS_TOO_LARGE, Reason.CHUNKS_TOO_SMALL, Reason.BATCH_TOO_LARGE,
        Reason.TOO_FEW_SEQUENCE_SLOTS,
    }  # fmt: skip
    for _, move in all_moves():
        text = why((Decision("id", NOW, move, sentence_of(move, Mode.AUTO)),), None)
        pairs = [pair for pattern in DIFFERING_FIGURES for pair in pattern.findall(text)]
        assert pairs, text
        assert all(one != other for one, other in pairs), text


def test_moves_gain_more_than_sampling_error() -> None:
    """Token budgets and fewer slots change only for such a gain, not for defaults that most requests violate anyway."""
    for situation, move in all_moves():
        if move.reason not in (Reason.CHUNKS_TOO_LARGE, Reason.CHUNKS_TOO_SMALL, Reason.BATCH_TOO_LARGE):
            continue
        gain = move.expected[0]
        clear = 0.02 if gain.measure is Measure.ATTAINMENT else 0.02 * situation.rate
        if gain.measure in (Measure.CAPACITY, Measure.TOKENS):
            clear = 0.02 * gain.before
        assert gain.after >= gain.before + clear - 1e-9, move
        is_served_worse = not situation.objectives.are_given and situation.state.clients.are_closed_loop
        if is_served_worse:
            assert gain.measure in (Measure.CAPACITY, Measure.TOKENS), move


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (0.657, 0.6571, ("0.657", "0.6571")),
        (0.5, 0.657, ("0.5", "0.657")),
        (1234.0, 1302.0, ("1,234", "1,302")),
        (99.96, 100.0, ("99.96", "100")),
    ],
)
def test_format_distinct_adds_digits_until_figures_differ(one: float, other: float, texts: tuple[str, str]) -> None:
    assert format_distinct(one, other, figure) == texts


def test_format_distinct_adds_digits_to_percentages() -> None:
    assert format_distinct(0.2071, 0.2074, percent) == ("20.71%", "20.74%")


def test_unchanged_prediction_is_reported_as_constant() -> None:
    stays = Expectation(Measure.ATTAINMENT, 0.0, 0.0, 0.0, 0.02)
    move = Move(Reason.WATERMARK_NOT_NEEDED, Parameter.WATERMARK, 0.05, 0.0, {"quiet_seconds": 1800.0}, (stays,))
    sentence = sentence_of(move, Mode.AUTO)
    assert "attainment is expected to stay at 0.0%" in sentence
    assert "stays at 0.0%" in why((Decision("id", NOW, move, sentence),), None)
