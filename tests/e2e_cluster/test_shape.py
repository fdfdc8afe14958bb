"""Comparison of an existing cluster's shape with the requested one."""

from __future__ import annotations

import pytest
from cluster.shape import Existing, Wanted, difference, parse_nodes

NODE_IMAGE = "trimtab-node:v1.20.2-0123456789ab"


def nodes(workers: int, image: str = NODE_IMAGE) -> Existing:
    return Existing((("control-plane", image), *(("worker", image) for _ in range(workers))))


@pytest.mark.parametrize("workers", [0, 2])
def test_same_shape_has_no_difference(workers: int) -> None:
    assert difference(nodes(workers), Wanted(workers, (NODE_IMAGE,))) is None


@pytest.mark.parametrize(
    ("found", "requested", "difference_text"),
    [
        (2, 0, "it has 2 workers, none requested"),  # a demo never uses the cluster of e2e
        (0, 2, "it has no worker, 2 requested"),
        (1, 2, "it has 1 worker, 2 requested"),
    ],
)
def test_difference_reports_workers(found: int, requested: int, difference_text: str) -> None:
    assert difference(nodes(found), Wanted(requested, (NODE_IMAGE,))) == difference_text


def test_difference_names_both_node_images() -> None:
    old = "trimtab-node:v1.20.2-ba9876543210"
    assert difference(nodes(0, old), Wanted(0, (NODE_IMAGE,))) == f"its nodes run {old}, {NODE_IMAGE} requested"


def test_difference_reports_all_differences() -> None:
    assert difference(nodes(1, "old:1"), Wanted(0, ("new:2",))) == (
        "it has 1 worker, none requested; its nodes run old:1, new:2 requested"
    )


@pytest.mark.parametrize("image", ["kindest/node:v1.32.2", "kindest/node@sha256:0123", "kindest/node"])
def test_repository_matches_all_tags(image: str) -> None:
    assert difference(nodes(0, image), Wanted(0, ("kindest/node", NODE_IMAGE))) is None


@pytest.mark.parametrize("image", ["kindest/node-extra:v1", "a/kindest/node:v1", "3f57d9401f8d"])
def test_other_repository_or_bare_id_is_different(image: str) -> None:
    assert difference(nodes(0, image), Wanted(0, ("kindest/node", NODE_IMAGE))) is not None


def test_registry_port_is_not_a_tag() -> None:
    assert difference(nodes(0, "here:5000/node:v2"), Wanted(0, ("here:5000/node",))) is None
    assert difference(nodes(0, "here:5000/node:v2"), Wanted(0, ("here:5000/node:v1",))) is not None


def test_parse_nodes_reads_docker_listing() -> None:
    assert parse_nodes(f"worker {NODE_IMAGE}\ncontrol-plane {NODE_IMAGE}\n\n") == Existing(
        (("worker", NODE_IMAGE), ("control-plane", NODE_IMAGE))
    )
