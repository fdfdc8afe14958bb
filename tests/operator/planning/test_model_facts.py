"""Reading a model before any engine runs: the Job, its stored result, and retries."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_cluster import FakeCluster
from trimtab_operator.builders.admin_token import admin_token
from trimtab_operator.builders.labels import GROUP_LABEL, REVISION_LABEL
from trimtab_operator.layout.gpus import gpu_named
from trimtab_operator.observed.actions import Action, Apply, Delete
from trimtab_operator.observed.groups import ObservedChildren
from trimtab_operator.planning.model_facts import (
    COMMIT_KEY,
    FACTS_KEY,
    FAILURE_KEY,
    INITIAL_BACKOFF_SECONDS,
    MAX_BACKOFF_SECONDS,
    SUBJECT_KEY,
    FactsState,
    ModelBeingRead,
    ModelKnown,
    ModelUnreadable,
    ModelUnsupported,
    cached_facts,
    evaluate_start_gate,
    facts_state,
    plan_facts,
    subject_of,
    verify_facts,
    with_model_facts,
)
from trimtab_operator.resource.spec import InferenceDeployment

GOLDEN = Path(__file__).parents[2] / "golden" / "model_facts_smollm2.json"
FACTS: dict[str, Any] = json.loads(GOLDEN.read_text())


def a_deployment(uri: str = "file:///models/m", **spec: Any) -> InferenceDeployment:
    base = {"model": {"uri": uri, "servedName": "m"}, "runtime": {"device": "cpu", "image": "engine:1"}, **spec}
    return InferenceDeployment.parse({"metadata": {"name": "m", "namespace": "n", "uid": "u"}, "spec": base})


@dataclass
class FactsCluster:
    """A cluster with a Job controller: applied objects exist, and a Job's pod ends as the test sets it."""

    deployment: InferenceDeployment = field(default_factory=a_deployment)
    now: float = 1000.0
    job: dict[str, Any] | None = None
    config_map: dict[str, Any] | None = None
    pod_status: dict[str, Any] = field(default_factory=dict)
    jobs_started: int = 0

    @property
    def observed(self) -> ObservedChildren:
        pods: tuple[dict[str, Any], ...] = ()
        if self.job is not None:
            owner = [{"uid": self.job["metadata"]["uid"]}]
            pods = ({"metadata": {"name": "m-facts-x", "ownerReferences": owner}, "status": self.pod_status},)
        jobs = () if self.job is None else (self.job,)
        return ObservedChildren(config_maps=() if self.config_map is None else (self.config_map,), pods=pods, jobs=jobs)

    @property
    def data(self) -> dict[str, str]:
        assert self.config_map is not None
        found: dict[str, str] = self.config_map["data"]
        return found

    @property
    def state(self) -> FactsState:
        return facts_state(self.deployment, self.observed)

    def tick(self) -> tuple[Action, ...]:
        actions = plan_facts(self.deployment, self.observed, now=self.now)
        for action in actions:
            if isinstance(action, Delete):
                assert self.job is not None
                assert (action.kind, action.name, action.uid) == ("Job", "m-facts", self.job["metadata"]["uid"])
                self.job = None
            elif action.manifest["kind"] == "Job":
                assert self.job is None
                self.jobs_started += 1
                self.job = copy.deepcopy(dict(action.manifest))
                self.job["metadata"]["uid"] = f"job-{self.jobs_started}"
                self.pod_status = {}
            else:
                assert action.is_new == (self.config_map is None)
                self.config_map = copy.deepcopy(dict(action.manifest))
        return actions

    def ends(self, exit_code: int, message: str) -> None:
        self.pod_status = {
            "containerStatuses": [{"state": {"terminated": {"exitCode": exit_code, "message": message}}}]
        }


def test_model_is_read_once_and_job_deleted_after_storing() -> None:
    cluster = FactsCluster()
    assert isinstance(cluster.state, ModelBeingRead)
    cluster.tick()
    assert cluster.job is not None
    assert cluster.tick() == ()
    cluster.ends(0, json.dumps(FACTS))
    applied, removed = cluster.tick()
    assert isinstance(applied, Apply)
    assert isinstance(removed, Delete)
    assert cluster.job is None
    assert isinstance(cluster.state, ModelKnown)
    assert cluster.state.facts.num_layers == 30
    assert cluster.tick() == ()


def test_failed_job_is_reported_and_retried_with_backoff() -> None:
    cluster = FactsCluster()
    pauses = []
    for _ in range(9):
        cluster.tick()
        cluster.ends(2, "loading\ntrimtab-engine: /models/m: no such file")
        cluster.tick()
        assert cluster.state == ModelUnreadable("trimtab-engine: /models/m: no such file (exit code 2)")
        since = cluster.now
        while cluster.tick() == ():
            cluster.now += 1.0
        pauses.append(cluster.now - since)
        assert isinstance(cluster.state, ModelUnreadable)
    assert pauses[:3] == [INITIAL_BACKOFF_SECONDS, 2 * INITIAL_BACKOFF_SECONDS, 4 * INITIAL_BACKOFF_SECONDS]
    assert pauses[-1] == MAX_BACKOFF_SECONDS
    cluster.ends(0, json.dumps(FACTS))
    cluster.tick()
    assert isinstance(cluster.state, ModelKnown)


def test_invalid_facts_are_a_failure() -> None:
    cluster = FactsCluster()
    cluster.tick()
    cluster.ends(0, "")
    cluster.tick()
    assert cluster.state == ModelUnreadable("no output (exit code 0)")


@pytest.mark.parametrize(
    "change", [{"uri": "file:///models/other"}, {"runtime": {"device": "cpu", "image": "engine:2"}}]
)
def test_changed_model_or_image_is_read_again(change: dict[str, Any]) -> None:
    cluster = FactsCluster()
    cluster.tick()
    cluster.ends(0, json.dumps(FACTS))
    cluster.tick()
    cluster.deployment = a_deployment(**change)
    assert isinstance(cluster.state, ModelBeingRead)
    cluster.tick()
    assert cluster.jobs_started == 2


def test_job_of_other_model_is_deleted() -> None:
    cluster = FactsCluster()
    cluster.tick()
    cluster.deployment = a_deployment("file:///models/other")
    (removed,) = cluster.tick()
    assert isinstance(removed, Delete)
    cluster.tick()
    assert cluster.job is not None
    assert cluster.job["metadata"]["annotations"]["trimtab.dev/facts-of"] == subject_of(cluster.deployment)


def test_other_edits_read_nothing() -> None:
    cluster = FactsCluster()
    cluster.tick()
    cluster.ends(0, json.dumps(FACTS))
    cluster.tick()
    cluster.deployment = a_deployment(replicas=3, engine={"maxNumSeqs": 4})
    assert cluster.tick() == ()


def test_deleted_config_map_rereads_the_model() -> None:
    cluster = FactsCluster()
    cluster.tick()
    cluster.ends(0, json.dumps(FACTS))
    cluster.tick()
    cluster.config_map = None
    cluster.tick()
    assert cluster.jobs_started == 2


@pytest.mark.parametrize("garbage", ["{", "{}", "[]", '{"supported": false}', '{"num_layers": 3}', "[" * 100_000])
def test_a_damaged_config_map_is_as_good_as_none(garbage: str) -> None:
    cluster = FactsCluster()
    kept = {SUBJECT_KEY: subject_of(cluster.deployment), FACTS_KEY: garbage}
    cluster.config_map = {"metadata": {"name": "m-facts"}, "data": kept}
    assert isinstance(cluster.state, ModelBeingRead)
    cluster.tick()
    assert cluster.jobs_started == 1
    cluster.ends(0, json.dumps(FACTS))
    cluster.tick()
    assert isinstance(cluster.state, ModelKnown)
    assert json.loads(cluster.data[FACTS_KEY]) == FACTS


@pytest.mark.parametrize("retry_at", [1e12, -1.0, float("inf"), float("nan")])
def test_a_pause_that_no_failure_makes_is_not_kept(retry_at: float) -> None:
    cluster = FactsCluster()
    cluster.tick()
    cluster.ends(1, "broken")
    cluster.tick()
    failure = json.loads(cluster.data[FAILURE_KEY]) | {"retryAt": retry_at, "attempts": -7}
    cluster.data[FAILURE_KEY] = json.dumps(failure)
    cluster.tick()
    assert cluster.jobs_started == 2


@pytest.mark.parametrize("answer", [{"num_layers": 3}, {"supported": False}])
def test_invalid_output_is_reported_and_retried(answer: dict[str, Any]) -> None:
    """For example because the engine is older or newer than this operator."""
    cluster = FactsCluster()
    cluster.tick()
    cluster.ends(0, json.dumps(answer))
    cluster.tick()
    assert isinstance(cluster.state, ModelUnreadable)
    assert "not understood" in cluster.state.message
    assert cluster.tick() == ()
    cluster.now += INITIAL_BACKOFF_SECONDS
    cluster.tick()
    assert cluster.jobs_started == 2


PULL_SECRET = {"spec": {"imagePullSecrets": [{"name": "registry"}]}}


def test_an_edit_that_changes_the_job_ends_the_pause_and_no_other_does() -> None:
    cluster = FactsCluster()
    cluster.tick()
    cluster.ends(1, "no right to pull")
    cluster.tick()
    cluster.deployment = a_deployment(replicas=3)
    assert cluster.tick() == ()
    cluster.deployment = a_deployment(template=PULL_SECRET)
    cluster.tick()
    assert cluster.jobs_started == 2


def test_edited_job_is_replaced_unless_it_succeeded() -> None:
    """The Job may wait for a node or an image that only the edit provides."""
    cluster = FactsCluster()
    cluster.tick()
    cluster.deployment = a_deployment(template=PULL_SECRET)
    (removed,) = cluster.tick()
    assert isinstance(removed, Delete)
    cluster.tick()
    assert cluster.jobs_started == 2
    cluster.deployment = a_deployment()
    cluster.ends(0, json.dumps(FACTS))
    cluster.tick()
    assert isinstance(cluster.state, ModelKnown)
    assert cluster.jobs_started == 2


def test_lost_pod_of_job_is_a_failure() -> None:
    cluster = FactsCluster()
    cluster.tick()
    assert cluster.job is not None
    cluster.job["status"] = {"conditions": [{"type": "Failed", "status": "True", "message": "deadline exceeded"}]}
    cluster.tick()
    assert cluster.state == ModelUnreadable("deadline exceeded")


def test_unstartable_job_reports_reason() -> None:
    cluster = FactsCluster()
    cluster.tick()
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    cluster.pod_status = {"containerStatuses": [{"state": {"waiting": waiting}}]}
    assert cluster.state == ModelUnreadable("ImagePullBackOff: no such image")
    cluster.pod_status = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}]}
    assert isinstance(cluster.state, ModelBeingRead)
    assert "0/1 nodes" in cluster.state.message
    assert cluster.tick() == ()


def test_terminating_job_delays_next_job() -> None:
    cluster = FactsCluster()
    cluster.tick()
    assert cluster.job is not None
    cluster.job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert cluster.tick() == ()


def test_an_architecture_that_is_not_run_is_refused_by_name() -> None:
    cluster = FactsCluster()
    cluster.tick()
    other = {"supported": False, "architecture": "BloomForCausalLM", "weights_by_part": None, "refusal": "it has ALiBi"}
    cluster.ends(0, json.dumps(FACTS | other))
    cluster.tick()
    assert isinstance(cluster.state, ModelUnsupported)
    gate = evaluate_start_gate(cluster.deployment, cluster.observed, revision="r1")
    assert "architecture BloomForCausalLM is not supported by this engine (it has ALiBi)" in str(
        gate.validation_errors[0]
    )


@given(st.lists(st.sampled_from(["tick", "wait", "succeed", "fail", "lose job", "lose map", "edit"]), max_size=30))
@settings(max_examples=200, deadline=None)
def test_random_failures_end_with_known_model(events: list[str]) -> None:
    cluster = FactsCluster()
    for event in events:
        if event == "tick":
            cluster.tick()
        elif event == "wait":
            cluster.now += 30.0
        elif event in ("succeed", "fail") and cluster.job is not None:
            cluster.ends(0, json.dumps(FACTS)) if event == "succeed" else cluster.ends(1, "broken")
        elif event == "lose job":
            cluster.job = None
        elif event == "lose map":
            cluster.config_map = None
        elif event == "edit":
            cluster.deployment = a_deployment("file:///models/other")
    for _ in range(6):
        cluster.now += MAX_BACKOFF_SECONDS
        cluster.tick()
        if cluster.job is not None:
            cluster.ends(0, json.dumps(FACTS))
    cluster.job = None if isinstance(cluster.state, ModelKnown) else cluster.job
    assert isinstance(cluster.state, ModelKnown)
    assert cluster.tick() == ()


# --- webhook and start gate -------------------------------------------------------------------------------------------


def test_the_webhook_sees_facts_of_the_model_that_is_written_only() -> None:
    deployment = a_deployment()
    kept = {SUBJECT_KEY: subject_of(deployment), FACTS_KEY: json.dumps(FACTS)}
    config_map = {"metadata": {"name": "m-facts"}, "data": kept}
    found = cached_facts(deployment, config_map)
    assert found is not None
    assert found.num_layers == 30
    assert cached_facts(a_deployment("file:///models/other"), config_map) is None
    assert cached_facts(deployment, None) is None


@pytest.mark.parametrize(
    ("uri", "access", "other"),
    [
        ("oci://r.example/models:1", {"oci": {"folder": "/models/70b"}}, {"oci": {"folder": "/models/8b"}}),
        ("s3://models/m", {"s3": {"endpoint": "http://minio:9000"}}, {"s3": {"endpoint": "http://other:9000"}}),
        ("s3://models/m", {}, {"s3": {"endpoint": "http://minio:9000"}}),
    ],
)
def test_image_folder_and_endpoint_identify_the_model(uri: str, access: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = (a_deployment(uri, model={"uri": uri, "servedName": "m", **of}) for of in (access, other))
    data = {SUBJECT_KEY: subject_of(first), FACTS_KEY: json.dumps(FACTS), COMMIT_KEY: "a" * 64}
    config_map = {"metadata": {"name": "m-facts"}, "data": data}
    observed = ObservedChildren(config_maps=(config_map,))
    assert cached_facts(first, config_map) is not None
    assert cached_facts(second, config_map) is None
    assert with_model_facts(first, observed).weights_bytes is not None
    assert with_model_facts(second, observed) == second


def a_running(revision: str, *, ready: bool = True) -> ObservedChildren:
    labels = {GROUP_LABEL: "0", REVISION_LABEL: revision}
    status = {"conditions": [{"type": "Ready", "status": str(ready)}]}
    pod = {"metadata": {"name": "m-g0-0", "labels": labels}, "status": status}
    return ObservedChildren(stateful_sets=({"metadata": {"name": "m-g0", "labels": labels}},), pods=(pod,))


@pytest.mark.parametrize(
    ("observed", "is_open"),
    [
        (ObservedChildren(), False),  # a new resource: no engine before the model is known
        (a_running("r1"), True),  # an operator that has just learned to read models
        (a_running("r1", ready=False), True),  # also, and a pod that is down must restart
        (a_running("r0"), False),  # a change waits; running replicas continue
    ],
)
def test_unknown_model_starts_and_stops_nothing(observed: ObservedChildren, is_open: bool) -> None:
    gate = evaluate_start_gate(a_deployment(), observed, revision="r1")
    assert gate.is_open is is_open
    assert gate.validation_errors == ()


def test_layout_exceeding_gpu_memory_starts_nothing() -> None:
    deployment = a_deployment(runtime={"device": "cuda", "image": "engine:1"}, engine={"gpuMemoryUtilization": "0.02"})
    data = {SUBJECT_KEY: subject_of(deployment), FACTS_KEY: json.dumps(FACTS)}
    observed = ObservedChildren(config_maps=({"metadata": {"name": "m-facts"}, "data": data},))
    assert evaluate_start_gate(deployment, observed, revision="r1").validation_errors == ()
    refused = evaluate_start_gate(deployment, observed, revision="r1", gpu=gpu_named("L4")).validation_errors
    assert "L4" in str(refused[0])


def test_known_good_revision_restarts_without_its_nodes() -> None:
    deployment = a_deployment(runtime={"device": "cuda", "image": "engine:1"}, engine={"gpuMemoryUtilization": "0.02"})
    data = {SUBJECT_KEY: subject_of(deployment), FACTS_KEY: json.dumps(FACTS)}
    observed = ObservedChildren(config_maps=({"metadata": {"name": "m-facts"}, "data": data},))
    gate = evaluate_start_gate(deployment, observed, revision="r1", gpu=gpu_named("L4"), is_known_good=True)
    assert (gate.is_open, gate.validation_errors) == (True, ())


def test_running_revision_overrides_memory_prediction() -> None:
    deployment = a_deployment(parallelism={"tensor": 2})
    data = {SUBJECT_KEY: subject_of(deployment), FACTS_KEY: json.dumps(FACTS)}
    kept = ({"metadata": {"name": "m-facts"}, "data": data},)
    assert "num_attention_heads 9" in str(
        evaluate_start_gate(deployment, ObservedChildren(config_maps=kept), revision="r1").validation_errors[0]
    )
    running = replace(a_running("r1"), config_maps=kept)
    gate = evaluate_start_gate(deployment, running, revision="r1")
    assert (gate.is_open, gate.validation_errors) == (True, ())


# --- signature --------------------------------------------------------------------------------------------------------

COMMITS = "a" * 40, "e" * 40


def downloaded_cluster() -> FakeCluster:
    cluster = FakeCluster(knows_the_model=False, model={"uri": "hf://Qwen/Qwen3-0.6B"}, replicas=1)
    cluster.model_words = (0, json.dumps({**FACTS, "revision": COMMITS[0]}))
    cluster.settle()
    return cluster


def served_commits(cluster: FakeCluster) -> set[str]:
    return {pod["spec"]["containers"][0]["args"][1].rpartition("@")[2] for pod in cluster.pods.values()}


def test_forged_commit_is_not_rolled_out() -> None:
    cluster = downloaded_cluster()
    assert served_commits(cluster) == {COMMITS[0]}
    cluster.objects["ConfigMap", "m-facts"]["data"][COMMIT_KEY] = COMMITS[1]
    cluster.edit(engine={"blockSize": 16})
    cluster.settle()
    assert served_commits(cluster) == {COMMITS[0]}
    assert cluster.objects["ConfigMap", "m-facts"]["data"][COMMIT_KEY] == COMMITS[0]


@pytest.mark.parametrize("forged", [{"supported": False, "architecture": "X"}, {**FACTS, "weights_bytes": 1 << 44}])
def test_forged_facts_change_nothing(forged: dict[str, Any]) -> None:
    cluster = downloaded_cluster()
    pods = {pod["metadata"]["uid"] for pod in cluster.pods.values()}
    cluster.objects["ConfigMap", "m-facts"]["data"][FACTS_KEY] = json.dumps(forged)
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"
    assert {pod["metadata"]["uid"] for pod in cluster.pods.values()} == pods
    assert json.loads(cluster.objects["ConfigMap", "m-facts"]["data"][FACTS_KEY])["revision"] == COMMITS[0]


def test_facts_are_signed_again_after_key_rotation() -> None:
    cluster = downloaded_cluster()
    for secret in (b"second", b"third"):
        cluster.secret, cluster.former_secret = secret, cluster.secret
        cluster.settle()
    assert not any(kind == "Job" for kind, _ in cluster.objects)
    config_map = cluster.objects["ConfigMap", "m-facts"]
    assert verify_facts(config_map, key=admin_token(b"third", cluster.deployment.uid))
    assert config_map["data"][COMMIT_KEY] == COMMITS[0]


def test_pod_that_claims_to_be_the_jobs_is_not_believed() -> None:
    cluster = FakeCluster(knows_the_model=False, model={"uri": "hf://Qwen/Qwen3-0.6B"}, replicas=1)
    cluster.model_words = (0, json.dumps({**FACTS, "revision": COMMITS[0]}))
    cluster.tick()
    real = cluster.pods["m-facts-x"]
    forged = copy.deepcopy(real)
    forged["metadata"] |= {"name": "m-facts-a", "uid": "forged", "creationTimestamp": "2026-01-01T12:00:09Z"}
    words = json.dumps({**FACTS, "revision": COMMITS[1]})
    forged["status"]["containerStatuses"] = [{"state": {"terminated": {"exitCode": 0, "message": words}}}]
    children = cluster.children()
    seen = replace(children, pods=(forged, *children.pods))
    (stored,) = (a for a in plan_facts(cluster.deployment, seen, now=cluster.now) if isinstance(a, Apply))
    assert stored.manifest["data"][COMMIT_KEY] == COMMITS[0]
