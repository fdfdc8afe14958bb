"""Router objects that the API server rejects: the replicas are created and serve without a router."""

from __future__ import annotations

from typing import Any

import pytest
from operator_cluster import FakeCluster, a_loop, a_reconciler
from trimtab_operator.errors import NameTaken
from trimtab_operator.resource.installation import Installation, RouterDefaults, RouterRole
from trimtab_operator.resource.spec import InferenceDeployment

ROUTER = RouterDefaults(image="router:1", role=RouterRole(kind="ClusterRole", name="trimtab-router"))


class ConflictingCluster(FakeCluster):
    """A cluster in which another owner has an object of one kind with the router's name."""

    taken_kind = ""

    async def apply(self, manifest: Any, owner: InferenceDeployment, *, is_new: bool) -> None:
        if manifest["kind"] == self.taken_kind and manifest["metadata"]["name"] == "m-router":
            raise NameTaken(f"{self.taken_kind} m-router exists and has another owner; delete it")
        await super().apply(manifest, owner, is_new=is_new)


@pytest.mark.parametrize("kind", ["ServiceAccount", "RoleBinding", "Deployment"])
async def test_taken_router_name_does_not_stop_replicas(kind: str) -> None:
    cluster = ConflictingCluster(router={})
    cluster.taken_kind = kind
    cluster.serves, cluster.installation = {"Deployment", "RoleBinding"}, Installation(router=ROUTER)
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    for _ in range(4):
        await reconciler.guarded_tick(loop)
        cluster.now += 5.0
        cluster.controllers()
    assert [group.is_ready for group in cluster.groups] == [True]
    assert any("m-router exists" in c["message"] for c in cluster.status["conditions"])
