"""The token budget changes only for a gain beyond chance, and reverses for twice that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.explanation import sentence_of
from trimtab_operator.tuner.load.clients import Clients, Count
from trimtab_operator.tuner.moves import Decision, Move, Reason
from trimtab_operator.tuner.objectives import Itl, Objectives, Ttft
from trimtab_operator.tuner.observation import observe
from trimtab_operator.tuner.observation.track import FaultTimeouts, Track
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.prediction import Candidate, Prediction, Predictor
from trimtab_operator.tuner.rules.budget import choose_token_budget
from trimtab_operator.tuner.settings import Mode, Settings
from trimtab_operator.tuner.situation import Range, Situation
from trimtab_operator.tuner.state import TunerState
from tuner_snapshots import PARAMETERS, make_replica_snapshot, make_sample

NOW = 10_000.0
BUDGET = Parameter.MAX_NUM_BATCHED_TOKENS


@dataclass
class SmallBudgetsHoldMore:
    """Predictor in which every budget below 8,192 holds `gain` times as much."""

    gain: float
    sampling_error: float
    unknown: tuple[int, ...] = ()

    def capacity(self, candidate: Candidate) -> float:
        return 10.0 * (self.gain if candidate.max_num_batched_tokens < 8192 else 1.0)

    def searched_capacity(self, candidate: Candidate) -> float | None:
        return None if candidate.max_num_batched_tokens in self.unknown else self.capacity(candidate)

    def known_capacity(self, candidate: Candidate) -> float:
        return self.capacity(candidate)

    def holds_rate(self, candidate: Candidate, rate: float) -> bool:
        return self.capacity(candidate) >= rate


@dataclass
class Overloaded:
    """Predictor in which no budget holds the load, with attainment and tokens for 8,192 and for less."""

    kept: tuple[float, float]
    """Shares of requests that attain the objectives."""
    tokens: tuple[float, float]

    sampling_error: float = 0.01

    def capacity(self, _candidate: Candidate) -> float:
        return 0.657

    def searched_capacity(self, candidate: Candidate) -> float:
        return self.capacity(candidate)

    def known_capacity(self, candidate: Candidate) -> float:
        return self.capacity(candidate)

    def holds_rate(self, _candidate: Candidate, rate: float) -> bool:
        return rate <= 0.657

    def at(self, candidate: Candidate, _rate: float) -> Prediction:
        index = int(candidate.max_num_batched_tokens < 8192)
        kept = self.kept[index]
        return Prediction(kept, kept, kept, 1.0, 2.0, 0.05, 0.1, 0.0, self.tokens[index], 10.0, 900, kept)


OBJECTIVES = Objectives(Ttft(2.0))
DEFAULTS = Objectives(Ttft(0.1), Itl(0.05), are_given=False)
CLOSED_LOOP = Clients(tuple(Count(1, 16, 6, 9) for _ in range(4)))


def wanted_by(
    predictor: SmallBudgetsHoldMore | Overloaded, state: TunerState | None = None, objectives: Objectives = OBJECTIVES
) -> Move | None:
    tracks: dict[str, Track] = {}
    for now in (NOW - 30, NOW - 15, NOW):
        observation, tracks = observe(
            tracks, [make_replica_snapshot(sample=make_sample(now))], now=now, timeouts=FaultTimeouts()
        )
    window, ledger = observation.total(seconds=60.0), observation.trusted[0].ledger
    assert window is not None
    assert ledger is not None
    return choose_token_budget(
        Situation(
            now=NOW,
            settings=Settings(Mode.AUTO, objectives, starts=PARAMETERS),
            state=state or TunerState(),
            observation=observation,
            window=window,
            ranges={BUDGET: Range(8192, 64, 8192, True)},
            ledger=ledger,
            objectives=objectives,
            cost=StepCost(8e-3, 6e-5, 3e-5, 4e-9),
            predictor=cast("Predictor", predictor),
            rate=5.0,
            replicas=1,
            starting=0,
            attained=None,
        )
    )


def wanted(
    gain: float, *, error: float, history: tuple[Decision, ...] = (), unknown: tuple[int, ...] = ()
) -> Move | None:
    return wanted_by(SmallBudgetsHoldMore(gain, error, unknown), TunerState(history=history))


@pytest.mark.parametrize(
    ("gain", "error", "moves"),
    [
        (1.04, 0.001, False),
        (1.06, 0.001, True),
        (1.06, 0.03, False),  # with so few lengths, 9 % may be chance
        (1.10, 0.03, True),
    ],
)
def test_gain_within_length_error_moves_nothing(gain: float, error: float, moves: bool) -> None:
    assert (wanted(gain, error=error) is not None) is moves


@pytest.mark.parametrize(("gain", "moves"), [(1.15, False), (1.20, True)])
def test_reversal_needs_twice_the_gain(gain: float, moves: bool) -> None:
    raised = Move(Reason.CHUNKS_TOO_SMALL, BUDGET, 4096, 8192)
    history = (Decision("a", NOW - 600, raised, "raised"),)
    assert (wanted(gain, error=0.03, history=history) is not None) is moves


@pytest.mark.parametrize("unknown", [8192, 256], ids=["the present", "the best of the others"])
def test_unknown_capacities_are_not_compared(unknown: int) -> None:
    assert wanted(2.0, error=0.001) is not None
    assert wanted(2.0, error=0.001, unknown=(unknown,)) is None


@pytest.mark.parametrize("clients", [Clients(), CLOSED_LOOP], ids=["open loop", "closed loop"])
def test_default_objectives_do_not_decide_under_overload(clients: Clients) -> None:
    """A fifth of the requests attains the defaults, a quarter with another budget: not a reason to change."""
    state = TunerState(clients=clients)
    assert wanted_by(Overloaded((0.207, 0.245), (100.0, 100.5)), state, DEFAULTS) is None
    more = wanted_by(Overloaded((0.207, 0.245), (100.0, 105.0)), state, DEFAULTS)
    assert more is not None
    assert "105 tokens/s instead of 100, and no objective is set" in sentence_of(more, Mode.AUTO)


def test_sentence_contains_deciding_figures() -> None:
    overload = Overloaded((0.207, 0.245), (100.0, 100.0))
    stream, clients = wanted_by(overload), wanted_by(overload, TunerState(clients=CLOSED_LOOP))
    assert stream is not None
    assert clients is not None
    assert "24.5% of requests within the objectives instead of 20.7%" in sentence_of(stream, Mode.AUTO)
    assert "1.23 requests/s within the objectives instead of 1.03" in sentence_of(clients, Mode.AUTO)


def test_gain_within_sampling_error_moves_nothing() -> None:
    assert wanted_by(Overloaded((0.50, 0.53), (100.0, 100.0))) is None  # a standard error is 1.7 %


@pytest.mark.parametrize(("after", "moves"), [(0.855, False), (0.90, True)])
def test_reversal_under_overload_needs_twice_the_gain(after: float, moves: bool) -> None:
    """A fluctuating queue once reversed it twice within six minutes."""
    raised = Move(Reason.CHUNKS_TOO_SMALL, BUDGET, 1024, 8192)
    overload = Overloaded((0.83, after), (100.0, 100.0))
    just, lately, long_ago = (
        TunerState(history=(Decision("a", NOW - ago, raised, "raised"),)) for ago in (590, 700, 2000)
    )
    assert wanted_by(overload, just) is None  # no second reversal in ten minutes
    assert (wanted_by(overload, lately) is not None) is moves
    assert wanted_by(overload, long_ago) is not None
