"""Pod lifecycle plans depend on observations and are reported once."""

from __future__ import annotations

from operator_builders import a_node, a_pod, moment, not_ready, observed
from trimtab_operator.builders.labels import WORKER
from trimtab_operator.observed.groups import ObservedChildren
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.rollout.pod_lifecycle import PodLifecyclePlan, plan_pod_lifecycle

LOST = (a_node("one"), a_node("two", "Unknown"))
STUCK = (a_pod(), not_ready(a_pod(WORKER, node=None, unschedulable_message="Insufficient nvidia.com/gpu")))


def lifecycle_plan(
    children: ObservedChildren, nodes: tuple[Manifest, ...] | None = (), *, change_id: str | None = "r1"
) -> PodLifecyclePlan:
    return plan_pod_lifecycle(children, nodes=nodes, partly_placed=None, now=moment(), change_id=change_id)


def test_a_group_that_is_well_needs_nothing() -> None:
    assert lifecycle_plan(observed(a_pod(), a_pod(WORKER, node="two"), workers=1), LOST) == PodLifecyclePlan((), {}, ())


def test_lost_node_is_reported_and_its_pods_deleted() -> None:
    urgent_deletes = lifecycle_plan(observed(a_pod(), not_ready(a_pod(WORKER, node="two")), workers=1), LOST)
    assert [(deletion.name, deletion.grace_seconds) for deletion in urgent_deletes.deletions] == [("m-g0-w-0", 0)]
    assert [note.reason for note in urgent_deletes.events] == ["NodeLost"]


def test_missing_node_permission_loses_no_pods() -> None:
    assert lifecycle_plan(observed(a_pod(), not_ready(a_pod(WORKER, node="two")), workers=1), None).deletions == ()


def test_stuck_group_backs_off_and_is_reported_once() -> None:
    urgent_deletes = lifecycle_plan(observed(*STUCK, workers=1))
    assert not urgent_deletes.held[0].has_pods
    assert [note.reason for note in urgent_deletes.events] == ["GangSchedulingBackoff"]
    assert "Insufficient nvidia.com/gpu" in urgent_deletes.events[0].message


def test_invalid_spec_reports_no_backoff() -> None:
    assert lifecycle_plan(observed(*STUCK, workers=1), change_id=None).events == ()
