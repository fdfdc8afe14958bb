"""`trimtab history NAME`: what happened to a deployment, in order of time: Events and tuning decisions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from trimtab_operator.builders.config_map import STATE_KEY
from trimtab_operator.builders.labels import tuning_name_of
from trimtab_operator.cli.cluster import Cluster, Context, Namespace
from trimtab_operator.cli.names import complete_name
from trimtab_operator.cli.terminal_output import format_age, new_console, new_table
from trimtab_operator.cli.why_command import Output, memory_of
from trimtab_operator.resource.spec import KIND
from trimtab_operator.resource.time import parse_time, timestamp
from trimtab_operator.tuner.moves import Decision


@dataclass(frozen=True, slots=True)
class Entry:
    """One Event of the resource or of its children, or one tuning decision."""

    time: str
    object: str
    reason: str
    message: str
    count: int = 1
    outcome: str = ""


def history(
    name: Annotated[str, typer.Argument(help="Name of the InferenceDeployment.", autocompletion=complete_name)],
    namespace: Namespace = None,
    context: Context = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of the latest entries to show.")] = 30,
    output: Annotated[Output, typer.Option("--output", "-o", help="Output format: text or json.")] = Output.TEXT,
) -> None:
    """Show the latest Events and tuning decisions of a deployment and its pods, newest last.

    Kubernetes keeps Events for an hour by default; the last ten decisions are kept. `trimtab why` has the evidence of
    each decision. Exit code 2 if the cluster or the deployment cannot be read.
    """
    cluster = Cluster.connect("history", namespace, context)
    cluster.resource(name)
    events = cluster.get(f"/api/v1/namespaces/{cluster.namespace}/events").get("items") or []
    kept = cluster.config_map(tuning_name_of(name))
    decisions = memory_of(None if kept is None else kept.get(STATE_KEY)).history
    entries = entries_of(name, events, decisions)[-limit:]
    if output is Output.JSON:
        typer.echo(json.dumps([asdict(entry) for entry in entries], indent=2))
        return
    if not entries:
        typer.echo(f"{name}: no Events in the last hour and no tuning decisions")
        return
    table = new_table("AGE", "OBJECT", "REASON", "MESSAGE")
    for entry in entries:
        times = f" (x{entry.count})" if entry.count > 1 else ""
        outcome = f"\n→ {entry.outcome}" if entry.outcome else ""
        table.add_row(format_age(entry.time), entry.object, entry.reason, f"{entry.message}{times}{outcome}")
    new_console().print(table)


def entries_of(name: str, events: Iterable[Mapping[str, Any]], decisions: Iterable[Decision]) -> list[Entry]:
    """Return the Events of the resource and its children, and the decisions, oldest first.

    The Event of a decision has the decision's id in its message, so it is left out.
    """
    made = list(decisions)
    ids = [decision.id for decision in made]
    found = [entry for entry in _events(name, events) if not any(f"[{id_}]" in entry.message for id_ in ids)]
    found += [
        Entry(
            timestamp(datetime.fromtimestamp(decision.at, UTC)),
            KIND,
            decision.reason.value,
            decision.sentence,
            outcome=decision.outcome,
        )
        for decision in made
    ]
    return sorted(found, key=lambda entry: parse_time(entry.time) or datetime.min.replace(tzinfo=UTC))


def _events(name: str, events: Iterable[Mapping[str, Any]]) -> Iterator[Entry]:
    for event in events:
        if is_about(event, name):
            about = event["involvedObject"]
            of = KIND if about.get("kind") == KIND else f"{about.get('kind', '')}/{about.get('name', '')}"
            series = event.get("series") or {}
            at = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
            created = (event.get("metadata") or {}).get("creationTimestamp")
            yield Entry(
                str(at or created or ""),
                of,
                str(event.get("reason", "")),
                " ".join(str(event.get("message", "")).split()),
                int(series.get("count") or event.get("count") or 1),
            )


def is_about(event: Mapping[str, Any], name: str) -> bool:
    """Return True if an Event is about the resource or one of its children: NAME-gN…, NAME-router…, NAME-facts…"""
    about = event.get("involvedObject") or {}
    of = str(about.get("name", ""))
    if about.get("kind") == KIND:
        return of == name
    rest = of.removeprefix(f"{name}-")
    return rest != of and (rest.startswith(("router", "facts")) or (rest[:1] == "g" and rest[1:2].isdigit()))
