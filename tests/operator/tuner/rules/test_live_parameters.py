"""Rules of live parameters: evidence, change, and return to the start value. Without lengths nothing is predicted
here.
"""

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


def run_tuner(
    ticks: int,
    load: dict[str, Any],
    *,
    mode: Mode = Mode.AUTO,
    bounds: dict[Parameter, Bounds] | None = None,
    state: TunerState | None = None,
    start: float = 1000.0,
    second: ReplicaSnapshot | None = None,
) -> tuple[list[Decision], TunerOutput]:
    """Sample one engine under a steady load every 15 s, and optionally a second one (`second`); it runs the PATCHed
    values.
    """
    settings = Settings(mode, bounds=bounds or {}, starts=PARAMETERS)
    state, values, generation = state or TunerState(starts=PARAMETERS), dict(PARAMETERS), 1
    values.update(state.applied)
    decisions: list[Decision] = []
    for tick in range(ticks):
        now = start + 15.0 * tick
        changes: dict[str, Any] = {"kv_usage": load["kv_usage"]}
        changes["preemptions"] = {"capacity": load.get("preemptions", 0.0) * now}
        changes["recomputed_tokens"] = load.get("recomputed", 0.0) * now
        changes["blocked_seconds"] = {"seqs": load.get("slots_blocked", 0.0) * now}
        snapshot = make_replica_snapshot(sample=make_sample(now, generation=generation, **changes), values=values)
        outcome = decide([snapshot] if second is None else [snapshot, second], state, settings, now)
        state = outcome.state
        decisions += outcome.decisions
        for patch in outcome.patches.values():
            values.update(patch)
            generation += 1
    return decisions, outcome


def moved(decisions: list[Decision]) -> list[tuple[Reason, str, Value | None, Value | None]]:
    return [(d.reason, d.move.target.value, d.move.before, d.move.after) for d in decisions]


@pytest.mark.parametrize("phase", [Phase.READY, Phase.STARTING, Phase.PENDING])
def test_unreadable_replica_does_not_block_tuning(phase: Phase) -> None:
    decisions, outcome = run_tuner(60, PRESSED, second=make_replica_snapshot("m-1", phase=phase, problem="no answer"))
    assert moved(decisions)[0] == (Reason.KV_CACHE_TOO_SMALL, "gpu_memory_utilization", 0.8, 0.89)
    first = next(entry for entry in outcome.state.history if entry.id == decisions[0].id)
    assert first.outcome, "the trial was judged despite the unreadable replica"


def test_preemptions_with_headroom_raise_kv_memory() -> None:
    decisions, outcome = run_tuner(3, PRESSED)
    assert moved(decisions) == [(Reason.KV_CACHE_TOO_SMALL, "gpu_memory_utilization", 0.8, 0.89)]
    assert outcome.state.trial is not None
    assert "were recomputed" in decisions[0].sentence
    assert "MiB of headroom" in decisions[0].sentence


def test_preemptions_without_headroom_keep_kv_free_at_admission() -> None:
    decisions, _ = run_tuner(3, PRESSED, bounds=PINNED_MEMORY)
    assert moved(decisions) == [(Reason.ADMITTED_TOO_EARLY, "watermark", 0.0, 0.05)]


def test_watermark_stops_at_bound_without_lowering_slots() -> None:
    decisions, _ = run_tuner(160, PRESSED, bounds=PINNED_MEMORY)
    targets = {d.move.target.value for d in decisions}
    assert "max_num_seqs" not in targets
    assert [d.move.after for d in decisions if d.move.target is WATERMARK] == [0.05, 0.1]


def test_a_bound_of_the_owner_allows_a_higher_watermark() -> None:
    decisions, _ = run_tuner(120, PRESSED, bounds={**PINNED_MEMORY, WATERMARK: Bounds(0.0, 0.2)})
    assert max(d.move.after or 0 for d in decisions if d.move.target is WATERMARK) == 0.2


@pytest.mark.parametrize(
    "load",
    [
        {"kv_usage": 0.99, "recomputed": 0.3, "preemptions": 1.0},  # 0.1 % of the work
        {"kv_usage": 0.5, "recomputed": 20.0, "preemptions": 1.0},  # the cache has room: another cause
        {"kv_usage": 0.99, "recomputed": 20.0, "preemptions": 0.0},  # no capacity preemption
    ],
)
def test_insufficient_pressure_moves_nothing(load: dict[str, Any]) -> None:
    assert run_tuner(20, load)[0] == []


def test_queue_with_free_kv_raises_slots() -> None:
    decisions, _ = run_tuner(3, {"kv_usage": 0.3, "slots_blocked": 0.4})
    assert moved(decisions) == [(Reason.TOO_FEW_SEQUENCE_SLOTS, "max_num_seqs", 64, 96)]


def test_queue_with_full_cache_keeps_slots() -> None:
    assert run_tuner(20, {"kv_usage": 0.85, "slots_blocked": 0.4})[0] == []


@pytest.mark.parametrize(("parameter", "value"), [(UTILIZATION, 0.9), (WATERMARK, 0.1)])
def test_raised_values_return_to_start_after_quiet_period(parameter: Parameter, value: float) -> None:
    state = TunerState(applied={parameter: value}, starts=PARAMETERS)
    decisions, outcome = run_tuner(400, CALM, state=state)
    assert outcome.state.applied[parameter] == PARAMETERS[parameter]
    assert all(d.move.target is parameter for d in decisions)
    assert decisions[0].at - 1000.0 >= 1800.0


def test_kv_memory_returns_after_peak_usage_expires() -> None:
    """Full caches justify the memory only while they describe the present need."""
    _, busy = run_tuner(4, {"kv_usage": 0.95}, state=TunerState(applied={UTILIZATION: 0.9}, starts=PARAMETERS))
    decisions, outcome = run_tuner(300, CALM, state=busy.state, start=1060.0)
    assert outcome.state.applied[UTILIZATION] == PARAMETERS[UTILIZATION]
    assert decisions[0].at >= 1045.0 + 1800.0


def test_kv_memory_stays_while_recently_needed() -> None:
    state = TunerState(applied={UTILIZATION: 0.9}, starts=PARAMETERS)
    for hour in range(4):  # a busy minute in every quarter
        decisions, outcome = run_tuner(56, CALM, state=state, start=1000.0 + 900.0 * hour)
        assert not decisions
        decisions, outcome = run_tuner(4, {"kv_usage": 0.95}, state=outcome.state, start=1840.0 + 900.0 * hour)
        assert not decisions
        state = outcome.state


def test_recommend_mode_reports_once_without_patches() -> None:
    decisions, outcome = run_tuner(20, PRESSED, mode=Mode.RECOMMEND)
    assert len(decisions) == 1
    assert outcome.patches == {}
    assert outcome.recommendation == decisions[0]
    assert decisions[0].sentence.startswith("Raise gpu_memory_utilization from 0.8 to ")


def test_only_one_parameter_changes_at_a_time() -> None:
    decisions, outcome = run_tuner(3, {**PRESSED, "slots_blocked": 0.4})
    assert len(decisions) == 1
    assert outcome.state.trial is not None


def test_why_lists_evidence_prediction_guideline_and_outcome() -> None:
    _, outcome = run_tuner(40, PRESSED, bounds=PINNED_MEMORY)
    told = why(outcome.state.history, outcome.recommendation)
    assert "[" + outcome.state.history[0].id + "] AdmittedTooEarly" in told
    assert "evidence: recomputed share" in told
    assert "predicted: recomputed share" in told
    assert GUIDE[Reason.ADMITTED_TOO_EARLY] in told
    assert "outcome: kept" in told
    assert why((), None).startswith("No decisions yet")
