"""Upgrades: a new operator, new defaults or a new secret keep running pods until a restart is requested."""

from __future__ import annotations

import json
from typing import Any

import pytest
from operator_builders import a_deployment, a_spec
from operator_cluster import SECRET, FakeCluster
from trimtab_operator.builders import pod
from trimtab_operator.builders.admin_token import TokenHashes, Tokens, token_hash
from trimtab_operator.builders.labels import REVISION_LABEL
from trimtab_operator.builders.record import RECORD_ANNOTATION, asked_of
from trimtab_operator.builders.stateful_set import pod_template
from trimtab_operator.observed.actions import kind_and_name
from trimtab_operator.resource.spec import RESTARTED_AT
from trimtab_operator.resource.validation_error import ValidationError
from trimtab_operator.rollout.rollback import stored_rollout

DEFAULTED: dict[str, Any] = {"runtime": {"device": "cpu"}}
OF_TWO_PODS: dict[str, Any] = {**DEFAULTED, "parallelism": {"pipeline": 2, "gpusPerNode": 1}}


def a_settled_cluster(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(**{"replicas": 2, **DEFAULTED, **spec})
    cluster.settle()
    return cluster


def upgrade(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the operator by one with another rendering, default image and secret."""
    monkeypatch.setattr(pod, "STARTUP_PERIOD_SECONDS", 7)
    cluster.default_image, cluster.secret = "engine:2", b"another"
    cluster.restart_operator()


def uids(cluster: FakeCluster) -> dict[str, str]:
    return {name: found["metadata"]["uid"] for name, found in cluster.pods.items()}


def images(cluster: FakeCluster) -> set[str]:
    return {found["spec"]["containers"][0]["image"] for found in cluster.pods.values()}


def recorded(cluster: FakeCluster) -> list[str]:
    return [
        found["metadata"]["annotations"][RECORD_ANNOTATION]
        for (kind, _), found in cluster.objects.items()
        if kind == "StatefulSet"
    ]


def restart(cluster: FakeCluster, text: str) -> None:
    assert cluster.body is not None
    cluster.body["metadata"]["annotations"] = {RESTARTED_AT: text}


@pytest.mark.parametrize("spec", [DEFAULTED, OF_TWO_PODS])
def test_an_upgrade_of_the_operator_restarts_no_engine(spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = a_settled_cluster(**spec)
    before = uids(cluster)
    upgrade(cluster, monkeypatch)
    cluster.settle()
    assert uids(cluster) == before
    assert cluster.condition("Ready")["status"] == "True"


def test_stricter_rule_is_reported_and_allows_scaling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FakeCluster(replicas=2)
    cluster.settle()
    (revision,) = set(cluster.revisions)
    tighter = (ValidationError("spec.runtime.args[0]", "is refused by now"),)
    monkeypatch.setattr("trimtab_operator.planning.resolve.validation_errors", lambda _: tighter)
    cluster.restart_operator()
    for replicas in (3, 1, 2):
        cluster.edit(replicas=replicas)
        for _ in range(5):
            cluster.tick()
        assert cluster.revisions == [revision] * replicas
        ready = cluster.condition("Ready")
        assert (ready["reason"], cluster.condition("Stalled")["status"]) == ("InvalidSpec", "True")
        assert "is refused by now" in ready["message"]
        assert cluster.condition("Serving")["status"] == "True"
    cluster.edit(runtime={"device": "cpu", "image": "engine:9"}, replicas=3)
    for _ in range(5):
        cluster.tick()
    assert cluster.revisions == [revision] * 2, "an edit must keep to the rules of today"


def test_an_upgrade_of_the_operator_writes_no_stateful_set(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = a_settled_cluster()
    upgrade(cluster, monkeypatch)
    kinds = [kind_and_name(action)[0] for action in cluster.decide().children]
    assert kinds == ["Job"], "the lost secret signed the facts of the model"


def test_status_reports_outdated_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = a_settled_cluster()
    assert RESTARTED_AT not in cluster.condition("Progressing")["message"]
    upgrade(cluster, monkeypatch)
    cluster.settle()
    assert RESTARTED_AT in cluster.condition("Progressing")["message"]


def test_replica_added_after_upgrade_equals_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = a_settled_cluster()
    upgrade(cluster, monkeypatch)
    cluster.edit(replicas=3)
    cluster.settle()
    assert images(cluster) == {"engine:1"}
    assert len(set(cluster.revisions)) == 1


def test_an_edit_after_an_upgrade_brings_all_that_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = a_settled_cluster()
    upgrade(cluster, monkeypatch)
    cluster.edit(engine={"blockSize": 16})
    cluster.settle()
    assert images(cluster) == {"engine:2"}
    assert {found["spec"]["containers"][0]["startupProbe"]["periodSeconds"] for found in cluster.pods.values()} == {7}


def test_restart_annotation_replaces_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = a_settled_cluster()
    upgrade(cluster, monkeypatch)
    restart(cluster, "2026-01-01")
    cluster.settle()
    assert images(cluster) == {"engine:2"}
    assert RESTARTED_AT not in cluster.condition("Progressing")["message"]


def test_restart_annotation_works_without_upgrade() -> None:
    cluster = a_settled_cluster()
    before = uids(cluster)
    restart(cluster, "2026-01-01")
    cluster.settle()
    assert not set(before.values()) & set(uids(cluster).values())


def test_failing_restart_returns_to_previous_image(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = a_settled_cluster(rollout={"startTimeout": "20s", "drainTimeout": "1s"})
    cluster.default_image = "engine:2"
    cluster.restart_operator()
    restart(cluster, "2026-01-01")
    works = cluster._has_started
    monkeypatch.setattr(
        cluster, "_has_started", lambda pod: works(pod) and pod["spec"]["containers"][0]["image"] == "engine:1"
    )
    cluster.settle()
    assert images(cluster) == {"engine:1"}
    assert cluster.condition("Degraded")["reason"] == "RolledBack"


@pytest.mark.parametrize("garbage", ["", "{", "[]", "null", '{"asked": 1}', "9" * 5000, "[" * 100000])
def test_a_record_that_is_none_is_passed_over(garbage: str) -> None:
    cluster = a_settled_cluster()
    before = uids(cluster)
    for (kind, _), manifest in cluster.objects.items():
        if kind == "StatefulSet":
            manifest["metadata"]["annotations"][RECORD_ANNOTATION] = garbage
    cluster.restart_operator()
    cluster.settle()
    assert uids(cluster) == before


def test_edited_pod_template_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = a_settled_cluster()
    upgrade(cluster, monkeypatch)
    cluster.objects["StatefulSet", "m-g0"]["spec"]["template"]["spec"]["containers"][0]["image"] = "evil:1"
    cluster.settle()
    assert images(cluster) == {"engine:1"}


def test_former_secret_still_verifies_state() -> None:
    cluster = a_settled_cluster()
    cluster.secret, cluster.former_secret = b"another", SECRET
    snapshot = cluster.look()
    state = stored_rollout(snapshot.deployment, snapshot.children, key=snapshot.token, former_key=snapshot.former_token)
    assert state.known_good is not None


def test_engine_is_polled_with_its_start_token() -> None:
    tokens = Tokens("new", "old")
    assert tokens.for_hash(token_hash("old")) == "old"
    assert tokens.for_hash(token_hash("new")) == "new"
    assert tokens.for_hash(None) == "new"
    cluster = a_settled_cluster()
    cluster.secret, cluster.former_secret = b"another", SECRET
    snapshot = cluster.look()
    (flag,) = (
        argument
        for argument in cluster.pods["m-g0-0"]["spec"]["containers"][0]["args"]
        if argument.startswith("--admin-token-sha256=")
    )
    assert snapshot.tokens.for_hash(flag.partition("=")[2]) == snapshot.former_token


CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"runtime": {"device": "cpu", "image": "engine:2"}},
    {"runtime": {"device": "cpu", "image": "engine:1", "args": ["--seed=1"]}},
    {"engine": {"maxNumSeqs": 16}},
    {"engine": {"gpuMemoryUtilization": "0.96"}},
    {"parallelism": {"pipeline": 2}},
    {"rollout": {"drainTimeout": "31s"}},
    {"tuning": {"mode": "Off"}},
    {"tuning": {"bounds": {"maxNumSeqs": {"max": 999}}}},
    {"model": {"uri": "file:///models/n"}},
    {"template": {"metadata": {"labels": {"a": "b"}}}},
    {"template": {"spec": {"priorityClassName": "p"}}},
)
NO_CHANGES: tuple[dict[str, Any], ...] = (
    {"replicas": 7},
    {"rollout": {"maxUnavailable": 2}},
    {"rollout": {"startTimeout": "1m"}},
    {"tuning": {"mode": "Auto"}},
    {"tuning": {"bounds": {"maxNumSeqs": {"min": 2}}}},
    {"parallelism": {"tensor": 1}},
    {"engine": {"schedulingPolicy": "priority"}},
    {"engine": {"gpuMemoryUtilization": "0.5"}},
    {"objectives": {"ttft": {"target": "2s"}}, "engine": {"schedulingPolicy": "deadline"}},
    {"template": {}},
)


def test_pod_changes_change_the_record_key() -> None:
    made = [a_deployment(**change) for change in CHANGES]
    templates = [json.dumps(pod_template(one, token_hashes=TokenHashes("h", "h")), sort_keys=True) for one in made]
    assert len(set(templates)) == len(CHANGES)
    assert len({asked_of(one) for one in made}) == len(CHANGES)


@pytest.mark.parametrize("change", NO_CHANGES, ids=json.dumps)
def test_changes_without_pod_effect_keep_the_record_key(change: dict[str, Any]) -> None:
    assert asked_of(a_deployment(**change)) == asked_of(a_deployment())
    assert a_spec(**change) != a_spec() or change == {"template": {}}


def test_multi_pod_additions_are_kept() -> None:
    """The record is shared by all groups; changing it restarts the multi-pod groups of all clusters."""
    cluster = a_settled_cluster(**OF_TWO_PODS)
    for name, rank in (("m-g0", "0"), ("m-g0-w", "auto")):
        stateful_set = cluster.objects["StatefulSet", name]
        shared = json.loads(cluster.objects["StatefulSet", "m-g0"]["metadata"]["annotations"][RECORD_ANNOTATION])
        own, base = stateful_set["spec"]["template"], shared["template"]
        revision = own["metadata"]["labels"][REVISION_LABEL]
        address = cluster.objects["Service", "m-g0"]["spec"]["clusterIP"]
        added = own["spec"]["containers"][0]["args"][len(base["spec"]["containers"][0]["args"]) :]
        assert added == [f"--master-addr={address}", f"--rendezvous-id={revision}", f"--node-rank={rank}"]
        assert set(own["spec"]) - set(base["spec"]) == {"affinity"}
        term = {
            "labelSelector": {"matchLabels": {"trimtab.dev/deployment": "m", "trimtab.dev/group": "0"}},
            "topologyKey": "kubernetes.io/hostname",
        }
        wanted = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
        assert own["spec"]["affinity"] == {"podAntiAffinity": wanted}
        assert set(own["metadata"]["labels"]) - set(base["metadata"]["labels"]) == {
            "trimtab.dev/group",
            "trimtab.dev/role",
            "trimtab.dev/revision",
        }


def test_rotated_secret_keeps_running_replicas() -> None:
    cluster = a_settled_cluster()
    before, records = uids(cluster), recorded(cluster)
    cluster.secret = b"another"
    cluster.settle()
    assert uids(cluster) == before
    assert recorded(cluster) == records
    assert RESTARTED_AT in cluster.condition("Progressing")["message"]


BOUNDED = {"gpuMemoryUtilization": {"max": "0.95"}, "maxNumSeqs": {"max": 256}, "maxNumBatchedTokens": {"max": 4096}}


@pytest.mark.parametrize(
    ("bounds", "edit", "restarts"),
    [
        (BOUNDED, {"mode": "Off", "bounds": BOUNDED}, False),
        (BOUNDED, {"mode": "Auto", "bounds": {**BOUNDED, "watermark": {"max": "0.2"}}}, False),
        ({}, {"mode": "Off", "bounds": {}}, True),
    ],
    ids=["caps that are given do not depend on the mode", "fields without effect on pods", "caps that mode Off lowers"],
)
def test_upgrade_replaces_pods_only_on_pod_changes(
    bounds: dict[str, Any], edit: dict[str, Any], restarts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = a_settled_cluster(tuning={"mode": "Auto", "bounds": bounds})
    before = uids(cluster)
    upgrade(cluster, monkeypatch)
    cluster.settle()
    cluster.edit(tuning=edit)
    cluster.settle()
    assert (uids(cluster) != before) is restarts


@pytest.mark.parametrize("ticks", range(1, 16))
def test_rotated_secret_keeps_starting_replicas(ticks: int) -> None:
    cluster = FakeCluster(replicas=2, **DEFAULTED)
    for _ in range(ticks):
        cluster.tick()
    before = uids(cluster)
    cluster.secret, cluster.former_secret = b"another", SECRET
    cluster.settle()
    assert before.items() <= uids(cluster).items()
    assert cluster.condition("Ready")["status"] == "True"
