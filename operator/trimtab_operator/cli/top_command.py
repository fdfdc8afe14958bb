"""`trimtab top`: the present load of deployments, read from their engines through the API server's proxy.

The command needs permission to list pods and to get `pods/proxy`. Nothing is written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group
from rich.live import Live
from rich.text import Text

from trimtab_operator.builders.labels import (
    COMPONENT_LABEL,
    DEPLOYMENT_LABEL,
    HTTP_PORT,
    LEADER,
    ROLE_LABEL,
    ROUTER_ADMIN_PORT,
    ROUTER_COMPONENT,
)
from trimtab_operator.cli.cluster import Cluster, Context, Namespace
from trimtab_operator.cli.names import complete_name
from trimtab_operator.cli.terminal_output import format_seconds, new_console, new_table, share_bar
from trimtab_operator.cli.why_command import Output
from trimtab_operator.engines.scrape import parse_metrics
from trimtab_operator.observed.engine_load import Limits, Load, limits_of, measure_load
from trimtab_operator.tuner.samples import Sample

MAX_CONCURRENT_READS = 16
ROUTER_QUEUE = "trimtab_router_held_requests"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One deployment, or one replica of it, with its load; None until two samples were read."""

    namespace: str
    name: str
    ready: str
    phase: str
    limits: Limits
    load: Load | None
    router_held: float | None = None
    """Requests that the router holds; None without a router."""
    problem: str | None = None


def top(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of the InferenceDeployment. Default: all of the namespace.", autocompletion=complete_name
        ),
    ] = None,
    namespace: Namespace = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Show the deployments of all namespaces.")
    ] = False,
    context: Context = None,
    replicas: Annotated[bool, typer.Option("--replicas", help="Show each replica.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Measure one interval, print it and exit.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="Interval of a measurement, in seconds.")] = 2.0,
    output: Annotated[Output, typer.Option("--output", "-o", help="Output format: text or json.")] = Output.TEXT,
) -> None:
    """Show the load of deployments: KV cache, sequence slots, token budget, latencies against objectives, preemptions.

    Latencies are at the percentile of the objective, or at 95 percent. Exit code 2 if the cluster or the deployment
    cannot be read. JSON implies --once.
    """
    cluster = Cluster.connect("top", namespace, context)
    view = _View(cluster, name, all_namespaces=all_namespaces, replicas=replicas)
    view.read()
    console = new_console()
    if output is Output.JSON or once or not console.is_terminal:
        time.sleep(interval)
        rows = view.read()
        if output is Output.JSON:
            typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        else:
            console.print(render(rows))
        return
    with Live(render(view.rows), console=console, screen=False, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                live.update(render(view.read()), refresh=True)
        except KeyboardInterrupt:
            return


class _View:
    """The deployments to show, with the previous sample of each engine."""

    def __init__(self, cluster: Cluster, name: str | None, *, all_namespaces: bool, replicas: bool) -> None:
        self.cluster, self.name, self.all_namespaces, self.replicas = cluster, name, all_namespaces, replicas
        self.rows: list[Row] = []
        self._samples: dict[str, Sample] = {}

    def read(self) -> list[Row]:
        """Read all engines once, and return the rows with the load since the previous call."""
        if self.name:
            resources = [self.cluster.resource(self.name)]
        else:
            resources = self.cluster.resources(all_namespaces=self.all_namespaces)
        pods = self._pods()
        with ThreadPoolExecutor(MAX_CONCURRENT_READS) as pool:
            pages = dict(zip(map(_key, pods), pool.map(self._page, pods), strict=True))
        previous, self._samples = self._samples, {}
        held: dict[str, float] = {}
        for pod in pods:
            key, page = _key(pod), pages[_key(pod)]
            if _is_router(pod):
                held[_owner(pod)] = held.get(_owner(pod), 0.0) + _gauge(page, ROUTER_QUEUE)
            elif page is not None:
                sample = parse_metrics(page, at=time.time())
                if isinstance(sample, Sample):
                    self._samples[key] = sample
        self.rows = [row for resource in resources for row in self._rows_of(resource, pods, previous, held)]
        return self.rows

    def _rows_of(
        self, resource: Json, pods: Sequence[Json], previous: Mapping[str, Sample], held: Mapping[str, float]
    ) -> Iterator[Row]:
        metadata, status = resource["metadata"], resource.get("status") or {}
        namespace, name = metadata.get("namespace", "default"), metadata["name"]
        limits = limits_of(resource)
        engines = [pod for pod in pods if _owner(pod) == f"{namespace}/{name}" and not _is_router(pod)]
        pairs = {
            _key(pod): (previous[_key(pod)], self._samples[_key(pod)])
            for pod in engines
            if _key(pod) in previous and _key(pod) in self._samples
        }
        readable = [pod for pod in engines if _key(pod) in self._samples]
        unread = "no engine runs" if not engines else f"metrics of {len(engines) - len(readable)} engines not readable"
        yield Row(
            namespace,
            name,
            status.get("ready", "0/0"),
            status.get("phase", "Pending"),
            limits,
            measure_load(list(pairs.values()), limits),
            held.get(f"{namespace}/{name}"),
            problem=None if engines and len(readable) == len(engines) else unread,
        )
        for pod in engines if self.replicas else ():
            pair = pairs.get(_key(pod))
            load = measure_load([] if pair is None else [pair], limits)
            yield Row(namespace, f"└ {pod['metadata']['name']}", "", "", limits, load)

    def _pods(self) -> list[Json]:
        scope = "" if self.all_namespaces and not self.name else f"/namespaces/{self.cluster.namespace}"
        selector = f"{DEPLOYMENT_LABEL}={self.name}" if self.name else DEPLOYMENT_LABEL
        items: list[Json] = self.cluster.get(f"/api/v1{scope}/pods", labelSelector=selector).get("items") or []
        return [
            pod
            for pod in items
            if (_is_router(pod) or pod["metadata"]["labels"].get(ROLE_LABEL) == LEADER)
            and (pod.get("status") or {}).get("phase") == "Running"
        ]

    def _page(self, pod: Json) -> bytes | None:
        metadata = pod["metadata"]
        port = ROUTER_ADMIN_PORT if _is_router(pod) else HTTP_PORT
        return self.cluster.text(
            f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}:{port}/proxy/metrics"
        )


def render(rows: Sequence[Row]) -> Group | Text:
    """Return the table of bars."""
    if not rows:
        return Text("no InferenceDeployment found; `kubectl apply` one, or use -A for all namespaces")
    table = new_table(
        "NAME", "READY", "KV CACHE", "SLOTS", "BUDGET", "TTFT", "ITL", "REQ/S", "TOK/S", "WAIT", "PREEMPT/MIN", "ROUTER"
    )
    problems = []
    for row in rows:
        load = row.load
        if row.problem:
            problems.append(Text(f"{row.namespace}/{row.name}: {row.problem} ({row.phase})", style="yellow"))
        if load is None:
            dashes = [share_bar(None, width=10)] * 3 + [Text("-", style="dim")] * 6
            table.add_row(row.name, row.ready, *dashes, _count(row.router_held))
            continue
        table.add_row(
            row.name,
            row.ready,
            share_bar(load.kv_usage, width=10),
            share_bar(load.slots_used, width=10),
            share_bar(load.budget_used, width=10),
            _latency(load.ttft, row.limits.ttft.seconds),
            _latency(load.itl, row.limits.itl.seconds),
            _count(load.requests_per_second),
            _count(load.tokens_per_second),
            _count(load.waiting),
            _count(load.preemptions_per_minute),
            _count(row.router_held),
        )
    return Group(table, *problems)


def _latency(seconds: float | None, target: float | None) -> Text:
    if seconds is None:
        return Text("-", style="dim")
    if target is None:
        return Text(format_seconds(seconds))
    style = "red" if seconds > target else "green"
    return Text(format_seconds(seconds), style=style).append(f" / {format_seconds(target)}", style="dim")


def _count(value: float | None) -> Text:
    if value is None:
        return Text("-", style="dim")
    return Text(f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}")


def _gauge(page: bytes | None, name: str) -> float:
    """Return the sum of a gauge's series on a page; 0 if it is missing."""
    families = text_string_to_metric_families((page or b"").decode(errors="replace"))
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def _key(pod: Json) -> str:
    return str(pod["metadata"]["uid"])


def _owner(pod: Json) -> str:
    metadata = pod["metadata"]
    return f"{metadata['namespace']}/{metadata['labels'].get(DEPLOYMENT_LABEL)}"


def _is_router(pod: Json) -> bool:
    return bool(pod["metadata"]["labels"].get(COMPONENT_LABEL) == ROUTER_COMPONENT)
