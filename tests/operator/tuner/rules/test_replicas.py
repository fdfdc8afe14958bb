"""Replica count: conditions for raising, lowering and keeping it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from trimtab_operator.tuner.decide import TunerOutput, decide
from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.evidence import Evidence, Record
from trimtab_operator.tuner.explanation import sentence_of
from trimtab_operator.tuner.load import Forecast
from trimtab_operator.tuner.load.demand import Case, Demand, Growth, Point
from trimtab_operator.tuner.load.season import DAY_SECONDS, Season
from trimtab_operator.tuner.moves import Decision, Move, Reason, ReplicaCount
from trimtab_operator.tuner.objectives import Objectives, Ttft
from trimtab_operator.tuner.observation import Observation, observe
from trimtab_operator.tuner.observation.track import FaultTimeouts, Track
from trimtab_operator.tuner.outcomes import with_outcomes
from trimtab_operator.tuner.prediction import Candidate, Predictor
from trimtab_operator.tuner.prediction.capacity import Answer
from trimtab_operator.tuner.rules import replicas as rule
from trimtab_operator.tuner.rules.replicas import Chosen, Need, choose_replicas
from trimtab_operator.tuner.samples import Phase, ReplicaSnapshot
from trimtab_operator.tuner.scaling.behavior import Behavior, Policy, Rules, ScaleEvent, Unit
from trimtab_operator.tuner.scaling.control_law import ScalingState
from trimtab_operator.tuner.settings import Mode, Scaling, Settings
from trimtab_operator.tuner.situation import Situation
from trimtab_operator.tuner.state import TunerState
from tuner_snapshots import PARAMETERS, make_replica_snapshot, make_sample

NOW = 10_000.0
COST = StepCost(8e-3, 6e-5, 3e-5, 4e-9)
AT_ONCE = Behavior(down=Rules(stabilization_seconds=0.0))
OBJECTIVES = Objectives(Ttft(2.0, share=0.95))
UP_TO_EIGHT = Scaling(1, 8, AT_ONCE)


@dataclass
class FixedCapacity:
    """Predictor with a fixed capacity per replica; `attainment_from_here` is that of the requests in flight."""

    rate: float
    attainment_from_here: float = 1.0
    mean_work: float = 0.1
    typical_context: float = 1000.0

    def at(self, candidate: Candidate, rate: float) -> FixedCapacity:
        return self

    @property
    def attainment(self) -> float:
        return self.attainment_from_here

    def attains_after(self, candidate: Candidate, rate: float, seconds: float, level: float) -> Answer:
        share = min(1.0, self.rate * candidate.replicas / max(rate, 1e-9))
        return Answer(candidate, 0, 0, share >= 1.0, share, 0)


def serving(name: str, **changes: Any) -> list[ReplicaSnapshot]:
    return [make_replica_snapshot(name, make_sample(at, **changes), since=1.0) for at in (NOW - 30, NOW - 15, NOW)]


def seen(*replicas: list[ReplicaSnapshot]) -> Observation:
    """Return the last of three observations of these replicas."""
    tracks: dict[str, Track] = {}
    for index, now in enumerate((NOW - 30, NOW - 15, NOW)):
        observation, tracks = observe(
            tracks,
            [snapshots[min(index, len(snapshots) - 1)] for snapshots in replicas],
            now=now,
            timeouts=FaultTimeouts(),
        )
    return observation


def chosen(
    observation: Observation,
    *,
    requested: int,
    rate: float,
    each: float | None = 5.0,
    scaling: Scaling = UP_TO_EIGHT,
    began_at: float | None = 0.0,
    from_here: float = 1.0,
    growth: float = 1.0,
    forecast: Forecast | None = None,
    dip_seconds: float = 0.0,
    evidence: Evidence | None = None,
) -> Chosen:
    """Return the chosen count for a rate at which one replica holds `each` requests a second and `asked` replicas are
    requested; no requests arrived in the last `dip_seconds`.
    """
    points = tuple(Point(NOW - 15.0 * i, 15.0, 15.0 * rate * (15.0 * i >= dip_seconds)) for i in range(20))
    state = TunerState(
        demand=Demand(points[::-1]),
        growth=Growth(cases=tuple(Case(NOW, 1.0, math.log(growth)) for _ in range(200))),
        scaling=ScalingState(requested, began_at=began_at, wanted=((NOW - 15.0, 1),)),
        forecast=forecast,
        evidence=evidence or Evidence(),
    )
    settings = Settings(Mode.AUTO, OBJECTIVES, starts=PARAMETERS, scaling=scaling)
    window = observation.total(seconds=60.0)
    assert window is not None
    ledger = observation.trusted[0].ledger
    assert ledger is not None
    situation = Situation(
        now=NOW,
        settings=settings,
        state=state,
        observation=observation,
        window=window,
        ranges={},
        ledger=ledger,
        objectives=OBJECTIVES,
        cost=COST,
        predictor=None if each is None else cast("Predictor", FixedCapacity(each, attainment_from_here=from_here)),
        rate=rate,
        replicas=len(observation.ready),
        starting=len(observation.starting),
        attained=None,
    )
    return choose_replicas(state, observation, settings, OBJECTIVES, situation, now=NOW)


TWO = seen(serving("m-0"), serving("m-1"))


def test_load_above_capacity_scales_out_at_once() -> None:
    found = chosen(TWO, requested=2, rate=14.0)
    assert found.replicas == 3
    assert found.move is not None
    assert (found.move.reason, found.move.before, found.move.after) == (Reason.TOO_FEW_REPLICAS, 2, 3)
    assert (found.move.evidence["replicas_serving"], found.move.evidence["replicas_starting"]) == (2, 0)


def test_starting_replicas_are_counted() -> None:
    starting = [make_replica_snapshot("m-2", phase=Phase.STARTING, since=NOW - 20)]
    assert chosen(seen(serving("m-0"), serving("m-1"), starting), requested=3, rate=14.0).replicas == 3


def test_lower_load_scales_in_with_complete_metrics() -> None:
    assert chosen(TWO, requested=2, rate=3.0).replicas == 1


def test_no_scale_in_if_others_cannot_hold_running_requests() -> None:
    assert chosen(TWO, requested=2, rate=3.0, from_here=0.9).replicas == 2


def test_no_scale_in_with_starting_or_unreadable_replica() -> None:
    starting = [make_replica_snapshot("m-2", phase=Phase.STARTING, since=NOW - 20)]
    assert chosen(seen(serving("m-0"), serving("m-1"), starting), requested=3, rate=3.0).replicas == 3
    silent = [make_replica_snapshot("m-2", problem="no answer", since=1.0)]
    assert chosen(seen(serving("m-0"), serving("m-1"), silent), requested=3, rate=3.0).replicas == 3


def test_requested_but_unseen_replica_keeps_the_count() -> None:
    assert chosen(TWO, requested=3, rate=14.0).replicas == 3


@pytest.mark.parametrize(("since", "target"), [(NOW - 10, 8), (NOW - 40, 3)])
def test_unschedulable_replica_blocks_scale_out(since: float, target: int) -> None:
    unplaced = [make_replica_snapshot("m-2", phase=Phase.PENDING, since=since)]
    assert chosen(seen(serving("m-0"), serving("m-1"), unplaced), requested=3, rate=99.0).replicas == target


def test_unneeded_unschedulable_replica_is_removed() -> None:
    unplaced = [make_replica_snapshot("m-2", phase=Phase.PENDING, since=NOW - 40)]
    assert chosen(seen(serving("m-0"), serving("m-1"), unplaced), requested=3, rate=7.0).replicas == 2


def test_lost_replica_does_not_block_scale_in() -> None:
    lost = [make_replica_snapshot("m-2", phase=Phase.STARTING, since=NOW - 700)]
    assert chosen(seen(serving("m-0"), serving("m-1"), lost), requested=3, rate=7.0).replicas == 2


def test_no_load_scales_to_minimum_but_not_zero() -> None:
    idle = seen(serving("m-0", running=0.0), serving("m-1", running=0.0))
    assert chosen(idle, requested=2, rate=0.0).replicas == 1
    assert chosen(idle, requested=4, rate=0.0, scaling=Scaling(3, 8, AT_ONCE)).replicas == 3


def test_idle_deployment_without_predictor_scales_to_minimum() -> None:
    """For example after a restart of the operator at night."""
    idle = seen(serving("m-0", running=0.0), serving("m-1", running=0.0))
    found = chosen(idle, requested=2, rate=0.0, each=None)
    assert found.replicas == 1
    assert found.move is not None
    assert "no request arrived for a minute" in sentence_of(found.move, Mode.AUTO)
    assert chosen(TWO, requested=2, rate=0.0, each=None).replicas == 2  # requests run
    assert chosen(idle, requested=2, rate=1.0, each=None).replicas == 2  # requests arrived


def test_unattainable_objectives_do_not_scale_out() -> None:
    assert chosen(TWO, requested=2, rate=14.0, each=0.0).replicas == 2


def held(replicas: int, rate: float, *, is_attained: bool = True, at: float = NOW - 60.0) -> Evidence:
    """Return evidence about a load that this many replicas served."""
    return Evidence((Record(at, Candidate(replicas, 256, 2048, 10_000, 16, 0.0), rate, 0.1, 1000.0, is_attained),))


def test_attained_load_is_not_predicted_to_fail() -> None:
    assert chosen(TWO, requested=2, rate=14.0).replicas == 3
    assert chosen(TWO, requested=2, rate=14.0, evidence=held(2, 15.0)).replicas == 2
    assert chosen(TWO, requested=2, rate=14.0, evidence=held(2, 13.0)).replicas == 3
    assert chosen(TWO, requested=2, rate=14.0, evidence=held(2, 15.0, at=NOW - 7 * 3600.0)).replicas == 3


def test_load_that_failed_is_not_predicted_to_be_held() -> None:
    assert chosen(TWO, requested=2, rate=9.0).replicas == 2
    assert chosen(TWO, requested=2, rate=9.0, evidence=held(2, 8.0, is_attained=False)).replicas == 3
    assert chosen(TWO, requested=2, rate=4.0, evidence=held(1, 3.0, is_attained=False)).replicas == 2


def test_scaling_behavior_limits_the_count() -> None:
    slow = Behavior(up=Rules(policies=(Policy(Unit.PODS, 2, 60.0),)))
    assert chosen(TWO, requested=2, rate=99.0, scaling=Scaling(1, 8, slow)).replicas == 4


# --- in a tuner step --------------------------------------------------------------------------------------------------


def fix_need(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Make every observation need this many replicas."""
    monkeypatch.setattr(rule, "_need", lambda *_: Need(count, 3.0, 3.0, 1.0, 0.8, 0.99))


def run_ticks(state: TunerState, settings: Settings, ticks: int = 3) -> list[TunerOutput]:
    outcomes = []
    for index in range(ticks):
        now = NOW + 15.0 * index
        outcomes.append(decide([make_replica_snapshot(sample=make_sample(now), since=1.0)], state, settings, now))
        state = outcomes[-1].state
    return outcomes


SCALED = Settings(Mode.AUTO, OBJECTIVES, starts=PARAMETERS, scaling=Scaling(1, 4, AT_ONCE))


def test_auto_mode_changes_the_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_need(monkeypatch, 3)
    outcomes = run_ticks(TunerState(starts=PARAMETERS), SCALED, ticks=4)
    assert [outcome.replicas for outcome in outcomes] == [1, 3, 3, 3]
    (decision,) = (decision for outcome in outcomes for decision in outcome.decisions)
    assert (decision.reason, decision.move.before, decision.move.after) == (Reason.TOO_FEW_REPLICAS, 1, 3)
    assert outcomes[-1].state.scaling.desired == 3
    assert outcomes[-1].state.scaling.events == (ScaleEvent(NOW + 15.0, 2),)
    assert outcomes[-1].state.moved_at["replicas"] == NOW + 15.0


def test_recommend_mode_keeps_count_and_recommendation(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_need(monkeypatch, 3)
    outcomes = run_ticks(TunerState(starts=PARAMETERS), replace(SCALED, mode=Mode.RECOMMEND), ticks=6)
    assert {outcome.replicas for outcome in outcomes} == {1}
    assert sum(len(outcome.decisions) for outcome in outcomes) == 1
    standing = outcomes[-1].recommendation
    assert standing is not None
    assert standing.sentence.startswith("Raise replicas from 1 to 3: ")
    assert outcomes[-1].state.scaling.events == ()


@pytest.mark.parametrize("mode", list(Mode))
def test_bounds_apply_in_every_mode_as_a_decision(mode: Mode) -> None:
    state = TunerState(starts=PARAMETERS, scaling=ScalingState(5))
    first, second, _ = run_ticks(state, replace(SCALED, mode=mode))
    assert (first.replicas, second.replicas) == (4, 4)
    (decision,) = first.decisions
    assert (decision.reason, decision.move.before, decision.move.after) == (Reason.BOUNDS_CHANGED, 5, 4)
    assert second.decisions == ()


def test_count_is_dropped_without_scaling() -> None:
    state = TunerState(starts=PARAMETERS, scaling=ScalingState(5))
    outcome = run_ticks(state, replace(SCALED, scaling=None))[-1]
    assert outcome.replicas is None
    assert outcome.state.scaling.desired is None


# --- outcomes -------------------------------------------------------------------------------------------------


def scaled_to(after: int, before: int, at: float) -> tuple[Decision, ScaleEvent]:
    reason = Reason.TOO_FEW_REPLICAS if after > before else Reason.TOO_MANY_REPLICAS
    decision = Decision(f"{before}-{after}", at, Move(reason, ReplicaCount(), before, after), "Done.")
    return decision, ScaleEvent(at, after - before)


def outcomes_of(*done: tuple[Decision, ScaleEvent], now: float) -> list[str]:
    """Return the outcomes in the history at `now`, when two replicas are ready."""
    decisions, events = zip(*done, strict=True)
    state = TunerState(history=decisions, scaling=ScalingState(2, events=events))
    return [entry.outcome for entry in with_outcomes(state, TWO, now=now).history]


def test_outcome_reports_ready_replicas() -> None:
    assert outcomes_of(scaled_to(2, 1, NOW - 40), now=NOW) == ["2 replicas were ready after 40 s"]
    assert outcomes_of(scaled_to(3, 2, NOW - 40), now=NOW) == [""]


def test_outcome_reports_scale_in_that_was_too_early() -> None:
    back = scaled_to(1, 2, NOW - 130), scaled_to(2, 1, NOW - 40)
    assert outcomes_of(*back, now=NOW)[0] == "too early: more replicas were needed again after 90 s"
    assert outcomes_of(scaled_to(2, 3, NOW - 130), now=NOW) == [""]
    assert outcomes_of(scaled_to(2, 3, NOW - 1000), now=NOW) == ["kept: no more replicas were needed for 1000 s"]


def test_recommendation_has_no_outcome() -> None:
    decision, _ = scaled_to(2, 1, NOW - 40)
    state = TunerState(history=(decision,), scaling=ScalingState(1))
    assert with_outcomes(state, TWO, now=NOW) == state


def make_forecast(*parts: tuple[float, int], since: float | None = 1.0) -> Forecast:
    """Return a forecast without errors, from rates and their numbers of quarter-hours. The time is 02:46, and the shape
    is smoothed over an hour.
    """
    rates = tuple(rate for rate, count in parts for _ in range(count))
    exact = Growth(cases=tuple(Case(NOW, 1.0, 0.0) for _ in range(200)))
    return Forecast(Season(DAY_SECONDS, rates, (3,) * 96), exact, since, 0.05, 0.09)


def test_forecast_scales_out_before_the_load_arrives() -> None:
    rising = make_forecast((5.0, 13), (200.0, 83))
    found = chosen(TWO, requested=2, rate=9.9, forecast=rising)
    assert found.replicas > 2
    assert found.move is not None
    sentence = sentence_of(found.move, Mode.AUTO)
    assert "the forecast is" in sentence
    assert "at 02:49 UTC, based on the previous 3 days" in sentence
    assert chosen(TWO, requested=2, rate=9.9).replicas == 2


def test_forecast_decides_scale_in() -> None:
    hold = Scaling(1, 8)
    level, rising, falling = (
        make_forecast((before, 13), (after, 83)) for before, after in ((5, 5), (5, 200), (200, 5))
    )
    assert chosen(TWO, requested=2, rate=4.4, scaling=hold, forecast=level).replicas == 1
    assert chosen(TWO, requested=2, rate=4.4, scaling=hold, forecast=rising).replicas >= 2
    assert (
        chosen(TWO, requested=2, rate=8.0, scaling=hold, forecast=falling).replicas == 2
    )  # they still hold the present load


def test_unproven_forecast_is_not_used() -> None:
    found = chosen(TWO, requested=2, rate=14.0, forecast=make_forecast((1.0, 11), (40.0, 85), since=None))
    assert found.replicas == chosen(TWO, requested=2, rate=14.0).replicas
    assert found.move is not None
    said = "the forecast is not used: its recent error is 5.1%, not clearly below the 9.4% of a constant load"
    assert said in sentence_of(found.move, Mode.AUTO)


def test_dip_against_the_forecast_does_not_scale_in() -> None:
    """Two minutes without requests in a load that is level every day may end at once."""
    level, hold = make_forecast((10.0, 96)), Scaling(1, 8)
    assert chosen(TWO, requested=2, rate=10.0, dip_seconds=120.0, scaling=hold, forecast=level).replicas == 2
