"""The status matches the observations, is documented, and does not change without a reason."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import operator_builders
import pytest
from operator_builders import ONE_RANK, READY, RUNNING, a_pod
from operator_cluster import FakeCluster
from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.groups import Group
from trimtab_operator.observed.phases import EngineView
from trimtab_operator.planning.model_facts import ModelUnreadable
from trimtab_operator.planning.status_inputs import StatusInputs
from trimtab_operator.planning.tuning import applied_values
from trimtab_operator.report.conditions import MAX_CONDITION_MESSAGE, Reason, changed_conditions
from trimtab_operator.report.status import build_status
from trimtab_operator.resource.spec import InferenceDeployment, ModelSource
from trimtab_operator.resource.validation_error import ValidationError
from trimtab_operator.rollout.rollback import FailedChange
from trimtab_operator.tuner.decide import Condition, TunerOutput
from trimtab_operator.tuner.moves import Reason as TunerReason
from trimtab_operator.tuner.state import TunerState

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DOCUMENT = Path(__file__).parents[3] / "docs/reference/resource.md"


def a_deployment(replicas: int = 1, status: dict[str, Any] | None = None, **spec: Any) -> InferenceDeployment:
    return operator_builders.a_deployment(generation=3, status=status, replicas=replicas, **spec)


def a_group(ordinal: int = 0, *, pod_status: dict[str, Any] | None = None) -> Group:
    pod = {**a_pod(ordinal=ordinal), "status": pod_status or {}}
    return operator_builders.a_group(pod, ordinal=ordinal)


UNSCHEDULABLE = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes: Insufficient cpu"}]}
CRASHING = {
    "containerStatuses": [
        {
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 2, "message": "line\nmodel not found"}},
        }
    ]
}
NO_IMAGE = {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]}


def inputs(*groups: Group, desired: int | None = None, **engine: EngineView) -> StatusInputs:
    """Engines that are not given report only their layout, which is that of the sample."""
    given = {name.replace("_", "-"): view for name, view in engine.items()}
    engines = {group.name: EngineView(layout=ONE_RANK) for group in groups} | given
    desired = max(1, len(groups)) if desired is None else desired
    return StatusInputs(desired, groups=groups, revision="r1", engines=engines)


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(c for c in status["conditions"] if c["type"] == kind)


@pytest.mark.parametrize(
    ("pod_status", "ready", "reason", "phase", "degraded"),
    [
        (READY, "True", Reason.READY, "Ready", "False"),
        (RUNNING, "False", Reason.LOADING, "Loading", "False"),
        (UNSCHEDULABLE, "False", Reason.PENDING, "Pending", "False"),
        (CRASHING, "False", Reason.FAILING, "Failed", "True"),
        (NO_IMAGE, "False", Reason.FAILING, "Failed", "True"),
    ],
)
def test_ready_names_the_worst_problem(
    pod_status: dict[str, Any], ready: str, reason: Reason, phase: str, degraded: str
) -> None:
    status = build_status(a_deployment(), inputs(a_group(pod_status=pod_status)), now=NOW)
    assert (condition(status, "Ready")["status"], condition(status, "Ready")["reason"]) == (ready, reason)
    assert status["groups"][0]["phase"] == phase
    assert condition(status, "Degraded")["status"] == degraded


def test_crash_reports_last_line_of_engine() -> None:
    status = build_status(a_deployment(), inputs(a_group(pod_status=CRASHING)), now=NOW)
    assert "model not found (exit code 2)" in condition(status, "Degraded")["message"]


def test_load_progress_is_shown_while_loading() -> None:
    view = EngineView(load=("weights", 43))
    status = build_status(a_deployment(), inputs(a_group(pod_status=RUNNING), m_g0=view), now=NOW)
    assert status["groups"][0]["load"] == {"stage": "weights", "percent": 43}


def test_nothing_changes_when_nothing_changed() -> None:
    first = build_status(a_deployment(), inputs(a_group(pod_status=READY)), now=NOW)
    later = build_status(a_deployment(status=first), inputs(a_group(pod_status=READY)), now=NOW + timedelta(hours=1))
    assert later == first


def test_the_transition_time_moves_only_with_the_status() -> None:
    first = build_status(a_deployment(), inputs(a_group(pod_status=RUNNING)), now=NOW)
    pending = inputs(a_group(pod_status=UNSCHEDULABLE))
    still_not = build_status(a_deployment(status=first), pending, now=NOW + timedelta(hours=1))
    ready = build_status(a_deployment(status=first), inputs(a_group(pod_status=READY)), now=NOW + timedelta(hours=1))
    assert condition(still_not, "Ready")["lastTransitionTime"] == condition(first, "Ready")["lastTransitionTime"]
    assert condition(still_not, "Ready")["reason"] != condition(first, "Ready")["reason"]
    assert condition(ready, "Ready")["lastTransitionTime"] == "2026-01-01T01:00:00Z"


def test_invalid_spec_is_not_ready_with_all_errors() -> None:
    validation_errors = (
        ValidationError("spec.model.uri", "oci://a/b names no repository"),
        ValidationError("spec.scaling", "not supported yet"),
    )
    status = build_status(a_deployment(), StatusInputs(1, validation_errors=validation_errors), now=NOW)
    assert condition(status, "Ready")["reason"] == Reason.INVALID
    assert "oci://" in condition(status, "Ready")["message"]
    assert "spec.scaling" in condition(status, "Ready")["message"]
    assert status["observedGeneration"] == 3


def test_zero_replicas_are_ready() -> None:
    status = build_status(a_deployment(replicas=0), inputs(desired=0), now=NOW)
    assert condition(status, "Ready")["reason"] == Reason.SCALED_TO_ZERO
    assert status["ready"] == "0/0"


@pytest.mark.parametrize(
    "other",
    [
        replace(ONE_RANK, tensor=2, world_size=2),
        replace(ONE_RANK, pipeline=2),
        replace(ONE_RANK, data=2),
        replace(ONE_RANK, expert=True),
        replace(ONE_RANK, world_size=2),
    ],
)
def test_replica_with_other_layout_is_not_ready(other: Degrees) -> None:
    groups = [a_group(n, pod_status=READY) for n in range(2)]
    status = build_status(a_deployment(replicas=2), inputs(*groups, m_g1=EngineView(layout=other)), now=NOW)
    valid = condition(status, "LayoutValid")
    assert (valid["status"], valid["reason"]) == ("False", Reason.LAYOUT_DIFFERS)
    assert f"m-g1 runs {other} instead of {ONE_RANK}" in valid["message"]
    assert condition(status, "Ready")["status"] == "False"
    assert (status["readyReplicas"], status["updatedReplicas"]) == (1, 1)
    assert status["layout"]["reported"] == other.status()
    assert (status["layout"]["tensor"], status["layout"]["worldSize"]) == (1, 1)


def test_replica_without_reported_layout_is_not_ready() -> None:
    status = build_status(a_deployment(), inputs(a_group(pod_status=READY), m_g0=EngineView()), now=NOW)
    assert condition(status, "Ready")["status"] == "False"
    assert condition(status, "LayoutValid")["reason"] == Reason.LAYOUT_UNKNOWN
    assert "reported" not in status["layout"]


def test_an_engine_that_is_too_busy_to_answer_stays_ready() -> None:
    before = build_status(a_deployment(), inputs(a_group(pod_status=READY)), now=NOW)
    silent = inputs(a_group(pod_status=READY), m_g0=EngineView())
    assert build_status(a_deployment(status=before), silent, now=NOW)["readyReplicas"] == 1


def test_replica_of_previous_revision_counts_while_serving() -> None:
    old = replace(inputs(a_group(pod_status=READY), m_g0=EngineView(layout=replace(ONE_RANK, tensor=2))), revision="r2")
    status = build_status(a_deployment(), old, now=NOW)
    assert condition(status, "Serving")["status"] == "True"
    ready = condition(status, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", Reason.ROLLING_OUT)
    assert condition(status, "Progressing")["reason"] == Reason.ROLLING_OUT
    assert status["updatedReplicas"] == 0


def test_unreadable_model_is_degraded_with_its_message() -> None:
    status = build_status(a_deployment(), StatusInputs(1, model=ModelUnreadable("no such file (exit code 2)")), now=NOW)
    for kind, value in (("Ready", "False"), ("Progressing", "False"), ("LayoutValid", "Unknown"), ("Degraded", "True")):
        found = condition(status, kind)
        assert (found["status"], found["reason"]) == (value, Reason.MODEL_UNREADABLE)
        assert "no such file (exit code 2)" in found["message"]


def test_rolled_back_change_is_degraded() -> None:
    failed = FailedChange("m-g0 did not become Ready within 30m: it still loads", "r1")
    ready = replace(inputs(a_group(pod_status=READY)), revision="r2", failed_change=failed)
    status = build_status(a_deployment(), ready, now=NOW)
    assert condition(status, "Serving")["status"] == "True"
    assert condition(status, "Ready")["status"] == "False"
    assert status["updatedReplicas"] == 0
    old = a_deployment().spec.model_copy(update={"model": ModelSource(uri="file:///old")})
    running = replace(a_deployment(), spec=old)
    assert build_status(a_deployment(), replace(ready, target=running), now=NOW)["model"] == "old"
    for kind, value in (("Degraded", "True"), ("Progressing", "False"), ("LayoutValid", "Unknown")):
        assert (condition(status, kind)["status"], condition(status, kind)["reason"]) == (value, Reason.ROLLED_BACK)
        assert "it still loads" in condition(status, kind)["message"]
    loading = replace(inputs(a_group(pod_status=RUNNING)), revision="r2", failed_change=failed)
    assert condition(build_status(a_deployment(), loading, now=NOW), "Progressing")["status"] == "True"


def test_failed_first_revision_is_reported_after_timeout() -> None:
    failed = FailedChange("m-g0 did not become Ready within 30m: it still loads", None)
    loading = replace(inputs(a_group(pod_status=RUNNING)), failed_change=failed)
    status = build_status(a_deployment(), loading, now=NOW)
    assert condition(status, "Progressing")["reason"] == Reason.START_FAILED
    assert condition(status, "Degraded")["reason"] == Reason.START_FAILED


def test_invalid_layout_is_reported() -> None:
    error = ValidationError("spec.engine.maxModelLen", "needs 9 GiB of KV cache")
    status = build_status(a_deployment(), StatusInputs(1, validation_errors=(error,), layout_errors=(error,)), now=NOW)
    assert condition(status, "LayoutValid")["status"] == "False"
    assert "9 GiB" in condition(status, "LayoutValid")["message"]


def test_pods_without_a_node_limit_scaling() -> None:
    status = build_status(a_deployment(), inputs(a_group(pod_status=UNSCHEDULABLE)), now=NOW)
    assert condition(status, "ScalingLimited")["status"] == "True"
    assert "Insufficient cpu" in condition(status, "ScalingLimited")["message"]


@pytest.mark.parametrize(
    ("asked", "violated_since", "mode", "reason"),
    [
        (4, 1.0, "Auto", "AtMaxReplicas"),
        (4, 1.0, "Recommend", "AtMaxReplicas"),
        (4, 1.0, "Off", "NotLimited"),  # no more observations
        (4, None, "Auto", "NotLimited"),
        (3, 1.0, "Auto", "NotLimited"),
    ],
)
def test_violated_objectives_at_max_replicas_are_reported(
    asked: int, violated_since: float | None, mode: str, reason: str
) -> None:
    ok = Condition(True, TunerReason.TUNING, "")
    tuned = TunerOutput(TunerState(violated_since=violated_since), ok, ok, replicas=asked)
    found = replace(inputs(a_group(pod_status=READY)), tuning=tuned)
    deployment = a_deployment(scaling={"maxReplicas": 4}, tuning={"mode": mode})
    assert condition(build_status(deployment, found, now=NOW), "ScalingLimited")["reason"] == reason


def test_effective_values_are_common_ones_with_exceptions() -> None:
    common = EngineView(applied={"max_num_seqs": 64}, layout=ONE_RANK)
    other = EngineView(applied={"max_num_seqs": 8}, layout=ONE_RANK)
    groups = [a_group(n, pod_status=READY) for n in range(3)]
    status = build_status(a_deployment(replicas=3), inputs(*groups, m_g0=common, m_g1=common, m_g2=other), now=NOW)
    assert status["engine"]["effective"] == {"maxNumSeqs": "64"}
    assert [g.get("effective") for g in status["groups"]] == [None, None, {"maxNumSeqs": "8"}]


def test_only_turns_are_reported() -> None:
    before = build_status(a_deployment(), inputs(a_group(pod_status=RUNNING)), now=NOW)
    after = build_status(a_deployment(status=before), inputs(a_group(pod_status=READY)), now=NOW)
    assert [c["type"] for c in changed_conditions(before, after, ("Ready", "Degraded"))] == ["Ready"]
    assert changed_conditions(after, after, ("Ready", "Degraded")) == []


def test_applied_values_round_trip_through_status() -> None:
    status = {"tuning": {"applied": {"max_num_seqs": "64", "gpu_memory_utilization": "0.85", "x": "?"}}}
    assert applied_values(status) == {"max_num_seqs": 64, "gpu_memory_utilization": 0.85}


def test_blocked_reconciler_does_not_report_stopped() -> None:
    blocked = replace(inputs(a_group(pod_status=READY)), tuning=None, problem=(Reason.RECONCILE_ERROR, "no route"))
    status = build_status(a_deployment(), blocked, now=NOW)
    assert condition(status, "MetricsAvailable")["reason"] == Reason.RECONCILE_ERROR
    assert condition(status, "TuningActive")["status"] == "False"


def test_a_problem_of_the_loop_is_shown() -> None:
    blocked = replace(inputs(a_group(pod_status=READY)), problem=(Reason.NAME_CONFLICT, "Service m exists"))
    status = build_status(a_deployment(), blocked, now=NOW)
    assert condition(status, "Degraded")["reason"] == Reason.NAME_CONFLICT


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_is_documented(reason: Reason) -> None:
    assert f"`{reason.value}`" in DOCUMENT.read_text(encoding="utf-8")


def test_conditions_are_bounded_for_any_number_of_errors() -> None:
    cluster = FakeCluster()
    cluster.edit(runtime={"device": "cpu", "image": "engine:1", "args": [f"--unknown-{n}=1" for n in range(2000)]})
    cluster.tick()
    messages = [condition["message"] for condition in cluster.status["conditions"]]
    assert max(map(len, messages)) <= MAX_CONDITION_MESSAGE
    assert cluster.condition("Ready")["reason"] == "InvalidSpec"
