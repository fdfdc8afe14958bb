"""kstatus result of a resource, as used by Flux: Current only for the latest spec.

Argo CD gets the same result from the documented health script.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lupa
import pytest
import yaml
from operator_builders import a_spec
from operator_cluster import BROKEN, FakeCluster

QUICK = {"startTimeout": "20s", "drainTimeout": "1s"}
GITOPS = Path(__file__).parents[3] / "docs" / "install" / "gitops.md"
IN_ARGO_CD = {"Current": "Healthy", "Failed": "Degraded", "InProgress": "Progressing"}


def kstatus(resource: dict[str, Any]) -> str:
    """Return kstatus' result (sigs.k8s.io/cli-utils/pkg/kstatus) for a custom resource."""
    status = resource.get("status") or {}
    conditions = {c["type"]: c["status"] for c in status.get("conditions") or []}
    if status.get("observedGeneration") != resource["metadata"]["generation"]:
        return "InProgress"
    if conditions.get("Reconciling") == "True":
        return "InProgress"
    if conditions.get("Stalled") == "True":
        return "Failed"
    return "Current" if conditions.get("Ready") == "True" else "InProgress"


@functools.cache
def health_script() -> Callable[[dict[str, Any]], str]:
    """Return the documented Argo CD script as a function from a resource to its health."""
    blocks = [block.partition("```")[0] for block in GITOPS.read_text().split("```yaml\n")[1:]]
    found = [one for block in blocks for one in yaml.safe_load_all(block)]
    (taught,) = [one["data"] for one in found if one.get("kind") == "ConfigMap"]
    (script,) = taught.values()
    lua: Any = lupa.LuaRuntime(unpack_returned_tuples=True)
    judge = lua.eval(f"function(obj) {script} end")
    return lambda resource: str(judge(lua.table_from(resource, recursive=True))["status"])


def a_runtime(*args: str) -> dict[str, Any]:
    return {**a_spec()["runtime"], "args": list(args)}


def a_cluster(*, start_seconds: float = 10.0, **spec: Any) -> FakeCluster:
    return FakeCluster(start_seconds=start_seconds, **{"rollout": QUICK, "replicas": 2, **spec})


def verdict(cluster: FakeCluster) -> str:
    """Return the present status as one word; contradictory results are None."""
    assert cluster.body is not None
    is_true = {c["type"]: c["status"] == "True" for c in cluster.status["conditions"]}
    assert not (is_true["Reconciling"] and is_true["Stalled"])
    assert not (is_true["Ready"] and is_true["Stalled"])
    found = kstatus(cluster.body)
    assert health_script()(cluster.body) == IN_ARGO_CD[found]
    return found


def is_serving(cluster: FakeCluster) -> bool:
    return bool(cluster.condition("Serving")["status"] == "True")


def run(cluster: FakeCluster, ticks: int) -> list[str]:
    """Return the results of so many ticks, without repetitions."""
    seen: list[str] = []
    for _ in range(ticks):
        cluster.tick()
        now = verdict(cluster)
        if not seen or seen[-1] != now:
            seen.append(now)
    return seen


def test_a_new_resource_is_in_progress_until_every_replica_serves() -> None:
    assert run(a_cluster(), 20) == ["InProgress", "Current"]


def test_reading_the_model_is_in_progress() -> None:
    assert run(a_cluster(knows_the_model=False), 20) == ["InProgress", "Current"]


def test_rollout_is_in_progress_and_serving() -> None:
    cluster = a_cluster()
    cluster.settle()
    cluster.edit(runtime=a_runtime("--seed=1"))
    for _ in range(30):
        cluster.tick()
        assert is_serving(cluster)
        if verdict(cluster) == "Current":
            assert cluster.status["updatedReplicas"] == 2
    assert verdict(cluster) == "Current"


def test_rolled_back_change_is_failed_and_serving() -> None:
    cluster = a_cluster()
    cluster.settle()
    cluster.edit(runtime=a_runtime(BROKEN))
    assert run(cluster, 60) == ["InProgress", "Failed"]
    assert cluster.condition("Ready")["reason"] == cluster.condition("Stalled")["reason"] == "RolledBack"
    assert is_serving(cluster)
    cluster.edit(runtime=a_runtime("--seed=2"))
    assert run(cluster, 60) == ["InProgress", "Current"]


def test_unreadable_model_is_not_current() -> None:
    cluster = a_cluster()
    cluster.settle()
    cluster.model_words = (1, "no such file")
    cluster.edit(model={"uri": "file:///models/other"})
    assert run(cluster, 20) == ["InProgress", "Failed"]
    assert cluster.condition("Ready")["reason"] == "ModelUnreadable"
    assert is_serving(cluster)


@pytest.mark.parametrize("bad", [{"model": {"uri": "oci://a/b"}}, {"parallelism": {"tensor": 2}}])
def test_invalid_spec_is_failed_and_serving(bad: dict[str, Any]) -> None:
    cluster = a_cluster()
    cluster.settle()
    cluster.edit(**bad)
    cluster.learn_the_model()
    assert run(cluster, 5) == ["Failed"]
    assert is_serving(cluster)


def test_failing_first_revision_is_failed() -> None:
    cluster = a_cluster(runtime=a_runtime(BROKEN))
    assert run(cluster, 60) == ["InProgress", "Failed"]
    assert not is_serving(cluster)


def test_scaled_to_zero_is_current_and_not_serving() -> None:
    cluster = a_cluster()
    cluster.settle()
    cluster.edit(replicas=0)
    assert run(cluster, 20)[-1] == "Current"
    assert not is_serving(cluster)


def test_a_replica_that_crashes_is_in_progress_not_current() -> None:
    cluster = a_cluster()
    cluster.settle()
    cluster.set_ready("m-g1-0", False)
    cluster.tick()
    assert verdict(cluster) == "InProgress"
    assert is_serving(cluster)
