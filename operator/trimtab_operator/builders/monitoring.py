"""PodMonitors of a resource's engines and router, and PrometheusRule (monitoring.coreos.com/v1).

An alert describes the impact and the next step. The thresholds of latency alerts are `spec.objectives`.
"""

from __future__ import annotations

from typing import Any

from trimtab_operator.builders.labels import (
    DEPLOYMENT_LABEL,
    GROUP_LABEL,
    common_labels,
    leader_selector,
    router_labels,
    router_name,
    router_selector,
)
from trimtab_operator.resource.installation import Alerts, PodMonitoring
from trimtab_operator.resource.quantity import parse_seconds
from trimtab_operator.resource.spec import InferenceDeployment

API_VERSION = "monitoring.coreos.com/v1"
MAX_SILENCE_SECONDS = 60  # no step takes that long: the core has exited or hangs
RECOMPUTED_SHARE = 0.2  # fraction of prompt tokens that are computed again after preemptions


def pod_monitor(deployment: InferenceDeployment, monitoring: PodMonitoring) -> dict[str, Any]:
    """Return the PodMonitor of the leaders, so that each replica has one series per metric."""
    return {
        "apiVersion": API_VERSION,
        "kind": "PodMonitor",
        "metadata": _metadata(deployment, monitoring.labels),
        "spec": {
            "selector": {"matchLabels": leader_selector(deployment)},
            "podTargetLabels": [DEPLOYMENT_LABEL, GROUP_LABEL],
            "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": monitoring.interval}],
        },
    }


def router_pod_monitor(deployment: InferenceDeployment, monitoring: PodMonitoring) -> dict[str, Any]:
    """Return the PodMonitor of the router's pods."""
    return {
        "apiVersion": API_VERSION,
        "kind": "PodMonitor",
        "metadata": {
            "name": router_name(deployment),
            "namespace": deployment.namespace,
            "labels": {**monitoring.labels, **router_labels(deployment)},
        },
        "spec": {
            "selector": {"matchLabels": router_selector(deployment)},
            "podTargetLabels": [DEPLOYMENT_LABEL],
            "podMetricsEndpoints": [{"port": "admin", "path": "/metrics", "interval": monitoring.interval}],
        },
    }


def prometheus_rule(deployment: InferenceDeployment, alerts: Alerts) -> dict[str, Any]:
    """Return the alerts of one resource."""
    rules = [*_latency_alerts(deployment), *_health_alerts(deployment)]
    group = {"name": f"trimtab.{deployment.namespace}.{deployment.name}", "rules": rules}
    return {
        "apiVersion": API_VERSION,
        "kind": "PrometheusRule",
        "metadata": _metadata(deployment, alerts.labels),
        "spec": {"groups": [group]},
    }


def _metadata(deployment: InferenceDeployment, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "name": deployment.name,
        "namespace": deployment.namespace,
        "labels": {**labels, **common_labels(deployment)},
    }


def _latency_alerts(deployment: InferenceDeployment) -> list[dict[str, Any]]:
    """Return one alert per objective that a histogram can express: no request means, no per-prompt-token targets."""
    found, objectives = [], deployment.spec.objectives
    ttft = None if objectives is None else objectives.ttft
    itl = None if objectives is None else objectives.itl
    if ttft is not None and ttft.per_prompt_token is None:
        late = _late(deployment, "vllm:time_to_first_token_seconds", ttft.percentile, parse_seconds(ttft.target))
        words = f"fewer than {ttft.percentile} percent of requests meet the TTFT target of {ttft.target}"
        found.append(_alert(deployment, "TrimtabFirstTokensLate", late, "10m", "warning", words))
    if itl is not None and itl.kind == "Tokens":
        late = _late(deployment, "vllm:inter_token_latency_seconds", itl.percentile, parse_seconds(itl.target))
        words = f"fewer than {itl.percentile} percent of tokens meet the ITL target of {itl.target}"
        found.append(_alert(deployment, "TrimtabTokensLate", late, "10m", "warning", words))
    return found


def _late(deployment: InferenceDeployment, family: str, percentile: int, seconds: float) -> str:
    rates = f"sum by (le) (rate({family}_bucket{_of(deployment)}[5m]))"
    return f"histogram_quantile({percentile / 100:g}, {rates}) > {seconds:g}"


def _health_alerts(deployment: InferenceDeployment) -> list[dict[str, Any]]:
    own = _of(deployment)
    recomputed = f"sum(rate(trimtab_recomputed_tokens_total{own}[10m]))"
    brought = f"sum(rate(vllm:prompt_tokens_total{own}[10m]))"
    return [
        _alert(
            deployment,
            "TrimtabEngineUnreachable",
            f"up{own} == 0",
            "10m",
            "warning",
            "Prometheus cannot scrape {{ $labels.pod }}; check its events and its log",
        ),
        _alert(
            deployment,
            "TrimtabEngineFrozen",
            f"max by (pod) (trimtab_core_silence_seconds{own}) > {MAX_SILENCE_SECONDS}",
            "1m",
            "critical",
            "the engine core of {{ $labels.pod }} has not responded for {{ $value | humanizeDuration }}",
        ),
        _alert(
            deployment,
            "TrimtabRequestsFail",
            f"sum(rate(trimtab_failed_requests_total{own}[5m])) > 0",
            "5m",
            "warning",
            "requests fail with an error; see the label reason of trimtab_failed_requests_total",
        ),
        _alert(
            deployment,
            "TrimtabPreemptionsCostly",
            f"{recomputed} > {RECOMPUTED_SHARE:g} * {brought}",
            "15m",
            "warning",
            f"preemptions recompute more than {RECOMPUTED_SHARE:.0%} of prompt tokens; see `kubectl trimtab why "
            f"{deployment.name}`",
        ),
    ]


def _of(deployment: InferenceDeployment) -> str:
    """Return the label matchers of this resource's engines, which do not depend on the scrape configuration."""
    return f'{{namespace="{deployment.namespace}",pod=~"{deployment.name}-g[0-9]+-0"}}'


def _alert(
    deployment: InferenceDeployment, name: str, expression: str, after: str, severity: str, words: str
) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "for": after,
        "labels": {"severity": severity, "namespace": deployment.namespace, "inferencedeployment": deployment.name},
        "annotations": {"summary": f"{deployment.namespace}/{deployment.name}: {words}"},
    }
