"""The token budget moves for more than what chance tells apart, and turns back for twice that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
from trimtab_operator.tuner.foresight import Candidate, Foresight
from trimtab_operator.tuner.knobs import Knob
from trimtab_operator.tuner.moves import Decision, Move, Reason
from trimtab_operator.tuner.objectives import Objectives, Ttft
from trimtab_operator.tuner.observation import observe
from trimtab_operator.tuner.observation.track import Patience, Track
from trimtab_operator.tuner.rules.budget import better_budget
from trimtab_operator.tuner.settings import Mode, Settings
from trimtab_operator.tuner.situation import Range, Situation
from trimtab_operator.tuner.state import Memory
from trimtab_operator.tuner.twin import StepCost
from tuner_looks import KNOBS, a_look, a_sample

NOW = 10_000.0
BUDGET = Knob.MAX_NUM_BATCHED_TOKENS


@dataclass
class SmallHoldMore:
    """Foresight by which every budget below 8,192 holds so many times as much."""

    gain: float
    sampling_error: float
    unknown: tuple[int, ...] = ()

    def capacity(self, candidate: Candidate) -> float:
        return 10.0 * (self.gain if candidate.max_num_batched_tokens < 8192 else 1.0)

    def capacity_later(self, candidate: Candidate) -> float | None:
        return None if candidate.max_num_batched_tokens in self.unknown else self.capacity(candidate)

    def as_known(self, candidate: Candidate) -> float:
        return self.capacity(candidate)

    def attains_later(self, candidate: Candidate, rate: float) -> bool:
        return self.capacity(candidate) >= rate


def wanted(
    gain: float, *, error: float, history: tuple[Decision, ...] = (), unknown: tuple[int, ...] = ()
) -> Move | None:
    tracks: dict[str, Track] = {}
    for now in (NOW - 30, NOW - 15, NOW):
        observation, tracks = observe(tracks, [a_look(sample=a_sample(now))], now=now, patience=Patience())
    window, ledger = observation.total(seconds=60.0), observation.trusted[0].ledger
    assert window is not None
    assert ledger is not None
    promised = Objectives(Ttft(2.0))
    return better_budget(
        Situation(
            now=NOW,
            settings=Settings(Mode.AUTO, promised, starts=KNOBS),
            memory=Memory(history=history),
            observation=observation,
            window=window,
            ranges={BUDGET: Range(8192, 64, 8192, True)},
            ledger=ledger,
            objectives=promised,
            cost=StepCost(8e-3, 6e-5, 3e-5, 4e-9),
            foresight=cast("Foresight", SmallHoldMore(gain, error, unknown)),
            rate=5.0,
            replicas=1,
            coming=0,
            attained=None,
        )
    )


@pytest.mark.parametrize(
    ("gain", "error", "moves"),
    [
        (1.04, 0.001, False),
        (1.06, 0.001, True),
        (1.06, 0.03, False),  # so few lengths are known that 9 % may be chance
        (1.10, 0.03, True),
    ],
)
def test_a_gain_that_chance_may_have_made_moves_nothing(gain: float, error: float, moves: bool) -> None:
    assert (wanted(gain, error=error) is not None) is moves


@pytest.mark.parametrize(("gain", "moves"), [(1.15, False), (1.20, True)])
def test_who_has_just_raised_it_needs_twice_as_much_to_lower_it(gain: float, moves: bool) -> None:
    raised = Move(Reason.CHUNKS_TOO_SMALL, BUDGET, 4096, 8192)
    history = (Decision("a", NOW - 600, raised, "raised"),)
    assert (wanted(gain, error=0.03, history=history) is not None) is moves


@pytest.mark.parametrize("unknown", [8192, 256], ids=["the present", "the best of the others"])
def test_what_is_still_searched_is_not_compared(unknown: int) -> None:
    assert wanted(2.0, error=0.001) is not None
    assert wanted(2.0, error=0.001, unknown=(unknown,)) is None
