"""`trimtab why NAME`, and `kubectl trimtab why NAME`: what the tuner decided, on which evidence, and what came of it.

It reads the resource and the ConfigMap NAME-tuning with the user's own rights, and changes nothing. What the ConfigMap
says is shown as it stands there: only the operator has the key that would tell whether somebody else wrote it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from trimtab_operator.builders.config_map import STATE_KEY
from trimtab_operator.builders.labels import tuning_name_of
from trimtab_operator.cli.shared import refuse
from trimtab_operator.kube.rbac import missing_right, server_words
from trimtab_operator.planning.gpu_budget import OVER_BUDGET
from trimtab_operator.planning.scheduling_policy import describe_policy, stored_scheduling
from trimtab_operator.resource.signed_text import unverified
from trimtab_operator.resource.spec import GROUP, KIND, PLURAL, VERSION, Tuning
from trimtab_operator.tuner.explanation import why as termination_message
from trimtab_operator.tuner.state import TunerState
from trimtab_operator.tuner.stored import decision_to_json, from_json

REQUEST_SECONDS = 15.0
MAX_SAID = 300  # characters of somebody else's error
DEFAULT_MODE = str(Tuning().mode)  # of a resource whose status says nothing yet
NOT_FOUND = 404


class Output(StrEnum):
    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Found:
    """What the cluster says: the resource, and the text that NAME-tuning holds; None where there is no such ConfigMap,
    as before the first turn."""

    namespace: str
    resource: Mapping[str, Any]
    kept: str | None


def why(
    name: Annotated[str, typer.Argument(help="The InferenceDeployment.")],
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Its namespace. Default: the context's.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="A context of the kubeconfig. Default: the current one.")] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="text or json.")] = Output.TEXT,
) -> None:
    """Tell why the operator tuned a deployment as it did, newest decision first.

    Each with its id (that of the Event, the log and the metric), its evidence, what was predicted, the guide's
    sentence behind the rule, and what came of it. Exit code 2 when the cluster or the deployment cannot be read.
    """
    found = _read(name, namespace, context)
    memory = memory_of(found.kept)
    typer.echo(as_json(found, memory) if output is Output.JSON else as_text(found, memory))


def memory_of(kept: str | None) -> TunerState:
    """What the tuner remembers: nothing where it has written nothing yet, or what stands there is not its text."""
    body = unverified(kept)
    return (None if body is None else from_json(body)) or TunerState()


def as_text(found: Found, memory: TunerState) -> str:
    """A line on how it is tuned now, and the decisions."""
    name = found.resource["metadata"]["name"]
    tuning = (found.resource.get("status") or {}).get("tuning") or {}
    mode = tuning.get("mode") or ((found.resource.get("spec") or {}).get("tuning") or {}).get("mode") or DEFAULT_MODE
    lines = [f"{name} in {found.namespace}: mode {mode}"]
    lines += [f"  promised: {_promises(tuning['objectives'])}"] if tuning.get("objectives") else []
    applied = ", ".join(f"{knob} {value}" for knob, value in sorted((tuning.get("applied") or {}).items()))
    lines += [f"  tuned to: {applied}"] if applied else []
    lines += _queue(tuning.get("schedulingPolicy") or {})
    lines += _replicas(found.resource)
    if mode == "Off" and not memory.history:
        return "\n".join([*lines, "", "Nothing is decided while spec.tuning.mode is Off; Recommend only tells."])
    return "\n".join([*lines, "", termination_message(memory.history, memory.recommendation)])


def as_json(found: Found, memory: TunerState) -> str:
    """The same for programs: newest first."""
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
    """In which order engines serve those that wait, and who does not follow."""
    taken = stored_scheduling({"tuning": {"schedulingPolicy": order}})
    lines = [] if taken is None else [f"  scheduling policy: {taken.policy}: {describe_policy(taken)}"]
    return [*lines, f"  {order['message']}"] if order.get("message") else lines


def _replicas(resource: Mapping[str, Any]) -> list[str]:
    """How many replicas are wanted, where that is the operator's to say, and why fewer are granted."""
    scaling, status = (resource.get("spec") or {}).get("scaling"), resource.get("status") or {}
    conditions = {c.get("reason"): str(c.get("message", "")) for c in status.get("conditions") or []}
    short = [f"  {conditions[OVER_BUDGET]}"] if OVER_BUDGET in conditions else []
    if not scaling or "desiredReplicas" not in status:
        return short
    since = f", since {status['lastScaleTime']}" if status.get("lastScaleTime") else ""
    bounds = f"between {scaling.get('minReplicas', 1)} and {scaling.get('maxReplicas')}"
    count = status.get("wantedReplicas", status["desiredReplicas"])
    return [f"  replicas: {count} wanted{since}, {status.get('readyReplicas', 0)} ready; {bounds}", *short]


def _promises(objectives: Mapping[str, Any]) -> str:
    """`{"ttft": {"target": "2s", "percentile": 95}}` in words."""
    said = []
    for latency in ("ttft", "itl"):
        promise = objectives.get(latency)
        if promise:
            more = f" + {promise['perPromptToken']} per prompt token" if promise.get("perPromptToken") else ""
            share = f" for {promise['percentile']} %" if promise.get("percentile") else ""
            said.append(f"{latency} {promise.get('target')}{more}{share}")
    source = " (the defaults)" if objectives.get("source") == "Default" else ""
    return ", ".join(said) + source


def _read(name: str, namespace: str | None, context: str | None) -> Found:
    """Ask the cluster. Ends the program with a sentence when it cannot be asked."""
    import kubernetes.client  # here, so that commands without a cluster do not wait for it
    import kubernetes.config
    import urllib3.exceptions
    import yaml

    config: Any = kubernetes.config  # its functions have no types
    configuration = kubernetes.client.Configuration()
    configuration.retries = 0
    path = os.environ.get("KUBECONFIG")
    try:
        _, current = config.list_kube_config_contexts(config_file=path)
        config.load_kube_config(config_file=path, context=context, client_configuration=configuration)
    except (kubernetes.config.ConfigException, OSError, yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split())[:MAX_SAID].rstrip(".")
        refuse(f"why: there is no cluster to ask: {said}; set KUBECONFIG, or --context")
    client = kubernetes.client.ApiClient(configuration)
    chosen = namespace or (current["context"].get("namespace") if context is None else None) or "default"
    try:
        resource: Any = kubernetes.client.CustomObjectsApi(client).get_namespaced_custom_object(
            GROUP, VERSION, chosen, PLURAL, name, _request_timeout=REQUEST_SECONDS
        )
        if not isinstance(resource, dict) or "metadata" not in resource:
            refuse(f"why: what answers at {configuration.host} is no Kubernetes API server")
        kept = _kept(kubernetes.client.CoreV1Api(client), name, chosen)
    except kubernetes.client.ApiException as error:
        if error.status == NOT_FOUND:
            refuse(f"why: there is no {KIND} {name} in namespace {chosen}; kubectl get {PLURAL} -A lists them")
        right = missing_right(error)
        if right is not None:
            refuse(f"why: you have no right to {right}; ask for it whoever administers the cluster")
        refuse(f"why: the cluster refuses: {error.status} {server_words(error) or error.reason}")
    except urllib3.exceptions.HTTPError as error:
        refuse(f"why: the cluster does not answer at {configuration.host}: {_reason(error)}")
    return Found(chosen, resource, kept)


def _reason(error: Exception) -> str:
    """The cause behind urllib3's `MaxRetryError`, in its own words."""
    cause = getattr(error, "reason", None) or error
    return " ".join(str(cause).rpartition(": ")[2].split())[:MAX_SAID] or type(cause).__name__


def _kept(core: Any, name: str, namespace: str) -> str | None:
    import kubernetes.client

    try:
        found = core.read_namespaced_config_map(tuning_name_of(name), namespace, _request_timeout=REQUEST_SECONDS)
    except kubernetes.client.ApiException as error:
        if error.status == NOT_FOUND:
            return None
        raise
    return (found.data or {}).get(STATE_KEY)
