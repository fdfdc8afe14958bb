"""Hot knobs, rule by rule: what is seen, what is moved, and the way back. Without lengths nothing is predicted here."""

from typing import Any

import pytest
from trimtab_operator.tuner.decide import TunerOutput, decide
from trimtab_operator.tuner.explanation import GUIDE, why
from trimtab_operator.tuner.moves import Decision, Reason
from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_operator.tuner.samples import Phase, ReplicaSnapshot
from trimtab_operator.tuner.settings import Bounds, Mode, Settings
from trimtab_operator.tuner.state import TunerState
from tuner_snapshots import PARAMETERS, make_replica_snapshot, make_sample

UTILIZATION, WATERMARK, SLOTS = Parameter.GPU_MEMORY_UTILIZATION, Parameter.WATERMARK, Parameter.MAX_NUM_SEQS
PRESSED: dict[str, Any] = {"kv_usage": 0.99, "recomputed": 20.0, "preemptions": 1.0}
CALM: dict[str, Any] = {"kv_usage": 0.3}
PINNED_MEMORY = {UTILIZATION: Bounds(0.8, 0.8)}


def steered(
    ticks: int,
    load: dict[str, Any],
    *,
    mode: Mode = Mode.AUTO,
    bounds: dict[Parameter, Bounds] | None = None,
    state: TunerState | None = None,
    start: float = 1000.0,
    beside: ReplicaSnapshot | None = None,
) -> tuple[list[Decision], TunerOutput]:
    """Looks every 15 s at one engine under a steady load, and perhaps at another one `beside` it; it runs what it is
    PATCHed to."""
    settings = Settings(mode, bounds=bounds or {}, starts=PARAMETERS)
    state, values, generation = state or TunerState(starts=PARAMETERS), dict(PARAMETERS), 1
    values.update(state.applied)
    decisions: list[Decision] = []
    for tick in range(ticks):
        now = start + 15.0 * tick
        changes: dict[str, Any] = {"kv_usage": load["kv_usage"]}
        changes["preemptions"] = {"capacity": load.get("preemptions", 0.0) * now}
        changes["recomputed_tokens"] = load.get("recomputed", 0.0) * now
        changes["blocked_seconds"] = {"seqs": load.get("seats", 0.0) * now}
        snapshot = make_replica_snapshot(sample=make_sample(now, generation=generation, **changes), values=values)
        outcome = decide([snapshot] if beside is None else [snapshot, beside], state, settings, now)
        state = outcome.state
        decisions += outcome.decisions
        for patch in outcome.patches.values():
            values.update(patch)
            generation += 1
    return decisions, outcome


def moved(decisions: list[Decision]) -> list[tuple[Reason, str, Value | None, Value | None]]:
    return [(d.reason, d.move.target.value, d.move.before, d.move.after) for d in decisions]


@pytest.mark.parametrize("phase", [Phase.READY, Phase.STARTING, Phase.PENDING])
def test_one_that_cannot_be_read_keeps_the_others_from_nothing(phase: Phase) -> None:
    decisions, outcome = steered(60, PRESSED, beside=make_replica_snapshot("m-1", phase=phase, problem="no answer"))
    assert moved(decisions)[0] == (Reason.KV_CACHE_TOO_SMALL, "gpu_memory_utilization", 0.8, 0.89)
    first = next(entry for entry in outcome.state.history if entry.id == decisions[0].id)
    assert first.outcome, "the trial was judged, in spite of the one that is away"


def test_preemptions_with_headroom_raise_the_memory_by_a_part_of_it() -> None:
    decisions, outcome = steered(3, PRESSED)
    assert moved(decisions) == [(Reason.KV_CACHE_TOO_SMALL, "gpu_memory_utilization", 0.8, 0.89)]
    assert outcome.state.trial is not None
    assert "were recomputed" in decisions[0].sentence
    assert "MiB of headroom" in decisions[0].sentence


def test_preemptions_without_headroom_keep_kv_free_at_admission() -> None:
    decisions, _ = steered(3, PRESSED, bounds=PINNED_MEMORY)
    assert moved(decisions) == [(Reason.ADMITTED_TOO_EARLY, "watermark", 0.0, 0.05)]


def test_the_watermark_stops_at_its_bound_and_seats_are_never_the_answer() -> None:
    decisions, _ = steered(160, PRESSED, bounds=PINNED_MEMORY)
    targets = {d.move.target.value for d in decisions}
    assert "max_num_seqs" not in targets
    assert [d.move.after for d in decisions if d.move.target is WATERMARK] == [0.05, 0.1]


def test_a_bound_of_the_owner_allows_a_higher_watermark() -> None:
    decisions, _ = steered(120, PRESSED, bounds={**PINNED_MEMORY, WATERMARK: Bounds(0.0, 0.2)})
    assert max(d.move.after or 0 for d in decisions if d.move.target is WATERMARK) == 0.2


@pytest.mark.parametrize(
    "load",
    [
        {"kv_usage": 0.99, "recomputed": 0.3, "preemptions": 1.0},  # a tenth of a percent of the work
        {"kv_usage": 0.5, "recomputed": 20.0, "preemptions": 1.0},  # the cache has room: another cause
        {"kv_usage": 0.99, "recomputed": 20.0, "preemptions": 0.0},  # none was for want of room
    ],
)
def test_what_is_no_pressure_moves_nothing(load: dict[str, Any]) -> None:
    assert steered(20, load)[0] == []


def test_a_queue_that_waits_for_a_seat_while_kv_is_free_gets_more() -> None:
    decisions, _ = steered(3, {"kv_usage": 0.3, "seats": 0.4})
    assert moved(decisions) == [(Reason.TOO_FEW_SEQUENCE_SLOTS, "max_num_seqs", 64, 96)]


def test_a_queue_that_waits_for_a_seat_beside_a_full_cache_gets_none() -> None:
    assert steered(20, {"kv_usage": 0.85, "seats": 0.4})[0] == []


@pytest.mark.parametrize(("parameter", "value"), [(UTILIZATION, 0.9), (WATERMARK, 0.1)])
def test_every_raise_goes_back_to_its_start_after_long_quiet(parameter: Parameter, value: float) -> None:
    state = TunerState(applied={parameter: value}, starts=PARAMETERS)
    decisions, outcome = steered(400, CALM, state=state)
    assert outcome.state.applied[parameter] == PARAMETERS[parameter]
    assert all(d.move.target is parameter for d in decisions)
    assert decisions[0].at - 1000.0 >= 1800.0


def test_memory_goes_back_once_the_busy_minute_after_its_raise_is_long_past() -> None:
    """Full caches are a reason to keep the memory only as long as they say something of what is needed now."""
    _, busy = steered(4, {"kv_usage": 0.95}, state=TunerState(applied={UTILIZATION: 0.9}, starts=PARAMETERS))
    decisions, outcome = steered(300, CALM, state=busy.state, start=1060.0)
    assert outcome.state.applied[UTILIZATION] == PARAMETERS[UTILIZATION]
    assert decisions[0].at >= 1045.0 + 1800.0


def test_memory_stays_while_the_last_half_hour_needed_it() -> None:
    state = TunerState(applied={UTILIZATION: 0.9}, starts=PARAMETERS)
    for hour in range(4):  # a busy minute in every quarter
        decisions, outcome = steered(56, CALM, state=state, start=1000.0 + 900.0 * hour)
        assert not decisions
        decisions, outcome = steered(4, {"kv_usage": 0.95}, state=outcome.state, start=1840.0 + 900.0 * hour)
        assert not decisions
        state = outcome.state


def test_recommend_says_it_once_and_changes_nothing() -> None:
    decisions, outcome = steered(20, PRESSED, mode=Mode.RECOMMEND)
    assert len(decisions) == 1
    assert outcome.patches == {}
    assert outcome.recommendation == decisions[0]
    assert decisions[0].sentence.startswith("Raise gpu_memory_utilization from 0.8 to ")


def test_one_hot_knob_at_a_time() -> None:
    decisions, outcome = steered(3, {**PRESSED, "seats": 0.4})
    assert len(decisions) == 1
    assert outcome.state.trial is not None


def test_why_tells_evidence_prediction_advice_and_outcome() -> None:
    _, outcome = steered(40, PRESSED, bounds=PINNED_MEMORY)
    told = why(outcome.state.history, outcome.recommendation)
    assert "[" + outcome.state.history[0].id + "] AdmittedTooEarly" in told
    assert "evidence: recomputed share" in told
    assert "predicted: recomputed share" in told
    assert GUIDE[Reason.ADMITTED_TOO_EARLY] in told
    assert "outcome: kept" in told
    assert why((), None).startswith("No decisions yet")
