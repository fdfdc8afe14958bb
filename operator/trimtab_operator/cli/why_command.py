"""`trimtab why NAME` and `kubectl trimtab why NAME`: tuning decisions with their evidence and outcomes.

The command reads the resource and the ConfigMap NAME-tuning with the user's permissions, and writes nothing. It shows
the ConfigMap without verifying its signature, because only the operator has the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from trimtab_operator.builders.config_map import STATE_KEY
from trimtab_operator.builders.labels import tuning_name_of
from trimtab_operator.cli.cluster import Cluster, Context, Namespace
from trimtab_operator.cli.names import complete_name
from trimtab_operator.planning.gpu_budget import OVER_BUDGET
from trimtab_operator.planning.scheduling_policy import describe_policy, stored_scheduling
from trimtab_operator.resource.signed_text import read_unverified
from trimtab_operator.resource.spec import Tuning
from trimtab_operator.tuner.explanation import why as explain_decisions
from trimtab_operator.tuner.state import TunerState
from trimtab_operator.tuner.stored import decision_to_json, from_json

DEFAULT_MODE = str(Tuning().mode)  # of a resource without a status


class Output(StrEnum):
    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Found:
    """The resource, and the text of NAME-tuning; None if the ConfigMap does not exist yet."""

    namespace: str
    resource: Mapping[str, Any]
    kept: str | None


def why(
    name: Annotated[str, typer.Argument(help="Name of the InferenceDeployment.", autocompletion=complete_name)],
    namespace: Namespace = None,
    context: Context = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Output format: text or json.")] = Output.TEXT,
) -> None:
    """Explain the tuning decisions of a deployment, newest first.

    Each decision has its id (as in the Event, the log and the metric), its evidence, the prediction, the rule from the
    tuning guide, and the outcome. Exit code 2 if the cluster or the deployment cannot be read.
    """
    found = _read(name, namespace, context)
    memory = memory_of(found.kept)
    typer.echo(as_json(found, memory) if output is Output.JSON else as_text(found, memory))


def memory_of(kept: str | None) -> TunerState:
    """Return the tuner's state; an empty state if the text is missing or invalid."""
    body = read_unverified(kept)
    return (None if body is None else from_json(body)) or TunerState()


def as_text(found: Found, memory: TunerState) -> str:
    """Return the current tuning state and the decisions as text."""
    name = found.resource["metadata"]["name"]
    tuning = (found.resource.get("status") or {}).get("tuning") or {}
    mode = tuning.get("mode") or ((found.resource.get("spec") or {}).get("tuning") or {}).get("mode") or DEFAULT_MODE
    lines = [f"{name} in {found.namespace}: mode {mode}"]
    lines += [f"  objectives: {_describe_objectives(tuning['objectives'])}"] if tuning.get("objectives") else []
    applied = ", ".join(f"{knob} {value}" for knob, value in sorted((tuning.get("applied") or {}).items()))
    lines += [f"  tuned to: {applied}"] if applied else []
    lines += _queue(tuning.get("schedulingPolicy") or {})
    lines += _replicas(found.resource)
    if mode == "Off" and not memory.history:
        return "\n".join(
            [
                *lines,
                "",
                "spec.tuning.mode is Off: no decisions are made. Recommend reports decisions without applying them.",
            ]
        )
    return "\n".join([*lines, "", explain_decisions(memory.history, memory.recommendation)])


def as_json(found: Found, memory: TunerState) -> str:
    """Return the current tuning state and the decisions as JSON, newest first."""
    recommendation = memory.recommendation
    return json.dumps(
        {
            "name": found.resource["metadata"]["name"],
            "namespace": found.namespace,
            "tuning": (found.resource.get("status") or {}).get("tuning") or {},
            "recommendation": None if recommendation is None else decision_to_json(recommendation),
            "decisions": [decision_to_json(decision) for decision in reversed(memory.history)],
        },
        indent=2,
    )


def _queue(order: Mapping[str, Any]) -> list[str]:
    """Return the scheduling policy, and the engines that do not apply it."""
    taken = stored_scheduling({"tuning": {"schedulingPolicy": order}})
    lines = [] if taken is None else [f"  scheduling policy: {taken.policy}: {describe_policy(taken)}"]
    return [*lines, f"  {order['message']}"] if order.get("message") else lines


def _replicas(resource: Mapping[str, Any]) -> list[str]:
    """Return the desired replicas if spec.scaling is set, and the reason for fewer under a GPU budget."""
    scaling, status = (resource.get("spec") or {}).get("scaling"), resource.get("status") or {}
    conditions = {c.get("reason"): str(c.get("message", "")) for c in status.get("conditions") or []}
    short = [f"  {conditions[OVER_BUDGET]}"] if OVER_BUDGET in conditions else []
    if not scaling or "desiredReplicas" not in status:
        return short
    since = f", since {status['lastScaleTime']}" if status.get("lastScaleTime") else ""
    bounds = f"between {scaling.get('minReplicas', 1)} and {scaling.get('maxReplicas')}"
    count = status.get("wantedReplicas", status["desiredReplicas"])
    return [f"  replicas: {count} desired{since}, {status.get('readyReplicas', 0)} ready; {bounds}", *short]


def _describe_objectives(objectives: Mapping[str, Any]) -> str:
    """Format `{"ttft": {"target": "2s", "percentile": 95}}` as text."""
    parts = []
    for latency in ("ttft", "itl"):
        objective = objectives.get(latency)
        if objective:
            more = f" + {objective['perPromptToken']} per prompt token" if objective.get("perPromptToken") else ""
            share = f" for {objective['percentile']} % of requests" if objective.get("percentile") else ""
            parts.append(f"{latency} {objective.get('target')}{more}{share}")
    source = " (the defaults)" if objectives.get("source") == "Default" else ""
    return ", ".join(parts) + source


def _read(name: str, namespace: str | None, context: str | None) -> Found:
    """Read the resource and its tuning state."""
    cluster = Cluster.connect("why", namespace, context)
    resource = cluster.resource(name)
    kept = cluster.config_map(tuning_name_of(name))
    return Found(cluster.namespace, resource, None if kept is None else kept.get(STATE_KEY))
