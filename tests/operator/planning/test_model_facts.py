"""Reading a model once, before any engine runs: the Job, what is kept of it, and when it is tried again."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trimtab_operator.builders.labels import GROUP_LABEL, REVISION_LABEL
from trimtab_operator.layout.gpus import gpu_named
from trimtab_operator.observed.actions import Action, Apply, Delete
from trimtab_operator.observed.groups import Observed
from trimtab_operator.planning.model_facts import (
    COMMIT_KEY,
    FACTS_KEY,
    FAILURE_KEY,
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    SUBJECT_KEY,
    FactsState,
    Known,
    NotUsable,
    Reading,
    Unreadable,
    cached_facts,
    facts_state,
    gate_of,
    plan_facts,
    subject_of,
    with_model_facts,
)
from trimtab_operator.resource.spec import InferenceDeployment

GOLDEN = Path(__file__).parents[2] / "golden" / "model_facts_smollm2.json"
FACTS: dict[str, Any] = json.loads(GOLDEN.read_text())


def a_deployment(uri: str = "file:///models/m", **spec: Any) -> InferenceDeployment:
    base = {"model": {"uri": uri, "servedName": "m"}, "runtime": {"device": "cpu", "image": "engine:1"}, **spec}
    return InferenceDeployment.parse({"metadata": {"name": "m", "namespace": "n", "uid": "u"}, "spec": base})


@dataclass
class World:
    """A cluster with a Job controller: what is applied exists, and a Job's pod ends as it is told to."""

    deployment: InferenceDeployment = field(default_factory=a_deployment)
    now: float = 1000.0
    job: dict[str, Any] | None = None
    config_map: dict[str, Any] | None = None
    pod_status: dict[str, Any] = field(default_factory=dict)
    jobs_started: int = 0

    @property
    def observed(self) -> Observed:
        pods: tuple[dict[str, Any], ...] = ()
        if self.job is not None:
            owner = [{"uid": self.job["metadata"]["uid"]}]
            pods = ({"metadata": {"name": "m-facts-x", "ownerReferences": owner}, "status": self.pod_status},)
        jobs = () if self.job is None else (self.job,)
        return Observed(config_maps=() if self.config_map is None else (self.config_map,), pods=pods, jobs=jobs)

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


def test_a_model_is_read_once_and_the_job_goes_when_its_words_are_kept() -> None:
    world = World()
    assert isinstance(world.state, Reading)
    world.tick()
    assert world.job is not None
    assert world.tick() == ()
    world.ends(0, json.dumps(FACTS))
    applied, removed = world.tick()
    assert isinstance(applied, Apply)
    assert isinstance(removed, Delete)
    assert world.job is None
    assert isinstance(world.state, Known)
    assert world.state.facts.num_layers == 30
    assert world.tick() == ()


def test_a_failed_job_leaves_its_last_words_and_is_tried_again_after_a_growing_pause() -> None:
    world = World()
    pauses = []
    for _ in range(9):
        world.tick()
        world.ends(2, "loading\ntrimtab-engine: /models/m: no such file")
        world.tick()
        assert world.state == Unreadable("trimtab-engine: /models/m: no such file (exit code 2)")
        since = world.now
        while world.tick() == ():
            world.now += 1.0
        pauses.append(world.now - since)
        assert isinstance(world.state, Unreadable)
    assert pauses[:3] == [FIRST_PAUSE_SECONDS, 2 * FIRST_PAUSE_SECONDS, 4 * FIRST_PAUSE_SECONDS]
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    world.ends(0, json.dumps(FACTS))
    world.tick()
    assert isinstance(world.state, Known)


def test_words_that_are_no_facts_are_a_failure_too() -> None:
    world = World()
    world.tick()
    world.ends(0, "")
    world.tick()
    assert world.state == Unreadable("it said nothing (exit code 0)")


@pytest.mark.parametrize(
    "change", [{"uri": "file:///models/other"}, {"runtime": {"device": "cpu", "image": "engine:2"}}]
)
def test_another_model_or_image_is_read_anew(change: dict[str, Any]) -> None:
    world = World()
    world.tick()
    world.ends(0, json.dumps(FACTS))
    world.tick()
    world.deployment = a_deployment(**change)
    assert isinstance(world.state, Reading)
    world.tick()
    assert world.jobs_started == 2


def test_a_job_that_reads_another_model_makes_way() -> None:
    world = World()
    world.tick()
    world.deployment = a_deployment("file:///models/other")
    (removed,) = world.tick()
    assert isinstance(removed, Delete)
    world.tick()
    assert world.job is not None
    assert world.job["metadata"]["annotations"]["trimtab.dev/facts-of"] == subject_of(world.deployment)


def test_other_edits_read_nothing() -> None:
    world = World()
    world.tick()
    world.ends(0, json.dumps(FACTS))
    world.tick()
    world.deployment = a_deployment(replicas=3, engine={"maxNumSeqs": 4})
    assert world.tick() == ()


def test_without_the_config_map_the_model_is_read_again() -> None:
    world = World()
    world.tick()
    world.ends(0, json.dumps(FACTS))
    world.tick()
    world.config_map = None
    world.tick()
    assert world.jobs_started == 2


@pytest.mark.parametrize("garbage", ["{", "{}", "[]", '{"supported": false}', '{"num_layers": 3}', "[" * 100_000])
def test_a_damaged_config_map_is_as_good_as_none(garbage: str) -> None:
    world = World()
    kept = {SUBJECT_KEY: subject_of(world.deployment), FACTS_KEY: garbage}
    world.config_map = {"metadata": {"name": "m-facts"}, "data": kept}
    assert isinstance(world.state, Reading)
    world.tick()
    assert world.jobs_started == 1
    world.ends(0, json.dumps(FACTS))
    world.tick()
    assert isinstance(world.state, Known)
    assert json.loads(world.data[FACTS_KEY]) == FACTS


@pytest.mark.parametrize("retry_at", [1e12, -1.0, float("inf"), float("nan")])
def test_a_pause_that_no_failure_makes_is_not_kept(retry_at: float) -> None:
    world = World()
    world.tick()
    world.ends(1, "broken")
    world.tick()
    failure = json.loads(world.data[FAILURE_KEY]) | {"retryAt": retry_at, "attempts": -7}
    world.data[FAILURE_KEY] = json.dumps(failure)
    world.tick()
    assert world.jobs_started == 2


@pytest.mark.parametrize("answer", [{"num_layers": 3}, {"supported": False}])
def test_an_answer_that_is_not_understood_is_told_and_asked_for_again_after_a_pause(answer: dict[str, Any]) -> None:
    """By an engine that is older or newer than this operator, for instance."""
    world = World()
    world.tick()
    world.ends(0, json.dumps(answer))
    world.tick()
    assert isinstance(world.state, Unreadable)
    assert "not understood" in world.state.message
    assert world.tick() == ()
    world.now += FIRST_PAUSE_SECONDS
    world.tick()
    assert world.jobs_started == 2


PULL_SECRET = {"spec": {"imagePullSecrets": [{"name": "registry"}]}}


def test_an_edit_that_changes_the_job_ends_the_pause_and_no_other_does() -> None:
    world = World()
    world.tick()
    world.ends(1, "no right to pull")
    world.tick()
    world.deployment = a_deployment(replicas=3)
    assert world.tick() == ()
    world.deployment = a_deployment(template=PULL_SECRET)
    world.tick()
    assert world.jobs_started == 2


def test_a_job_that_an_edit_changes_makes_way_unless_it_knows_the_model_by_now() -> None:
    """It may wait for a node, or for an image, that only the edit gives it."""
    world = World()
    world.tick()
    world.deployment = a_deployment(template=PULL_SECRET)
    (removed,) = world.tick()
    assert isinstance(removed, Delete)
    world.tick()
    assert world.jobs_started == 2
    world.deployment = a_deployment()
    world.ends(0, json.dumps(FACTS))
    world.tick()
    assert isinstance(world.state, Known)
    assert world.jobs_started == 2


def test_a_pod_that_is_gone_with_its_words_is_a_failure_not_a_hang() -> None:
    world = World()
    world.tick()
    assert world.job is not None
    world.job["status"] = {"conditions": [{"type": "Failed", "status": "True", "message": "deadline exceeded"}]}
    world.tick()
    assert world.state == Unreadable("deadline exceeded")


def test_a_job_that_cannot_start_says_why() -> None:
    world = World()
    world.tick()
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    world.pod_status = {"containerStatuses": [{"state": {"waiting": waiting}}]}
    assert world.state == Unreadable("ImagePullBackOff: no such image")
    world.pod_status = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}]}
    assert isinstance(world.state, Reading)
    assert "0/1 nodes" in world.state.message
    assert world.tick() == ()


def test_nothing_starts_while_the_previous_job_goes_away() -> None:
    world = World()
    world.tick()
    assert world.job is not None
    world.job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert world.tick() == ()


def test_an_architecture_that_is_not_run_is_refused_by_name() -> None:
    world = World()
    world.tick()
    other = {"supported": False, "architecture": "BloomForCausalLM", "weights_by_part": None, "refusal": "it has ALiBi"}
    world.ends(0, json.dumps(FACTS | other))
    world.tick()
    assert isinstance(world.state, NotUsable)
    gate = gate_of(world.deployment, world.observed, revision="r1")
    assert "BloomForCausalLM, which this engine does not run (it has ALiBi)" in str(gate.refusals[0])


@given(st.lists(st.sampled_from(["tick", "wait", "succeed", "fail", "lose job", "lose map", "edit"]), max_size=30))
@settings(max_examples=200, deadline=None)
def test_whatever_happens_the_model_is_known_in_the_end(events: list[str]) -> None:
    world = World()
    for event in events:
        if event == "tick":
            world.tick()
        elif event == "wait":
            world.now += 30.0
        elif event in ("succeed", "fail") and world.job is not None:
            world.ends(0, json.dumps(FACTS)) if event == "succeed" else world.ends(1, "broken")
        elif event == "lose job":
            world.job = None
        elif event == "lose map":
            world.config_map = None
        elif event == "edit":
            world.deployment = a_deployment("file:///models/other")
    for _ in range(6):
        world.now += LONGEST_PAUSE_SECONDS
        world.tick()
        if world.job is not None:
            world.ends(0, json.dumps(FACTS))
    world.job = None if isinstance(world.state, Known) else world.job
    assert isinstance(world.state, Known)
    assert world.tick() == ()


# --- the webhook's view and the gate ----------------------------------------------------------------------------------


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
def test_another_folder_of_an_image_and_another_store_are_another_model(
    uri: str, access: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = (a_deployment(uri, model={"uri": uri, "servedName": "m", **of}) for of in (access, other))
    data = {SUBJECT_KEY: subject_of(first), FACTS_KEY: json.dumps(FACTS), COMMIT_KEY: "a" * 64}
    config_map = {"metadata": {"name": "m-facts"}, "data": data}
    observed = Observed(config_maps=(config_map,))
    assert cached_facts(first, config_map) is not None
    assert cached_facts(second, config_map) is None
    assert with_model_facts(first, observed).weights_bytes is not None
    assert with_model_facts(second, observed) == second


def a_running(revision: str, *, ready: bool = True) -> Observed:
    labels = {GROUP_LABEL: "0", REVISION_LABEL: revision}
    status = {"conditions": [{"type": "Ready", "status": str(ready)}]}
    pod = {"metadata": {"name": "m-g0-0", "labels": labels}, "status": status}
    return Observed(stateful_sets=({"metadata": {"name": "m-g0", "labels": labels}},), pods=(pod,))


@pytest.mark.parametrize(
    ("observed", "is_open"),
    [
        (Observed(), False),  # a new resource: no engine before the model is known
        (a_running("r1"), True),  # an operator that has just learned to read models
        (a_running("r1", ready=False), True),  # likewise, and a pod that is down must come back
        (a_running("r0"), False),  # a change waits; what runs goes on
    ],
)
def test_while_the_model_is_not_known_nothing_new_starts_and_nothing_stops(observed: Observed, is_open: bool) -> None:
    gate = gate_of(a_deployment(), observed, revision="r1")
    assert gate.is_open is is_open
    assert gate.refusals == ()


def test_a_layout_whose_memory_the_gpu_does_not_have_starts_nothing() -> None:
    deployment = a_deployment(runtime={"device": "cuda", "image": "engine:1"}, engine={"gpuMemoryUtilization": "0.02"})
    data = {SUBJECT_KEY: subject_of(deployment), FACTS_KEY: json.dumps(FACTS)}
    observed = Observed(config_maps=({"metadata": {"name": "m-facts"}, "data": data},))
    assert gate_of(deployment, observed, revision="r1").refusals == ()
    refused = gate_of(deployment, observed, revision="r1", gpu=gpu_named("L4")).refusals
    assert "L4" in str(refused[0])


def test_what_has_run_comes_back_though_its_nodes_have_gone_meanwhile() -> None:
    deployment = a_deployment(runtime={"device": "cuda", "image": "engine:1"}, engine={"gpuMemoryUtilization": "0.02"})
    data = {SUBJECT_KEY: subject_of(deployment), FACTS_KEY: json.dumps(FACTS)}
    observed = Observed(config_maps=({"metadata": {"name": "m-facts"}, "data": data},))
    gate = gate_of(deployment, observed, revision="r1", gpu=gpu_named("L4"), is_proven=True)
    assert (gate.is_open, gate.refusals) == (True, ())


def test_what_runs_is_believed_over_what_is_predicted() -> None:
    deployment = a_deployment(parallelism={"tensor": 2})
    data = {SUBJECT_KEY: subject_of(deployment), FACTS_KEY: json.dumps(FACTS)}
    kept = ({"metadata": {"name": "m-facts"}, "data": data},)
    assert "num_attention_heads 9" in str(gate_of(deployment, Observed(config_maps=kept), revision="r1").refusals[0])
    running = replace(a_running("r1"), config_maps=kept)
    gate = gate_of(deployment, running, revision="r1")
    assert (gate.is_open, gate.refusals) == (True, ())
