"""`spec.scaling`: the tuner's count takes effect at once, is reported, and survives operator restarts."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from operator_builders import NOW, at
from operator_cluster import TICK_SECONDS, TOKEN, FakeCluster, Killed, a_loop, a_reconciler
from trimtab_operator.builders.config_map import STATE_KEY
from trimtab_operator.planning.tuning import SIGNED_KIND
from trimtab_operator.resource.signed_text import verify
from trimtab_operator.resource.spec import PAUSED
from trimtab_operator.tuner.rules import replicas as rule
from trimtab_operator.tuner.rules.replicas import Need
from trimtab_operator.tuner.scaling import control_law
from trimtab_operator.tuner.stored import from_json

AT_ONCE = {"scaleDown": {"stabilizationWindowSeconds": 0}}
AUTO = {"mode": "Auto"}


class Needs:
    """Make the tuner always want this many replicas."""

    count = 1


@pytest.fixture
def needs(monkeypatch: pytest.MonkeyPatch) -> Needs:
    asked = Needs()
    monkeypatch.setattr(rule, "_need", lambda *_: Need(asked.count, 3.0, 3.0, 1.0, 0.8, 0.99))
    monkeypatch.setattr(control_law, "LEARN_SECONDS", 0.0)
    return asked


def a_cluster(least: int = 1, most: int = 6, *, mode: str = "Auto", **spec: Any) -> FakeCluster:
    scaling = {"minReplicas": least, "maxReplicas": most, "behavior": AT_ONCE}
    return FakeCluster(**{"scaling": scaling, "tuning": {"mode": mode}, **spec})


def cached_resource(cluster: FakeCluster) -> int | None:
    """Return the count that a restarted operator would use."""
    text = cluster.objects["ConfigMap", "m-tuning"]["data"][STATE_KEY]
    body = verify(text, key=TOKEN, kind=SIGNED_KIND, former_key=None)
    assert body is not None
    state = from_json(body)
    assert state is not None
    return state.scaling.desired


@pytest.mark.parametrize(("replicas", "least", "begins"), [(1, 2, 2), (3, 1, 3), (9, 1, 6)])
def test_new_resource_starts_at_replicas_within_bounds(replicas: int, least: int, begins: int) -> None:
    cluster = a_cluster(least, replicas=replicas)
    cluster.tick()
    assert len(cluster.groups) == begins
    assert cluster.status["desiredReplicas"] == begins
    assert cluster.status.get("tuning", {}).get("history", []) == []


def test_scaling_starts_from_previous_count(needs: Needs) -> None:
    """GitOps sets `scaling` and removes `replicas` in one edit; an autoscaler had set it to four."""
    cluster = FakeCluster(replicas=4)
    cluster.settle()
    needs.count = 4
    del cluster.body["spec"]["replicas"]  # type: ignore[index]
    cluster.edit(scaling={"maxReplicas": 6}, tuning=AUTO)
    before = copy.deepcopy(cluster.pods)
    cluster.settle()
    assert cluster.pods.keys() == before.keys()


def test_decision_acts_at_once_and_has_one_id_everywhere(needs: Needs) -> None:
    cluster = a_cluster()
    cluster.settle()
    needs.count = 3
    plan = cluster.plan_reconcile()
    (decision,) = plan.decisions
    assert plan.desired_replicas == 3
    assert sorted(name for kind, name in cluster.objects if kind == "StatefulSet") == ["m-g0", "m-g1", "m-g2"]
    assert cached_resource(cluster) == 3
    assert "TooFewReplicas" in cluster.events
    newest = cluster.status["tuning"]["history"][0]
    assert (newest["id"], newest["knob"], newest["from"], newest["to"]) == (decision.id, "replicas", "1", "3")
    assert cluster.status["desiredReplicas"] == 3
    assert cluster.status["lastScaleTime"] == at(cluster.now - NOW)
    cluster.settle()
    assert cluster.status["replicas"] == cluster.status["readyReplicas"] == 3
    assert [d.move.after for d in cluster.plan_reconcile().decisions] == []


def test_scale_in_removes_least_loaded_down_to_minimum(needs: Needs) -> None:
    needs.count = 4
    cluster = a_cluster(2)
    cluster.settle()
    for ordinal, running in enumerate((5.0, 0.0, 5.0, 1.0)):
        cluster.engine(ordinal).running = running
    needs.count = 1
    cluster.plan_reconcile()
    assert [group.ordinal for group in cluster.groups] == [0, 2]


def test_unreachable_engine_stops_scale_in(needs: Needs) -> None:
    needs.count = 3
    cluster = a_cluster()
    cluster.settle()
    del cluster.engines[cluster.pods["m-g1-0"]["metadata"]["uid"]]
    needs.count = 1
    for _ in range(20):
        cluster.tick()
    assert len(cluster.groups) == 3


def test_recommended_replicas_are_reported_only(needs: Needs) -> None:
    needs.count = 3
    cluster = a_cluster(mode="Recommend")
    cluster.settle()
    assert len(cluster.groups) == 1
    assert cluster.status["desiredReplicas"] == 1
    advice = cluster.status["tuning"]["recommendation"]
    assert (advice["knob"], advice["to"]) == ("replicas", "3")


def test_mode_off_keeps_count_within_bounds() -> None:
    cluster = a_cluster(mode="Off", replicas=3)
    cluster.settle()
    assert len(cluster.groups) == 3
    cluster.edit(scaling={"minReplicas": 1, "maxReplicas": 2})
    cluster.settle()
    assert len(cluster.groups) == 2
    assert cluster.status["tuning"]["history"][0]["reason"] == "BoundsChanged"


def test_paused_resource_keeps_replicas_until_resumed(needs: Needs) -> None:
    cluster = a_cluster()
    cluster.settle()
    assert cluster.body is not None
    cluster.body["metadata"]["annotations"] = {PAUSED: "true"}
    needs.count = 3
    for _ in range(5):
        cluster.tick()
    assert (len(cluster.groups), cluster.status["desiredReplicas"]) == (1, 1)
    cluster.body["metadata"]["annotations"] = {}
    cluster.settle()
    assert len(cluster.groups) == 3


def test_invalid_spec_keeps_replica_count(needs: Needs) -> None:
    needs.count = 3
    cluster = a_cluster()
    cluster.settle()
    cluster.edit(model={"uri": "oci://a/b"})
    needs.count = 1
    for _ in range(3):
        cluster.tick()
    assert (len(cluster.groups), cluster.status["desiredReplicas"]) == (3, 3)
    cluster.restart_operator()
    cluster.tick()
    assert cluster.status["desiredReplicas"] == 3


def test_unparsable_spec_keeps_replica_count(needs: Needs) -> None:
    needs.count = 3
    cluster = a_cluster()
    cluster.settle()
    cluster.edit(tuning={"mode": "Sometimes"})
    cluster.tick()
    assert (len(cluster.groups), cluster.status["desiredReplicas"]) == (3, 3)
    cluster.edit(tuning=AUTO)
    cluster.settle()
    assert len(cluster.groups) == 3


def test_removed_scaling_uses_spec_replicas(needs: Needs) -> None:
    needs.count = 3
    cluster = a_cluster()
    cluster.settle()
    cluster.edit(scaling=None, replicas=2)
    cluster.settle()
    assert len(cluster.groups) == 2
    assert cached_resource(cluster) is None
    assert "lastScaleTime" not in cluster.status


def test_replicas_written_during_scaling_are_reported_as_ignored() -> None:
    """An autoscaler's write to /scale, which API servers before 1.25 accept."""
    cluster = a_cluster()
    cluster.settle()
    cluster.edit(replicas=4)
    cluster.settle()
    assert len(cluster.groups) == 1
    assert cluster.events.count("ReplicasIgnored") == 1


def test_unschedulable_replica_stops_scale_out(needs: Needs) -> None:
    cluster = a_cluster(nodes=2)
    cluster.settle()
    needs.count = 3
    for _ in range(10):
        cluster.tick()
    assert len(cluster.groups) == 3
    needs.count = 6
    for _ in range(5):
        cluster.tick()
    assert (len(cluster.groups), cluster.status["desiredReplicas"]) == (3, 3)
    limited = cluster.condition("ScalingLimited")
    assert (limited["status"], limited["reason"]) == ("True", "Unschedulable")
    assert limited["message"].endswith("the replica count is not raised meanwhile")
    needs.count = 2
    cluster.settle()
    assert sorted(cluster.pods) == ["m-g0-0", "m-g1-0"]
    needs.count, cluster.nodes = 4, 99
    cluster.settle()
    assert len(cluster.groups) == 4


# --- operator restart -------------------------------------------------------------------------------------------------


async def test_decision_survives_operator_restart(needs: Needs) -> None:
    cluster = a_cluster()
    cluster.settle()
    needs.count = 3
    cluster.lives = 1  # only the state is written
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    await reconciler.tick(loop)
    cluster.now += TICK_SECONDS
    with pytest.raises(Killed):
        await reconciler.tick(loop)
    assert (cached_resource(cluster), len(cluster.groups)) == (3, 1)
    cluster.restart_operator()
    needs.count = 1  # the new one has nothing to predict by for a while
    cluster.is_answering = False
    await a_reconciler(cluster).tick(a_loop(cluster))
    assert len(cluster.groups) == 3


def test_lost_state_continues_with_status_count(needs: Needs) -> None:
    needs.count = 3
    cluster = a_cluster()
    cluster.settle()
    del cluster.objects["ConfigMap", "m-tuning"]
    cluster.restart_operator()
    needs.count = 3
    cluster.settle()
    assert len(cluster.groups) == 3
    assert cached_resource(cluster) == 3


def test_rate_limit_includes_previous_operator(needs: Needs) -> None:
    slow = {"scaleUp": {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 600}]}}
    cluster = FakeCluster(scaling={"maxReplicas": 6, "behavior": slow}, tuning=AUTO)
    cluster.settle()
    needs.count = 5
    cluster.settle()
    cluster.restart_operator()
    cluster.settle()
    assert len(cluster.groups) == 2


def test_forecast_state_is_reported_and_kept_while_enabled() -> None:
    cluster = FakeCluster(scaling={"maxReplicas": 6, "forecast": {"seasonality": "Daily"}}, tuning=AUTO)
    cluster.settle()
    for _ in range(round(3 * 900 / TICK_SECONDS)):
        cluster.tick()
    assert cluster.status["tuning"]["forecast"] == {"state": "Learning"}
    kept = seasons(cluster)
    assert kept is not None
    assert len(kept["fresh"]) >= 2
    cluster.edit(scaling={"maxReplicas": 6})
    cluster.settle()
    assert "forecast" not in cluster.status["tuning"]
    assert seasons(cluster) is None


def seasons(cluster: FakeCluster) -> Any:
    """Return the stored load profile."""
    text = cluster.objects["ConfigMap", "m-tuning"]["data"][STATE_KEY]
    body = verify(text, key=TOKEN, kind=SIGNED_KIND, former_key=None)
    assert body is not None
    return json.loads(body)["forecast"]
