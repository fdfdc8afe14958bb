"""Commands of `trimtab` for deployments in a cluster: status, set, export, pause and resume."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from trimtab_operator.builders.record import CAPPED_FIELDS, LIVE_FIELDS
from trimtab_operator.cli.cluster import Cluster, Context, Namespace
from trimtab_operator.cli.names import complete_name
from trimtab_operator.cli.shared import exit_with_error
from trimtab_operator.cli.terminal_output import new_console, new_table
from trimtab_operator.cli.why_command import Output
from trimtab_operator.resource.crd import structural
from trimtab_operator.resource.spec import PAUSED, Spec

Name = Annotated[str, typer.Argument(help="Name of the InferenceDeployment.", autocompletion=complete_name)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Validate the change in the cluster, but do not make it.")]
SHOWN_CONDITIONS = ("Ready", "Progressing", "TuningActive", "MetricsAvailable", "ScalingLimited", "Degraded")
SERVER_METADATA = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink")
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
Json = dict[str, Any]


def status(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of the InferenceDeployment. Default: list all.", autocompletion=complete_name),
    ] = None,
    namespace: Namespace = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List the deployments of all namespaces.")
    ] = False,
    context: Context = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Output format: text or json.")] = Output.TEXT,
) -> None:
    """Show deployments, or one with its replicas, parameters and conditions.

    Parameters are shown as configured in the spec, as effective in all engines, and as recommended by tuning. Exit code
    2 if the cluster or the deployment cannot be read.
    """
    cluster = Cluster.connect("status", namespace, context)
    found = [cluster.resource(name)] if name else cluster.resources(all_namespaces=all_namespaces)
    if output is Output.JSON:
        typer.echo(json.dumps(found[0] if name else found, indent=2))
        return
    console = new_console()
    if name:
        _print_one(console, found[0])
    elif found:
        console.print(_list_table(found, with_namespace=all_namespaces))
    else:
        typer.echo("no InferenceDeployment found; `kubectl apply` one, or use -A for all namespaces")


def _list_table(resources: Sequence[Json], *, with_namespace: bool) -> Table:
    columns = [*(["NAMESPACE"] if with_namespace else []), "NAME", "READY", "PHASE", "TUNING", "MODEL", "LAST DECISION"]
    table = new_table(*columns)
    for resource in resources:
        metadata, state = resource["metadata"], resource.get("status") or {}
        history = (state.get("tuning") or {}).get("history") or [{}]
        row = [
            metadata["name"],
            state.get("ready", ""),
            state.get("phase", "Pending"),
            _mode(resource),
            (resource.get("spec") or {}).get("model", {}).get("uri", ""),
            history[0].get("message", ""),
        ]
        table.add_row(*([metadata.get("namespace", "")] if with_namespace else []), *row)
    return table


def _print_one(console: Console, resource: Json) -> None:
    state = resource.get("status") or {}
    metadata = resource["metadata"]
    console.print(
        f"{metadata['name']} in {metadata.get('namespace', 'default')}: {state.get('ready', '0/0')} replicas ready, "
        f"{state.get('phase', 'Pending')}, tuning {_mode(resource)}"
    )
    if state.get("url"):
        console.print(f"serves {state.get('model', '')} at {state['url']}")
    groups = new_table("REPLICA", "PHASE", "REVISION", "LOADING", "MESSAGE")
    for group in state.get("groups") or ():
        load = group.get("load")
        loading = f"{load['stage']} {load['percent']} %" if load and load["stage"] != "ready" else ""
        groups.add_row(group["name"], group["phase"], group["revision"], loading, group.get("message", ""))
    if groups.row_count:
        console.print(groups)
    parameters = new_table("PARAMETER", "CONFIGURED", "EFFECTIVE", "RECOMMENDED", "CHANGE")
    for row in parameter_rows(resource):
        parameters.add_row(*row)
    if parameters.row_count:
        console.print(parameters)
    conditions = new_table("CONDITION", "STATUS", "REASON", "MESSAGE")
    for condition in state.get("conditions") or ():
        if condition["type"] in SHOWN_CONDITIONS:
            conditions.add_row(
                condition["type"], condition["status"], condition["reason"], condition.get("message", "")
            )
    console.print(conditions)


def parameter_rows(resource: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield name, configured, effective and recommended value of each engine parameter, and how a change is made."""
    state = resource.get("status") or {}
    engine, tuning = state.get("engine") or {}, state.get("tuning") or {}
    configured, effective = engine.get("configured") or {}, engine.get("effective") or {}
    recommendation = tuning.get("recommendation") or {}
    for name in sorted(configured.keys() | effective.keys()):
        recommended = recommendation.get("to", "") if recommendation.get("knob") == name else ""
        change = "live" if name in LIVE_FIELDS else "rolling"
        yield name, str(configured.get(name, "")), str(effective.get(name, "")), str(recommended), change


def _mode(resource: Mapping[str, Any]) -> str:
    spec, state = resource.get("spec") or {}, resource.get("status") or {}
    mode = (state.get("tuning") or {}).get("mode") or (spec.get("tuning") or {}).get("mode") or "Off"
    return f"{mode} (paused)" if _is_paused(resource) else str(mode)


def _is_paused(resource: Mapping[str, Any]) -> bool:
    annotations = resource["metadata"].get("annotations") or {}
    return str(annotations.get(PAUSED, "false")) != "false"


def set_fields(
    name: Name,
    values: Annotated[
        list[str],
        typer.Argument(
            help="FIELD=VALUE; a field of spec.engine, or its path, such as spec.replicas.",
            autocompletion=complete_field,
        ),
    ],
    namespace: Namespace = None,
    context: Context = None,
    dry_run: DryRun = False,
) -> None:
    """Change fields of a deployment's spec, and print which are live and which replace replicas.

    Use it for trials; with GitOps, change the manifest instead, because the next sync sets the fields back.
    """
    changes = [_change(text) for text in values]
    cluster = Cluster.connect("set", namespace, context)
    cluster.patch(name, _merge_patch(changes), dry_run=dry_run)
    for path, value in changes:
        field = path.removeprefix("spec.engine.")
        limit = " up to the cap" if field in CAPPED_FIELDS.values() else ""
        effect = f"live{limit}: running requests continue" if field in LIVE_FIELDS else "rolling: replicas are replaced"
        typer.echo(f"{path} = {json.dumps(value)}  ({effect}){' (dry run)' if dry_run else ''}")


def complete_field(incomplete: str) -> list[str]:
    """Return the fields of spec.engine, or the values of an enumeration, that begin with `incomplete`."""
    fields = structural(Spec)["properties"]["engine"]["properties"]
    name, equals, _ = incomplete.partition("=")
    found = (
        [f"{name}={value}" for value in fields.get(name, {}).get("enum", ())] if equals else [f"{f}=" for f in fields]
    )
    return [word for word in found if word.startswith(incomplete)]


def _change(text: str) -> tuple[str, Any]:
    """Return the path and the typed value of FIELD=VALUE."""
    name, equals, given = text.partition("=")
    path = name if name.startswith("spec.") else f"spec.engine.{name}"
    if not equals:
        exit_with_error(f"set: {text!r} is not FIELD=VALUE, such as gpuMemoryUtilization=0.85")
    node: Mapping[str, Any] = structural(Spec)
    for part in path.removeprefix("spec.").split("."):
        known = node.get("properties", {})
        if part not in known:
            exit_with_error(f"set: {path}: there is no field {part}; choose one of {', '.join(sorted(known))}")
        node = known[part]
    kind = node.get("type")
    try:
        value = given if kind == "string" or "x-kubernetes-int-or-string" in node else json.loads(given)
    except ValueError:
        exit_with_error(f"set: {path}: {given!r} is not of type {kind}")
    return path, value


def _merge_patch(changes: Sequence[tuple[str, Any]]) -> Json:
    patch: Json = {}
    for path, value in changes:
        *parents, last = path.split(".")
        node = patch
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return patch


def export(name: Name, namespace: Namespace = None, context: Context = None) -> None:
    """Print the deployment's manifest with the tuned values as start values, to commit.

    Server-side fields and the status are left out.
    """
    cluster = Cluster.connect("export", namespace, context)
    typer.echo(yaml.safe_dump(exported(cluster.resource(name)), sort_keys=False), nl=False)


def exported(resource: Mapping[str, Any]) -> Json:
    """Return the manifest of a resource, in which values that tuning applied are the start values."""
    metadata = {key: value for key, value in resource["metadata"].items() if key not in SERVER_METADATA}
    annotations = {
        k: v for k, v in (metadata.pop("annotations", None) or {}).items() if k not in (LAST_APPLIED, PAUSED)
    }
    if annotations:
        metadata["annotations"] = annotations
    spec: Json = json.loads(json.dumps(resource["spec"]))
    applied = ((resource.get("status") or {}).get("tuning") or {}).get("applied") or {}
    fields = structural(Spec)["properties"]["engine"]["properties"]
    for field, value in applied.items():
        if field in fields:
            spec.setdefault("engine", {})[field] = int(value) if fields[field].get("type") == "integer" else str(value)
    return {"apiVersion": resource["apiVersion"], "kind": resource["kind"], "metadata": metadata, "spec": spec}


def pause(name: Name, namespace: Namespace = None, context: Context = None) -> None:
    """Stop the operator from changing a deployment. Engines and router keep serving."""
    Cluster.connect("pause", namespace, context).patch(name, {"metadata": {"annotations": {PAUSED: "true"}}})
    typer.echo(f"{name} is paused: the operator changes nothing until `trimtab resume {name}`")


def resume(name: Name, namespace: Namespace = None, context: Context = None) -> None:
    """Let the operator reconcile a paused deployment again."""
    Cluster.connect("resume", namespace, context).patch(name, {"metadata": {"annotations": {PAUSED: None}}})
    typer.echo(f"{name} is resumed")
