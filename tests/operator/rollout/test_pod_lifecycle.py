"""What groups need beyond being as rendered is decided from what was seen, and told once."""

from __future__ import annotations

from operator_builders import a_node, a_pod, moment, not_ready, observed
from trimtab_operator.builders.labels import WORKER
from trimtab_operator.observed.groups import Observed
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.rollout.pod_lifecycle import Upkeep, upkeep

LOST = (a_node("one"), a_node("two", "Unknown"))
STUCK = (a_pod(), not_ready(a_pod(WORKER, node=None, unschedulable="Insufficient nvidia.com/gpu")))


def care_of(children: Observed, nodes: tuple[Manifest, ...] | None = (), *, asked: str | None = "r1") -> Upkeep:
    return upkeep(children, nodes=nodes, rivals=None, now=moment(), asked=asked)


def test_a_group_that_is_well_needs_nothing() -> None:
    assert care_of(observed(a_pod(), a_pod(WORKER, node="two"), workers=1), LOST) == Upkeep((), {}, ())


def test_a_lost_node_is_told_and_its_pods_are_given_up() -> None:
    care = care_of(observed(a_pod(), not_ready(a_pod(WORKER, node="two")), workers=1), LOST)
    assert [(deletion.name, deletion.grace_seconds) for deletion in care.deletions] == [("m-g0-w-0", 0)]
    assert [note.reason for note in care.notes] == ["NodeLost"]


def test_without_the_right_to_see_nodes_none_is_lost() -> None:
    assert care_of(observed(a_pod(), not_ready(a_pod(WORKER, node="two")), workers=1), None).deletions == ()


def test_a_group_that_is_stuck_gives_its_pods_back_and_says_so_once() -> None:
    care = care_of(observed(*STUCK, workers=1))
    assert not care.held[0].has_pods
    assert [note.reason for note in care.notes] == ["GaveBack"]
    assert "Insufficient nvidia.com/gpu" in care.notes[0].message


def test_while_nothing_is_asked_for_nothing_is_told_of_what_is_only_rendered() -> None:
    assert care_of(observed(*STUCK, workers=1), asked=None).notes == ()
