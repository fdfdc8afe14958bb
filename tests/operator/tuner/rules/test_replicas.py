"""The replica count: what it takes to raise it, what it takes to lower it, and when it stays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from trimtab_operator.tuner.decide import TunerOutput, decide
from trimtab_operator.tuner.engine_model import StepCost
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
from trimtab_operator.tuner.rules import replicas as rule
from trimtab_operator.tuner.rules.replicas import Chosen, wanted_replicas
from trimtab_operator.tuner.samples import Phase, ReplicaSnapshot
from trimtab_operator.tuner.scaling.behavior import Behavior, Policy, Rules, ScaleEvent, Unit
from trimtab_operator.tuner.scaling.control_law import Need, ScalingState
from trimtab_operator.tuner.settings import Mode, Scaling, Settings
from trimtab_operator.tuner.situation import Situation
from trimtab_operator.tuner.state import TunerState
from tuner_snapshots import PARAMETERS, make_replica_snapshot, make_sample

NOW = 10_000.0
COST = StepCost(8e-3, 6e-5, 3e-5, 4e-9)
AT_ONCE = Behavior(down=Rules(stabilization_seconds=0.0))
PROMISED = Objectives(Ttft(2.0, share=0.95))
UP_TO_EIGHT = Scaling(1, 8, AT_ONCE)


@dataclass
class EachHolds:
    """Foresight that is told what one replica holds."""

    rate: float
    sampling_error: float = 0.0
    attainment_from_here: float = 1.0

    def at(self, candidate: Candidate, rate: float) -> EachHolds:
        return self

    @property
    def attainment(self) -> float:
        return self.attainment_from_here

    def meets_objectives(self, _candidate: Candidate, _rate: float) -> bool:
        return self.attainment_from_here >= PROMISED.share

    def believed_capacity(self, candidate: Candidate) -> float:
        return self.rate * candidate.replicas


def serving(name: str, **changes: Any) -> list[ReplicaSnapshot]:
    return [make_replica_snapshot(name, make_sample(at, **changes), since=1.0) for at in (NOW - 30, NOW - 15, NOW)]


def seen(*replicas: list[ReplicaSnapshot]) -> Observation:
    """The last of three looks at each of these replicas."""
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
    asked: int,
    rate: float,
    each: float | None = 5.0,
    scaling: Scaling = UP_TO_EIGHT,
    began_at: float | None = 0.0,
    from_here: float = 1.0,
    error: float = 0.0,
    growth: float = 1.0,
    forecast: Forecast | None = None,
    dip_seconds: float = 0.0,
) -> Chosen:
    """What is chosen while so many requests come a second, one replica holds `each` of them, and `asked` are wanted.
    In the last `dip_seconds` none came."""
    points = tuple(Point(NOW - 15.0 * i, 15.0, 15.0 * rate * (15.0 * i >= dip_seconds)) for i in range(20))
    state = TunerState(
        demand=Demand(points[::-1]),
        growth=Growth(cases=tuple(Case(NOW, 1.0, 0.0, math.log(growth)) for _ in range(200))),
        scaling=ScalingState(asked, began_at=began_at, wanted=((NOW - 15.0, 1),)),
        forecast=forecast,
    )
    settings = Settings(Mode.AUTO, PROMISED, starts=PARAMETERS, scaling=scaling)
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
        objectives=PROMISED,
        cost=COST,
        predictor=None if each is None else cast("Predictor", EachHolds(each, error, attainment_from_here=from_here)),
        rate=rate,
        replicas=len(observation.ready),
        starting=len(observation.starting),
        attained=None,
    )
    return wanted_replicas(state, observation, settings, PROMISED, situation, now=NOW)


TWO = seen(serving("m-0"), serving("m-1"))


def test_more_load_than_they_hold_asks_for_more_at_once() -> None:
    found = chosen(TWO, asked=2, rate=14.0)
    assert found.replicas == 3
    assert found.move is not None
    assert (found.move.reason, found.move.before, found.move.after) == (Reason.TOO_FEW_REPLICAS, 2, 3)
    assert (found.move.evidence["replicas_serving"], found.move.evidence["replicas_starting"]) == (2, 0)


def test_four_that_were_started_for_a_load_that_has_not_come_are_five_when_it_does() -> None:
    """Four of five requests a second each are meant for some 17.5; with what that grows within a start-up, for more
    than they hold. It does not matter how little has come by now, but once it was watched for long it does."""
    four = seen(*(serving(f"m-{index}") for index in range(4)))
    found = chosen(four, asked=4, rate=3.0, began_at=None, growth=1.25)
    assert (found.replicas, found.state.initial_replicas) == (5, 4)
    assert found.move is not None
    assert "the 4 initial replicas imply a higher load, 21.9 requests/s must be served" in sentence_of(
        found.move, Mode.AUTO
    )
    assert chosen(TWO, asked=2, rate=3.0, began_at=None, growth=1.25).replicas == 2  # 9.4, and they hold ten
    assert chosen(four, asked=4, rate=17.0, began_at=None, growth=1.0).state.initial_replicas is None  # it has come
    assert chosen(four, asked=4, rate=3.0, began_at=0.0, growth=1.25).replicas == 1


def test_what_is_foreseen_within_the_error_of_a_capacity_moves_nothing() -> None:
    """Two hold ten requests a second as far as is known: within a tenth, and within the 3 % at which a search ends."""
    assert [chosen(TWO, asked=2, rate=rate, error=0.1).replicas for rate in (9.5, 11.2, 11.4)] == [2, 2, 3]
    assert [chosen(TWO, asked=2, rate=rate, error=0.1).replicas for rate in (4.4, 4.7)] == [1, 2]
    assert [chosen(TWO, asked=2, rate=rate).replicas for rate in (10.2, 11.2)] == [2, 3]


def test_caches_that_what_runs_will_overflow_ask_for_one_more_whatever_the_rate_says() -> None:
    full = seen(serving("m-0", kv_usage=0.9), serving("m-1", kv_usage=0.9))
    found = chosen(full, asked=2, rate=6.0, from_here=0.8)
    assert found.replicas == 3
    assert found.move is not None
    assert "nearly full" in sentence_of(found.move, Mode.AUTO)
    assert chosen(full, asked=2, rate=6.0, from_here=0.99).replicas == 2
    assert chosen(TWO, asked=2, rate=6.0, from_here=0.8).replicas == 2


def test_those_that_start_are_counted() -> None:
    starting = [make_replica_snapshot("m-2", phase=Phase.STARTING, since=NOW - 20)]
    assert chosen(seen(serving("m-0"), serving("m-1"), starting), asked=3, rate=14.0).replicas == 3


def test_less_load_asks_for_fewer_when_all_are_known() -> None:
    assert chosen(TWO, asked=2, rate=3.0).replicas == 1


def test_none_goes_while_what_runs_is_predicted_to_be_too_much_for_the_others() -> None:
    assert chosen(TWO, asked=2, rate=3.0, from_here=0.9).replicas == 2


def test_nothing_is_given_back_while_one_starts_or_cannot_be_read() -> None:
    starting = [make_replica_snapshot("m-2", phase=Phase.STARTING, since=NOW - 20)]
    assert chosen(seen(serving("m-0"), serving("m-1"), starting), asked=3, rate=3.0).replicas == 3
    silent = [make_replica_snapshot("m-2", problem="no answer", since=1.0)]
    assert chosen(seen(serving("m-0"), serving("m-1"), silent), asked=3, rate=3.0).replicas == 3


def test_one_that_is_asked_for_and_not_seen_yet_keeps_the_count() -> None:
    assert chosen(TWO, asked=3, rate=14.0).replicas == 3


@pytest.mark.parametrize(("since", "target"), [(NOW - 10, 8), (NOW - 40, 3)])
def test_while_a_replica_finds_no_place_no_more_are_asked_for(since: float, target: int) -> None:
    unplaced = [make_replica_snapshot("m-2", phase=Phase.PENDING, since=since)]
    assert chosen(seen(serving("m-0"), serving("m-1"), unplaced), asked=3, rate=99.0).replicas == target


def test_a_replica_without_a_place_is_given_back_as_soon_as_it_is_not_needed() -> None:
    unplaced = [make_replica_snapshot("m-2", phase=Phase.PENDING, since=NOW - 40)]
    assert chosen(seen(serving("m-0"), serving("m-1"), unplaced), asked=3, rate=7.0).replicas == 2


def test_a_replica_that_never_comes_up_keeps_nobody_from_going() -> None:
    lost = [make_replica_snapshot("m-2", phase=Phase.STARTING, since=NOW - 700)]
    assert chosen(seen(serving("m-0"), serving("m-1"), lost), asked=3, rate=7.0).replicas == 2


def test_a_request_that_has_just_come_to_each_replica_is_no_queue() -> None:
    def waiting(count: float) -> Observation:
        gauges = {"waiting": count, "waiting_tokens": 100_000.0 * count}
        return seen(serving("m-0", **gauges), serving("m-1", **gauges))

    assert chosen(waiting(1.0), asked=2, rate=8.0).replicas == 2
    assert chosen(waiting(2.0), asked=2, rate=8.0).replicas > 2


def test_no_load_asks_for_the_fewest_and_never_for_none() -> None:
    idle = seen(serving("m-0", running=0.0), serving("m-1", running=0.0))
    assert chosen(idle, asked=2, rate=0.0).replicas == 1
    assert chosen(idle, asked=4, rate=0.0, scaling=Scaling(3, 8, AT_ONCE)).replicas == 3


def test_an_idle_deployment_of_which_nothing_was_learned_asks_for_the_fewest_and_says_so() -> None:
    """As after a restart of the operator at night."""
    idle = seen(serving("m-0", running=0.0), serving("m-1", running=0.0))
    found = chosen(idle, asked=2, rate=0.0, each=None)
    assert found.replicas == 1
    assert found.move is not None
    assert "no request arrived for a minute" in sentence_of(found.move, Mode.AUTO)
    assert chosen(TWO, asked=2, rate=0.0, each=None).replicas == 2  # something runs
    assert chosen(idle, asked=2, rate=1.0, each=None).replicas == 2  # something came


def test_where_no_number_of_replicas_keeps_the_promises_no_more_are_asked_for() -> None:
    assert chosen(TWO, asked=2, rate=14.0, each=0.0).replicas == 2


def test_the_owners_pace_holds() -> None:
    slow = Behavior(up=Rules(policies=(Policy(Unit.PODS, 2, 60.0),)))
    assert chosen(TWO, asked=2, rate=99.0, scaling=Scaling(1, 8, slow)).replicas == 4


# --- in the turn ------------------------------------------------------------------------------------------------------


def needing(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Whatever is seen, so many are needed."""
    monkeypatch.setattr(rule, "_need", lambda *_: (Need(count, 3.0, 3.0, 1.0), lambda n: 2.0 * n))


def turned(state: TunerState, settings: Settings, ticks: int = 3) -> list[TunerOutput]:
    outcomes = []
    for index in range(ticks):
        now = NOW + 15.0 * index
        outcomes.append(decide([make_replica_snapshot(sample=make_sample(now), since=1.0)], state, settings, now))
        state = outcomes[-1].state
    return outcomes


SCALED = Settings(Mode.AUTO, PROMISED, starts=PARAMETERS, scaling=Scaling(1, 4, AT_ONCE))


def test_in_mode_auto_the_count_moves_once_and_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    needing(monkeypatch, 3)
    outcomes = turned(TunerState(starts=PARAMETERS), SCALED, ticks=4)
    assert [outcome.replicas for outcome in outcomes] == [1, 3, 3, 3]
    (decision,) = (decision for outcome in outcomes for decision in outcome.decisions)
    assert (decision.reason, decision.move.before, decision.move.after) == (Reason.TOO_FEW_REPLICAS, 1, 3)
    assert outcomes[-1].state.scaling.desired == 3
    assert outcomes[-1].state.scaling.events == (ScaleEvent(NOW + 15.0, 2),)
    assert outcomes[-1].state.moved_at["replicas"] == NOW + 15.0


def test_in_mode_recommend_the_count_stays_and_the_recommendation_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    needing(monkeypatch, 3)
    outcomes = turned(TunerState(starts=PARAMETERS), replace(SCALED, mode=Mode.RECOMMEND), ticks=6)
    assert {outcome.replicas for outcome in outcomes} == {1}
    assert sum(len(outcome.decisions) for outcome in outcomes) == 1
    standing = outcomes[-1].recommendation
    assert standing is not None
    assert standing.sentence.startswith("Raise replicas from 1 to 3: ")
    assert outcomes[-1].state.scaling.events == ()


@pytest.mark.parametrize("mode", list(Mode))
def test_the_owners_bounds_hold_in_every_mode_and_moving_into_them_is_a_decision(mode: Mode) -> None:
    state = TunerState(starts=PARAMETERS, scaling=ScalingState(5))
    first, second, _ = turned(state, replace(SCALED, mode=mode))
    assert (first.replicas, second.replicas) == (4, 4)
    (decision,) = first.decisions
    assert (decision.reason, decision.move.before, decision.move.after) == (Reason.BOUNDS_CHANGED, 5, 4)
    assert second.decisions == ()


def test_a_count_that_is_the_owners_is_forgotten() -> None:
    state = TunerState(starts=PARAMETERS, scaling=ScalingState(5))
    outcome = turned(state, replace(SCALED, scaling=None))[-1]
    assert outcome.replicas is None
    assert outcome.state.scaling.desired is None


# --- what came of it --------------------------------------------------------------------------------------------------


def scaled_to(after: int, before: int, at: float) -> tuple[Decision, ScaleEvent]:
    reason = Reason.TOO_FEW_REPLICAS if after > before else Reason.TOO_MANY_REPLICAS
    decision = Decision(f"{before}-{after}", at, Move(reason, ReplicaCount(), before, after), "It was done.")
    return decision, ScaleEvent(at, after - before)


def outcomes_of(*done: tuple[Decision, ScaleEvent], now: float) -> list[str]:
    """What the history says at `now`, when two replicas serve."""
    decisions, events = zip(*done, strict=True)
    state = TunerState(history=decisions, scaling=ScalingState(2, events=events))
    return [entry.outcome for entry in with_outcomes(state, TWO, now=now).history]


def test_replicas_that_were_added_are_told_to_serve_once_they_do() -> None:
    assert outcomes_of(scaled_to(2, 1, NOW - 40), now=NOW) == ["2 replicas were ready after 40 s"]
    assert outcomes_of(scaled_to(3, 2, NOW - 40), now=NOW) == [""]


def test_one_that_went_and_was_missed_is_told_to_be_regretted() -> None:
    back = scaled_to(1, 2, NOW - 130), scaled_to(2, 1, NOW - 40)
    assert outcomes_of(*back, now=NOW)[0] == "too early: more replicas were needed again after 90 s"
    assert outcomes_of(scaled_to(2, 3, NOW - 130), now=NOW) == [""]
    assert outcomes_of(scaled_to(2, 3, NOW - 1000), now=NOW) == ["kept: no more replicas were needed for 1000 s"]


def test_what_was_only_recommended_came_to_nothing() -> None:
    decision, _ = scaled_to(2, 1, NOW - 40)
    state = TunerState(history=(decision,), scaling=ScalingState(1))
    assert with_outcomes(state, TWO, now=NOW) == state


def foretelling(*parts: tuple[float, int], since: float | None = 1.0) -> Forecast:
    """A forecast that was never wrong, from rates and for how many quarters of an hour each comes. It is 02:46,
    and the shape is smoothed over an hour."""
    rates = tuple(rate for rate, count in parts for _ in range(count))
    exact = Growth(cases=tuple(Case(NOW, 1.0, 0.0, 0.0) for _ in range(200)))
    return Forecast(Season(DAY_SECONDS, rates, (3,) * 96), exact, since, 0.05, 0.09)


def test_a_forecast_asks_for_a_replica_before_the_load_comes_and_says_so() -> None:
    rising = foretelling((5.0, 13), (200.0, 83))
    found = chosen(TWO, asked=2, rate=9.9, forecast=rising)
    assert found.replicas > 2
    assert found.move is not None
    sentence = sentence_of(found.move, Mode.AUTO)
    assert "the forecast is" in sentence
    assert "at 02:48 UTC, based on the previous 3 days" in sentence
    assert chosen(TWO, asked=2, rate=9.9).replicas == 2


def test_a_forecast_keeps_what_it_will_need_and_lets_go_what_it_will_not() -> None:
    hold = Scaling(1, 8)
    level, rising, falling = (foretelling((before, 13), (after, 83)) for before, after in ((5, 5), (5, 200), (200, 5)))
    assert chosen(TWO, asked=2, rate=4.4, scaling=hold, forecast=level).replicas == 1
    assert chosen(TWO, asked=2, rate=4.4, scaling=hold, forecast=rising).replicas >= 2
    assert chosen(TWO, asked=2, rate=8.0, scaling=hold, forecast=falling).replicas == 2  # what comes now is held


def test_a_forecast_that_has_not_proved_itself_moves_nothing_and_is_said_not_to_be_followed() -> None:
    found = chosen(TWO, asked=2, rate=14.0, forecast=foretelling((1.0, 11), (40.0, 85), since=None))
    assert found.replicas == chosen(TWO, asked=2, rate=14.0).replicas
    assert found.move is not None
    said = "the forecast is not used: its recent error is 5.1%, not clearly below the 9.4% of a constant load"
    assert said in sentence_of(found.move, Mode.AUTO)


def test_a_dip_is_not_what_a_forecast_foretold_and_nothing_goes_for_it() -> None:
    """Two minutes of nothing in a load that is level each day: it may be back in a moment."""
    level, hold = foretelling((10.0, 96)), Scaling(1, 8)
    assert chosen(TWO, asked=2, rate=10.0, dip_seconds=120.0, scaling=hold, forecast=level).replicas == 2
