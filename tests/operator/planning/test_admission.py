"""Webhook responses: the spec for new resources, also the model for edits, nodes as warnings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trimtab_operator.planning.admission import ClusterContext, review, validation_messages
from trimtab_operator.planning.model_facts import FACTS_KEY, SUBJECT_KEY, subject_of
from trimtab_operator.resource.spec import InferenceDeployment

FACTS = (Path(__file__).parents[2] / "golden" / "model_facts_smollm2.json").read_text()


def a_body(device: str = "cpu", **spec: Any) -> dict[str, Any]:
    base = {"model": {"uri": "file:///m/smollm2"}, "runtime": {"device": device, "image": "e"}}
    metadata = {"name": "m", "namespace": "n", "uid": "u"}
    return {"kind": "InferenceDeployment", "metadata": metadata, "spec": {**base, **spec}}


def kept(body: dict[str, Any]) -> dict[str, Any]:
    data = {SUBJECT_KEY: subject_of(InferenceDeployment.parse(body)), FACTS_KEY: json.dumps(json.loads(FACTS))}
    return {"metadata": {"name": "m-facts"}, "data": data}


def verdict(new: dict[str, Any], old: dict[str, Any] | None = None, **known: Any) -> dict[str, Any]:
    operation = "CREATE" if old is None else "UPDATE"
    asked = {"uid": "1", "operation": operation, "object": new, "oldObject": old}
    answer = review({"request": asked}, default_image=None, known=ClusterContext(**known))
    found: dict[str, Any] = answer["response"]
    return found


def test_edit_exceeding_model_limit_is_rejected_with_number() -> None:
    old, new = a_body(), a_body(parallelism={"tensor": 2})
    assert verdict(new)["allowed"] is True
    refused = verdict(new, old, facts=kept(old))
    assert refused["allowed"] is False
    assert "spec.parallelism.tensor: is 2" in refused["status"]["message"]
    assert "num_attention_heads 9" in refused["status"]["message"]


def test_facts_of_other_model_reject_nothing() -> None:
    other = a_body(model={"uri": "file:///other/x"})
    assert verdict(a_body(parallelism={"tensor": 2}), a_body(), facts=kept(other))["allowed"] is True


def test_admission_preexisting_layout_error_allows_other_edits() -> None:
    old = a_body(parallelism={"tensor": 2})
    new = a_body(parallelism={"tensor": 2}, replicas=0)
    assert verdict(new, old, facts=kept(old))["allowed"] is True


@pytest.mark.parametrize(
    ("mode", "said"),
    [("Recommend", "only recommends a replica count"), ("Off", "does not change the replica count"), ("Auto", None)],
)
def test_scaling_without_auto_mode_is_accepted_with_warning(mode: str, said: str | None) -> None:
    answer = verdict(a_body(scaling={"maxReplicas": 3}, tuning={"mode": mode}))
    assert answer["allowed"] is True
    assert [said in warning for warning in answer.get("warnings", [])] == ([] if said is None else [True])


def test_removing_scaling_warns_about_replica_change() -> None:
    old = {**a_body(scaling={"maxReplicas": 9}, replicas=1), "status": {"desiredReplicas": 7}}
    (warning,) = verdict(a_body(replicas=1), old)["warnings"]
    assert "the replica count changes from 7 to spec.replicas (1)" in warning
    assert "warnings" not in verdict(a_body(replicas=7), old)


def test_more_gpus_than_any_node_has_are_accepted_with_a_warning() -> None:
    node = {"metadata": {"name": "n"}, "status": {"allocatable": {"nvidia.com/gpu": "4"}}}
    answer = verdict(a_body("cuda", parallelism={"tensor": 8}), nodes=[node])
    assert answer["allowed"] is True
    assert "requests 8 GPUs" in answer["warnings"][0]
    assert "warnings" not in verdict(a_body("cuda", parallelism={"tensor": 4}), nodes=[node])
    assert "warnings" not in verdict(a_body("cuda", parallelism={"tensor": 8}))


def test_wrong_types_do_not_hide_violated_rules() -> None:
    spec = {
        "replicas": "2",
        "scaling": {"minReplicas": 3, "maxReplicas": 2},
        "runtime": {"device": "cpu", "args": ["--sead=1"]},
        "template": {"spec": {"nodeSelector": {"nvidia.com/gpu.present": "yes"}, "containers": [{"name": "app"}]}},
    }
    lines = validation_messages(a_body() | {"spec": {"model": {"uri": "file:///m"}, **spec}}, default_image="e")
    fields = [line.partition(":")[0] for line in lines]
    assert fields[0] == "spec.replicas"
    assert {"spec.scaling.minReplicas", "spec.runtime.args[0]", "spec.template.spec.containers[0].name"} <= set(fields)


def test_rule_about_a_field_of_wrong_type_is_not_reported() -> None:
    body = a_body(scaling={"minReplicas": "3", "maxReplicas": 2})
    assert [line.partition(":")[0] for line in validation_messages(body, default_image="e")] == [
        "spec.scaling.minReplicas"
    ]


def test_class_cannot_be_changed() -> None:
    for before, after in ((None, "blue"), ("blue", None), ("blue", "green")):
        old, new = (a_body(**({} if name is None else {"class": name})) for name in (before, after))
        refused = verdict(new, old)
        assert refused["allowed"] is False
        assert "spec.class: cannot be changed" in refused["status"]["message"]


def test_ignored_replicas_may_be_removed_but_not_changed() -> None:
    scaling = {"minReplicas": 1, "maxReplicas": 9}
    old = a_body(scaling=scaling, replicas=5)
    assert verdict(a_body(scaling=scaling), old)["allowed"] is True
    assert verdict(a_body(scaling=scaling, replicas=1), old)["allowed"] is True, "the default of the API server"
    assert verdict(a_body(scaling=scaling, replicas=4), old)["allowed"] is False


@pytest.mark.parametrize(
    ("router", "has_router", "is_allowed"), [({}, True, True), ({}, False, False), ({"enabled": False}, False, True)]
)
def test_router_is_rejected_without_routers_in_installation(
    router: dict[str, Any], has_router: bool, is_allowed: bool
) -> None:
    request = {"uid": "1", "operation": "CREATE", "object": a_body(router=router)}
    found = review({"request": request}, default_image=None, has_router=has_router)["response"]
    assert found["allowed"] is is_allowed
    if not is_allowed:
        assert "spec.router: this operator has no --router" in found["status"]["message"]
