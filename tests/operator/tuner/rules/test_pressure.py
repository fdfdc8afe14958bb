"""Gain that a change against preemption needs, by kind of clients and objectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.load import Lengths, Pair
from trimtab_operator.tuner.load.clients import Clients, Count
from trimtab_operator.tuner.load.demand import Demand, Point
from trimtab_operator.tuner.objectives import Itl, Objectives, Ttft
from trimtab_operator.tuner.observation import observe
from trimtab_operator.tuner.observation.track import FaultTimeouts, Track
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.prediction import Candidate, Prediction, Predictor
from trimtab_operator.tuner.rules.watermark import raise_watermark
from trimtab_operator.tuner.settings import Mode, Settings
from trimtab_operator.tuner.situation import Range, Situation
from trimtab_operator.tuner.state import TunerState
from tuner_snapshots import PARAMETERS, make_replica_snapshot, make_sample

NOW = 10_000.0
OBJECTIVES = Objectives(Ttft(2.0))
DEFAULTS = Objectives(Ttft(0.1), Itl(0.05), are_given=False)
CLOSED_LOOP = Clients(tuple(Count(1, 16, 6, 9) for _ in range(4)))


@dataclass
class ByWatermark:
    """Predictor of good share and tokens per second, without and with a watermark."""

    good: tuple[float, float]
    tokens: tuple[float, float]
    twice: tuple[float, float] = (0.2, 0.05)
    """Shares of recomputed tokens."""

    def at(self, candidate: Candidate, _rate: float) -> Prediction:
        index = int(candidate.watermark > 0)
        good = self.good[index]
        return Prediction(good, good, good, 1.0, 2.0, 0.05, 0.1, self.twice[index], self.tokens[index], 10.0, 900, good)


def make_situation(objectives: Objectives, state: TunerState, predictor: ByWatermark | None) -> Situation:
    """Return the situation of an engine with a full cache that recomputes a tenth of its tokens."""
    tracks: dict[str, Track] = {}
    for now in (NOW - 30, NOW - 15, NOW):
        sample = make_sample(now, kv_usage=0.95, preemptions={"capacity": now}, recomputed_tokens=14.0 * now)
        observation, tracks = observe(tracks, [make_replica_snapshot(sample=sample)], now=now, timeouts=FaultTimeouts())
    window, ledger = observation.total(seconds=60.0), observation.trusted[0].ledger
    assert window is not None
    assert ledger is not None
    return Situation(
        now=NOW,
        settings=Settings(Mode.AUTO, objectives, starts=PARAMETERS),
        state=state,
        observation=observation,
        window=window,
        ranges={Parameter.WATERMARK: Range(0.0, 0.0, 0.1, True)},
        ledger=ledger,
        objectives=objectives,
        cost=StepCost(8e-3, 6e-5, 3e-5, 4e-9),
        predictor=cast("Predictor | None", predictor),
        rate=5.0,
        replicas=1,
        starting=0,
        attained=None,
    )


def is_made(objectives: Objectives, clients: Clients, predictor: ByWatermark) -> bool:
    return raise_watermark(make_situation(objectives, TunerState(clients=clients), predictor)) is not None


@pytest.mark.parametrize(("after", "made"), [(0.60, True), (0.598, True), (0.58, False)])
def test_watermark_must_not_harm_open_loop_load(after: float, made: bool) -> None:
    assert is_made(OBJECTIVES, Clients(), ByWatermark((0.60, after), (100.0, 100.0))) is made


@pytest.mark.parametrize(("after", "made"), [(0.60, False), (0.62, False), (0.66, True)])
def test_watermark_needs_clear_gain_for_closed_loop_clients(after: float, made: bool) -> None:
    """More tokens do not count if an objective is set."""
    assert is_made(OBJECTIVES, CLOSED_LOOP, ByWatermark((0.60, after), (100.0, 120.0))) is made


@pytest.mark.parametrize(("after", "made"), [(0.1, True), (0.19, False), (0.3, False)])
def test_watermark_must_reduce_recomputation(after: float, made: bool) -> None:
    assert is_made(OBJECTIVES, Clients(), ByWatermark((0.60, 0.60), (100.0, 100.0), (0.2, after))) is made


@dataclass
class ByRate(ByWatermark):
    """Predictor of a load under which a watermark does harm, up to 5 requests a second."""

    def at(self, candidate: Candidate, rate: float) -> Prediction:
        index = int(candidate.watermark > 0 and rate <= 5.0)
        good = self.good[index]
        twice = self.twice[int(candidate.watermark > 0)]
        return Prediction(good, good, good, 1.0, 2.0, 0.05, 0.1, twice, 100.0, 10.0, 900, good)


@pytest.mark.parametrize(
    ("counts", "clients", "made"),
    [
        ((75, 75, 75, 75), Clients(), False),
        ((75, 75, 150, 150), Clients(), True),  # the rate doubled half a minute ago
        ((75, 75, 150, 150), CLOSED_LOOP, False),  # closed-loop arrivals follow the responses
    ],
)
def test_risen_load_is_judged_by_the_recent_rate(counts: tuple[int, ...], clients: Clients, made: bool) -> None:
    demand = Demand()
    for index, count in enumerate(counts):
        demand = demand.with_point(Point(NOW - 45 + 15 * index, 15.0, count))
    state = TunerState(clients=clients, demand=demand)
    situation = make_situation(OBJECTIVES, state, ByRate((0.90, 0.86), (100.0, 100.0)))
    assert (raise_watermark(situation) is not None) is made


@pytest.mark.parametrize(("tokens", "made"), [(105.0, True), (101.0, False), (95.0, False)])
def test_watermark_without_objectives_needs_more_tokens(tokens: float, made: bool) -> None:
    """A full engine violates most default objectives with and without a watermark, so their small rest is chance."""
    assert is_made(DEFAULTS, CLOSED_LOOP, ByWatermark((0.02, 0.015), (100.0, tokens))) is made


@pytest.mark.parametrize(("pairs", "waits"), [((Pair(NOW - 60, 64, 192),), True), ((), False)])
def test_watermark_waits_for_predictor_if_requests_are_known(pairs: tuple[Pair, ...], waits: bool) -> None:
    state = TunerState(clients=CLOSED_LOOP, lengths=Lengths(pairs=pairs))
    assert (raise_watermark(make_situation(DEFAULTS, state, None)) is None) is waits
