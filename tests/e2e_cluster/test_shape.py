"""A cluster that is up is reused only when it is what was requested; else it is said what differs."""

from __future__ import annotations

import pytest
from cluster.shape import Existing, Wanted, difference, parse_nodes

OURS = "trimtab-node:v1.20.2-0123456789ab"


def nodes(workers: int, image: str = OURS) -> Existing:
    return Existing((("control-plane", image), *(("worker", image) for _ in range(workers))))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cluster_of_the_shape_asked_for_differs_in_nothing(workers: int) -> None:
    assert difference(nodes(workers), Wanted(workers, (OURS,))) is None


@pytest.mark.parametrize(
    ("found", "asked", "said"),
    [
        (2, 0, "it has 2 workers, none requested"),  # a demo never runs on what e2e left up
        (0, 2, "it has no worker, 2 requested"),
        (1, 2, "it has 1 worker, 2 requested"),
    ],
)
def test_other_workers_are_a_difference(found: int, asked: int, said: str) -> None:
    assert difference(nodes(found), Wanted(asked, (OURS,))) == said


def test_another_node_image_is_a_difference_and_both_are_named() -> None:
    old = "trimtab-node:v1.20.2-ba9876543210"
    assert difference(nodes(0, old), Wanted(0, (OURS,))) == f"its nodes run {old}, {OURS} requested"


def test_each_difference_is_said() -> None:
    assert difference(nodes(1, "old:1"), Wanted(0, ("new:2",))) == (
        "it has 1 worker, none requested; its nodes run old:1, new:2 requested"
    )


@pytest.mark.parametrize("image", ["kindest/node:v1.32.2", "kindest/node@sha256:0123", "kindest/node"])
def test_a_repository_stands_for_all_of_its_tags(image: str) -> None:
    assert difference(nodes(0, image), Wanted(0, ("kindest/node", OURS))) is None


@pytest.mark.parametrize("image", ["kindest/node-extra:v1", "a/kindest/node:v1", "3f57d9401f8d"])
def test_another_repository_or_a_bare_id_is_another_image(image: str) -> None:
    assert difference(nodes(0, image), Wanted(0, ("kindest/node", OURS))) is not None


def test_a_registry_s_port_is_no_tag() -> None:
    assert difference(nodes(0, "here:5000/node:v2"), Wanted(0, ("here:5000/node",))) is None
    assert difference(nodes(0, "here:5000/node:v2"), Wanted(0, ("here:5000/node:v1",))) is not None


def test_nodes_are_read_from_docker_s_listing() -> None:
    assert parse_nodes(f"worker {OURS}\ncontrol-plane {OURS}\n\n") == Existing(
        (("worker", OURS), ("control-plane", OURS))
    )
