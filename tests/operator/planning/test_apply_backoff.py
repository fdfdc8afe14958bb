"""What somebody rewrites at admission is not applied for ever; what somebody edits is put back."""

from __future__ import annotations

from typing import Any

import pytest
from operator_cluster import FakeCluster
from trimtab_operator.planning.apply_backoff import MAX_TIMES, RETRY_SECONDS
from trimtab_operator.resource.manifest import Manifest


class PolicedCluster(FakeCluster):
    """A cluster with a policy that rewrites every image that is written."""

    def _store(self, manifest: Manifest) -> None:
        super()._store(manifest)
        if manifest["kind"] == "StatefulSet":
            self.image_of(manifest["metadata"]["name"], "mirror/engine:1")

    def image_of(self, name: str, image: str) -> None:
        self.objects["StatefulSet", name]["spec"]["template"]["spec"]["containers"][0]["image"] = image


def applies(cluster: FakeCluster, turns: int) -> int:
    """How many children were applied in so many turns."""
    return sum(len(cluster.tick().children) for _ in range(turns))


def test_a_policy_that_rewrites_the_image_is_given_way_to_and_named_once() -> None:
    cluster = PolicedCluster()
    assert applies(cluster, 20) <= MAX_TIMES + 4  # an account, two Services and the StatefulSet are made first
    assert applies(cluster, 20) == 0
    assert cluster.events.count("AppliedInVain") == 1
    assert cluster.condition("Ready")["status"] == "True"


def test_it_is_tried_again_from_time_to_time() -> None:
    cluster = PolicedCluster()
    applies(cluster, 20)
    cluster.now += RETRY_SECONDS
    assert applies(cluster, 1) == 1
    assert applies(cluster, 20) == 0


def test_another_spec_is_applied_at_once() -> None:
    cluster = PolicedCluster(rollout={"maxSurge": 0})
    applies(cluster, 20)
    cluster.edit(engine={"maxNumSeqs": 32})
    assert applies(cluster, 1) == 1


def test_somebody_who_edits_again_and_again_is_put_back_again_and_again() -> None:
    cluster = FakeCluster()
    cluster.settle()
    for _ in range(3 * MAX_TIMES):
        cluster.objects["StatefulSet", "m-g0"]["spec"]["template"]["spec"]["containers"][0]["image"] = "evil:1"
        assert applies(cluster, 2) == 1


@pytest.mark.parametrize("key", ["app", "version"])
def test_a_foreign_key_in_the_selector_of_the_clients_service_is_taken_out(key: str) -> None:
    """It would select nothing. The API server keeps a selector whole."""
    cluster = FakeCluster()
    cluster.settle()
    selector: dict[str, Any] = cluster.objects["Service", "m"]["spec"]["selector"]
    wanted = dict(selector)
    selector[key] = "blue"
    cluster.tick()
    assert cluster.objects["Service", "m"]["spec"]["selector"] == wanted
