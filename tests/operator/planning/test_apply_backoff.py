"""Applies that an admission policy reverts are suppressed; user edits are corrected."""

from __future__ import annotations

from typing import Any

import pytest
from operator_cluster import FakeCluster
from trimtab_operator.planning.apply_backoff import MAX_REPEATED_APPLIES, RETRY_SECONDS
from trimtab_operator.resource.manifest import Manifest


class PolicedCluster(FakeCluster):
    """A cluster with an admission policy that rewrites every image."""

    def _store(self, manifest: Manifest) -> None:
        super()._store(manifest)
        if manifest["kind"] == "StatefulSet":
            self.image_of(manifest["metadata"]["name"], "mirror/engine:1")

    def image_of(self, name: str, image: str) -> None:
        self.objects["StatefulSet", name]["spec"]["template"]["spec"]["containers"][0]["image"] = image


def applies(cluster: FakeCluster, turns: int) -> int:
    """Return how many children were applied in so many reconciles."""
    return sum(len(cluster.tick().children) for _ in range(turns))


def test_reverted_image_is_reported_once_as_conflict() -> None:
    cluster = PolicedCluster()
    assert (
        applies(cluster, 20) <= MAX_REPEATED_APPLIES + 4
    )  # an account, two Services and the StatefulSet are made first
    assert applies(cluster, 20) == 0
    assert cluster.events.count("ApplyConflict") == 1
    assert cluster.condition("Ready")["status"] == "True"


def test_suppressed_apply_is_retried_periodically() -> None:
    cluster = PolicedCluster()
    applies(cluster, 20)
    cluster.now += RETRY_SECONDS
    assert applies(cluster, 1) == 1
    assert applies(cluster, 20) == 0


def test_another_spec_is_applied_at_once() -> None:
    cluster = PolicedCluster(rollout={"maxSurge": 0})
    applies(cluster, 20)
    cluster.edit(engine={"blockSize": 32})
    assert applies(cluster, 1) == 1


def test_repeated_user_edits_are_always_corrected() -> None:
    cluster = FakeCluster()
    cluster.settle()
    for _ in range(3 * MAX_REPEATED_APPLIES):
        cluster.objects["StatefulSet", "m-g0"]["spec"]["template"]["spec"]["containers"][0]["image"] = "evil:1"
        assert applies(cluster, 2) == 1


@pytest.mark.parametrize("key", ["app", "version"])
def test_foreign_selector_key_is_removed_from_service(key: str) -> None:
    """A foreign key would select no pods. The API server stores a selector as a whole."""
    cluster = FakeCluster()
    cluster.settle()
    selector: dict[str, Any] = cluster.objects["Service", "m"]["spec"]["selector"]
    wanted = dict(selector)
    selector[key] = "blue"
    cluster.tick()
    assert cluster.objects["Service", "m"]["spec"]["selector"] == wanted
