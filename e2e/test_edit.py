"""Scenario: an edit rolls the replicas; children edited or deleted by others are restored."""

from __future__ import annotations

from harness.answer import EXPECTED, ask
from harness.deployment import Deployment
from harness.engine import read_engine
from harness.kube import CRD_KIND, Kube, Manifest
from harness.wait import NotYet

REPAIRED_SECONDS = 45.0
APPLIED_SECONDS = 60.0


def _argument(deployment: Deployment, flag: str) -> str | None:
    """Return the value of an engine flag in the running pod, or None if it is not set."""
    main = next(c for c in deployment.pod()["spec"]["containers"] if c["name"] == "main")
    words = [*main.get("command", []), *main.get("args", [])]
    for number, word in enumerate(words):
        if word == flag:
            return str(words[number + 1])
        if word.startswith(f"{flag}="):
            return str(word.split("=", 1)[1])
    return None


def _stateful_set(deployment: Deployment) -> Manifest:
    found = [
        item
        for item in deployment.kube.items("statefulsets", deployment.namespace)
        if deployment.name in item["metadata"].get("labels", {}).values()
    ]
    if len(found) != 1:
        raise NotYet(f"{len(found)} StatefulSets")
    return found[0]


def test_edit_rolls_replica_and_updates_status(ready: Deployment, kube: Kube) -> None:
    before = ready.get()
    uid = ready.pod()["metadata"]["uid"]
    revision = before["status"]["groups"][0]["revision"]
    length = int(before["spec"]["engine"]["maxModelLen"]) - 16
    kube.patch(CRD_KIND, ready.name, ready.namespace, {"spec": {"engine": {"maxModelLen": length}}})

    after = ready.settled()
    assert after["metadata"]["generation"] == before["metadata"]["generation"] + 1
    assert after["status"]["observedGeneration"] == after["metadata"]["generation"]
    assert after["status"]["groups"][0]["revision"] != revision
    assert after["status"]["updatedReplicas"] == 1
    assert ready.pod()["metadata"]["uid"] != uid
    assert _argument(ready, "--max-model-len") == str(length)
    assert EXPECTED in ask(ready).text


def test_ttft_objective_switches_engine_to_deadline_scheduling(ready: Deployment, kube: Kube) -> None:
    """In mode Auto a TTFT objective switches the engine to deadline scheduling; removing it switches back to FCFS."""

    def set_objectives(objectives: Manifest | None, policy: str) -> None:
        kube.patch(CRD_KIND, ready.name, ready.namespace, {"spec": {"objectives": objectives}})

        def is_applied() -> None:
            runs = ready.status()["engine"].get("effective", {}).get("schedulingPolicy")
            if runs != policy:
                raise NotYet(f"the effective schedulingPolicy is {runs}")

        ready.waiter.until(f"the engine uses schedulingPolicy {policy}", is_applied, deadline_seconds=APPLIED_SECONDS)

    before = ready.restarts()
    set_objectives({"ttft": {"target": "2s", "perPromptToken": "125us"}}, "deadline")
    in_force = read_engine(kube, ready.namespace, ready.pod_name()).values
    assert (in_force["ttft_target"], in_force["ttft_target_per_prompt_token"]) == (2.0, 0.000125)
    assert ready.status()["tuning"]["schedulingPolicy"]["ttftTarget"] == "2s"
    set_objectives(None, "fcfs")
    assert ready.restarts() == before


def test_tuning_mode_edit_restarts_nothing(ready: Deployment, kube: Kube) -> None:
    before = ready.restarts()
    kube.patch(CRD_KIND, ready.name, ready.namespace, {"spec": {"tuning": {"mode": "Off"}}})
    ready.ready()
    assert ready.restarts() == before


def test_deleted_service_is_recreated(ready: Deployment, kube: Kube) -> None:
    old = kube.get("service", ready.name, ready.namespace)
    assert old is not None
    kube.delete("service", ready.name, ready.namespace)

    def is_back() -> None:
        now = kube.get("service", ready.name, ready.namespace)
        if now is None or now["metadata"]["uid"] == old["metadata"]["uid"]:
            raise NotYet("the Service is not back")

    ready.waiter.until("the deleted Service is recreated", is_back, deadline_seconds=REPAIRED_SECONDS)


def test_edited_statefulset_is_reverted(ready: Deployment, kube: Kube) -> None:
    child = _stateful_set(ready)
    name, image = child["metadata"]["name"], child["spec"]["template"]["spec"]["containers"][0]["image"]
    drift = [{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "drifted.invalid/engine:0"}]
    kube.patch("statefulset", name, ready.namespace, drift, type_="json")

    def is_repaired() -> None:
        now = _stateful_set(ready)["spec"]["template"]["spec"]["containers"][0]["image"]
        if now != image:
            raise NotYet(f"the image is {now}")

    ready.waiter.until("the drifted image is reverted", is_repaired, deadline_seconds=REPAIRED_SECONDS)
    ready.ready()


def test_deleted_statefulset_is_recreated(ready: Deployment, kube: Kube) -> None:
    uid = _stateful_set(ready)["metadata"]["uid"]
    kube.delete("statefulset", _stateful_set(ready)["metadata"]["name"], ready.namespace)

    def is_back() -> None:
        if _stateful_set(ready)["metadata"]["uid"] == uid:
            raise NotYet("still the old one")

    ready.waiter.until("the deleted StatefulSet is recreated", is_back, deadline_seconds=90.0)
    ready.ready()
