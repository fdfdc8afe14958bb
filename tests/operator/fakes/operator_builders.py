"""The values that the operator's tests are about: resources, pods, groups, nodes. Each keeps only what matters in view.

Times are Unix seconds; NOW is a fixed moment, so that nothing depends on the clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trimtab_operator.builders.labels import DEPLOYMENT_LABEL, GROUP_LABEL, LEADER, REVISION_LABEL, ROLE_LABEL, WORKER
from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.groups import Group, MissingPods, ObservedChildren, groups_of
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.resource.time import timestamp

NOW = 1_767_268_800.0  # 2026-01-01T12:00:00Z
GOLDEN = Path(__file__).parents[2] / "golden"
MODEL_FACTS: dict[str, Any] = json.loads((GOLDEN / "model_facts_smollm2.json").read_text())
"""What the engine says of SmolLM2-135M: 30 layers, 9 heads, 3 heads of KV."""
ONE_RANK = Degrees(tensor=1, pipeline=1, data=1, expert=False, world_size=1)


def at(seconds: float) -> str:
    """The moment so many seconds after NOW, as Kubernetes writes it."""
    return timestamp(moment(seconds))


def moment(seconds: float = 0.0) -> datetime:
    """The moment so many seconds after NOW."""
    return datetime.fromtimestamp(NOW + seconds, UTC)


# --- resources --------------------------------------------------------------------------------------------------------


def a_spec(**spec: Any) -> dict[str, Any]:
    """A spec that is served on the CPU, with these parts in the place of its own."""
    return {"model": {"uri": "file:///models/m"}, "runtime": {"device": "cpu", "image": "engine:1"}, **spec}


def a_resource(
    *, generation: int = 1, status: Mapping[str, Any] | None = None, name: str = "m", **spec: Any
) -> dict[str, Any]:
    """An InferenceDeployment as the API server gives it."""
    metadata = {"name": name, "namespace": "n", "uid": f"u-{name}", "generation": generation}
    return {"metadata": metadata, "spec": a_spec(**spec), "status": dict(status or {})}


def a_deployment(
    *, generation: int = 1, status: Mapping[str, Any] | None = None, name: str = "m", **spec: Any
) -> InferenceDeployment:
    """An InferenceDeployment as the operator reads it."""
    return InferenceDeployment.parse(a_resource(generation=generation, status=status, name=name, **spec))


# --- pods and groups --------------------------------------------------------------------------------------------------

READY: dict[str, Any] = {
    "conditions": [{"type": "Ready", "status": "True"}],
    "containerStatuses": [{"name": "main", "restartCount": 0, "state": {"running": {}}}],
}
RUNNING: dict[str, Any] = {"containerStatuses": [{"name": "main", "restartCount": 0, "state": {"running": {}}}]}


def labels_of(role: str = LEADER, *, ordinal: int = 0, revision: str = "r1", name: str = "m") -> dict[str, str]:
    """The labels of a pod or StatefulSet of a group."""
    return {DEPLOYMENT_LABEL: name, GROUP_LABEL: str(ordinal), ROLE_LABEL: role, REVISION_LABEL: revision}


def a_pod(
    role: str = LEADER,
    number: int = 0,
    *,
    ordinal: int = 0,
    name: str = "m",
    uid: str | None = None,
    revision: str = "r1",
    status: Mapping[str, Any] = READY,
    node: str | None = "one",
    unschedulable_message: str | None = None,
    since: float = -3600.0,
    created: float = -3600.0,
    deleted: float | None = None,
    grace_seconds: int = 45,
) -> dict[str, Any]:
    """A pod of a group: placed on `node` `since` then, or without one, in the scheduler's words `unschedulable`."""
    set_name = f"{name}-g{ordinal}" + ("" if role == LEADER else "-w")
    metadata: dict[str, Any] = {
        "name": f"{set_name}-{number}",
        "namespace": "n",
        "uid": f"u-{set_name}-{number}" if uid is None else uid,
        "labels": labels_of(role, ordinal=ordinal, revision=revision, name=name),
        "creationTimestamp": at(created),
        "ownerReferences": [{"kind": "StatefulSet", "name": set_name, "uid": f"u-{set_name}", "controller": True}],
    }
    if deleted is not None:
        metadata |= {"deletionTimestamp": at(deleted + grace_seconds), "deletionGracePeriodSeconds": grace_seconds}
    placed: dict[str, Any] = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(since)}
    if node is None or unschedulable_message is not None:
        node, placed = None, placed | {"status": "False", "message": unschedulable_message or "no node takes it"}
    conditions = [placed, *(status.get("conditions") or [])]
    spec = {} if node is None else {"nodeName": node}
    return {"metadata": metadata, "spec": spec, "status": {**status, "conditions": conditions}}


def not_ready(pod: dict[str, Any]) -> dict[str, Any]:
    """The same pod, which takes no requests."""
    conditions = [c for c in pod["status"]["conditions"] if c["type"] != "Ready"]
    return {**pod, "status": {**pod["status"], "conditions": [*conditions, {"type": "Ready", "status": "False"}]}}


def a_stateful_set(
    role: str = LEADER,
    *,
    ordinal: int = 0,
    name: str = "m",
    revision: str = "r1",
    replicas: int = 1,
    created: float = -3600.0,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """One of the StatefulSets of a group."""
    set_name = f"{name}-g{ordinal}" + ("" if role == LEADER else "-w")
    metadata = {
        "name": set_name,
        "namespace": "n",
        "uid": f"u-{set_name}",
        "labels": labels_of(role, ordinal=ordinal, revision=revision, name=name),
        "annotations": dict(annotations or {}),
        "creationTimestamp": at(created),
    }
    return {"metadata": metadata, "spec": {"replicas": replicas}}


def observed(*pods: dict[str, Any], workers: int | None = None, **of_sets: Any) -> ObservedChildren:
    """The children of a resource with one group: these pods, and its StatefulSets, two when it has `workers`."""
    sets = [a_stateful_set(**of_sets)]
    if workers is not None:
        sets.append(a_stateful_set(WORKER, replicas=workers, **of_sets))
    return ObservedChildren(stateful_sets=tuple(sets), pods=pods)


def a_group(
    *pods: dict[str, Any], workers: int | None = None, missing: MissingPods | None = None, **of_sets: Any
) -> Group:
    """One group as it is observed. Without `workers` it is of one pod."""
    seen = observed(*pods, workers=workers, **of_sets)
    name = str(seen.stateful_sets[0]["metadata"]["name"])
    (group,) = groups_of(replace(seen, missing={} if missing is None else {name: missing}))
    return group


# --- nodes ------------------------------------------------------------------------------------------------------------


def a_node(name: str = "one", ready: str = "True", *, since: float = -3600.0, gpus: int = 0) -> dict[str, Any]:
    """A node whose condition Ready has been so `since` then."""
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": at(since)}
    allocatable = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    return {"metadata": {"name": name}, "status": {"conditions": [condition], "allocatable": allocatable}}
