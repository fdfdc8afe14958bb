"""Write the Grafana dashboard of the chart from one table of panels, or verify it with --check."""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[1] / "charts" / "trimtab" / "files" / "dashboards" / "trimtab.json"
ENGINES = '{namespace=~"$namespace",pod=~"$deployment-g[0-9]+-0"}'
ROUTERS = '{namespace=~"$namespace",pod=~"$deployment-router-.*"}'
RESOURCE = '{namespace=~"$namespace",name=~"$deployment"}'
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


class Panel(NamedTuple):
    """One time series panel; `queries` are pairs of legend and PromQL."""

    title: str
    unit: str
    description: str
    queries: tuple[tuple[str, str], ...]


def rate(name: str, selector: str = ENGINES, *, by: str = "") -> str:
    """Return the summed rate of a counter over Grafana's interval."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({name}{selector}[$__rate_interval]))"


def quantile(share: float, name: str, selector: str = ENGINES) -> str:
    """Return a quantile of a histogram over Grafana's interval."""
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', selector, by='le')})"


def latency(name: str, selector: str = ENGINES) -> tuple[tuple[str, str], ...]:
    """Return the queries of the usual three quantiles."""
    return tuple((f"p{round(share * 100)}", quantile(share, name, selector)) for share in (0.5, 0.95, 0.99))


PANELS = (
    Panel(
        "Replicas",
        "short",
        "Desired replicas within the GPU budget, and without it.",
        (
            ("desired", f"max(trimtab_desired_replicas{RESOURCE})"),
            ("wanted", f"max(trimtab_wanted_replicas{RESOURCE})"),
        ),
    ),
    Panel(
        "Requests",
        "reqps",
        "Arriving requests, and ended ones by reason.",
        (
            ("arrived", rate("trimtab_arrived_requests_total")),
            ("{{finished_reason}}", rate("vllm:request_success_total", by="finished_reason")),
        ),
    ),
    Panel(
        "Tokens",
        "short",
        "Tokens per second.",
        (("generated", rate("vllm:generation_tokens_total")), ("prompt", rate("vllm:prompt_tokens_total"))),
    ),
    Panel("Time to first token", "s", "From arrival at the engine.", latency("vllm:time_to_first_token_seconds")),
    Panel("Inter-token latency", "s", "Between two tokens of a request.", latency("vllm:inter_token_latency_seconds")),
    Panel("Time in the queue", "s", "From arrival to the first step.", latency("vllm:request_queue_time_seconds")),
    Panel(
        "KV cache usage",
        "percentunit",
        "Share of the KV cache that requests hold, by replica.",
        (("{{pod}}", f"max by (pod) (vllm:kv_cache_usage_perc{ENGINES})"),),
    ),
    Panel(
        "Running and waiting requests",
        "short",
        "Requests in the engines.",
        (
            ("running", f"sum(vllm:num_requests_running{ENGINES})"),
            ("waiting", f"sum(vllm:num_requests_waiting{ENGINES})"),
        ),
    ),
    Panel(
        "Why requests wait",
        "percentunit",
        "Share of time that the head of the queue waits, by reason.",
        (("{{reason}}", rate("trimtab_blocked_seconds_total", by="reason")),),
    ),
    Panel(
        "Preemptions",
        "short",
        "Preemptions per second by reason, and recomputed tokens per second.",
        (
            ("{{reason}}", rate("trimtab_preempted_requests_total", by="reason")),
            ("recomputed tokens", rate("trimtab_recomputed_tokens_total")),
        ),
    ),
    Panel(
        "Live parameters",
        "short",
        "Applied value of each live parameter.",
        (("{{field}}", f"max by (field) (trimtab_config_value{ENGINES})"),),
    ),
    Panel(
        "Tuning decisions",
        "short",
        "Decisions of the tuner, by parameter and reason.",
        (
            (
                "{{knob}} {{reason}}",
                f"sum by (knob, reason) (increase(trimtab_operator_decisions_total{RESOURCE}[$__rate_interval]))",
            ),
        ),
    ),
    Panel(
        "Router: held requests",
        "short",
        "Requests that wait in the router for a replica.",
        (("held", f"sum(trimtab_router_held_requests{ROUTERS})"),),
    ),
    Panel(
        "Router: time in the queue", "s", "Until the last dispatch.", latency("trimtab_router_queue_seconds", ROUTERS)
    ),
    Panel("Router: time to first byte", "s", "From dispatch.", latency("trimtab_router_ttft_actual_seconds", ROUTERS)),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard with all panels, three in a row."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = []
    for index, panel in enumerate(PANELS):
        row, column = divmod(index, COLUMNS)
        targets = [
            {"refId": chr(ord("A") + number), "expr": expression, "legendFormat": legend, "datasource": source}
            for number, (legend, expression) in enumerate(panel.queries)
        ]
        panels.append(
            {
                "id": index + 1,
                "type": "timeseries",
                "title": panel.title,
                "description": panel.description,
                "datasource": source,
                "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
                "targets": targets,
            }
        )
    variables = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        _variable("namespace", "Namespace", "label_values(trimtab_condition, namespace)"),
        _variable("deployment", "Deployment", 'label_values(trimtab_condition{namespace=~"$namespace"}, name)'),
    ]
    return {
        "uid": "trimtab",
        "title": "Trimtab",
        "tags": ["trimtab"],
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {"name": name, "label": label, "type": "query", "query": query, "datasource": source, "refresh": 2}


def main() -> None:
    """Write or verify the file."""
    text = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" not in sys.argv:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(text)
    elif not FILE.exists() or FILE.read_text() != text:
        sys.exit(f"{FILE.name} is out of date; run python hack/dashboards.py")


if __name__ == "__main__":
    main()
