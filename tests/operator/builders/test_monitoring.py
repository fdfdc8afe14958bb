"""PodMonitor and PrometheusRule of engines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from operator_builders import a_deployment
from trimtab_operator.builders.labels import leader_selector
from trimtab_operator.builders.monitoring import pod_monitor, prometheus_rule
from trimtab_operator.resource.installation import Alerts, PodMonitoring

FAMILIES = Path(__file__).parents[3] / "engine-image" / "trimtab_engine" / "api" / "metrics" / "families.py"
SUFFIXES = r"_(bucket|total)$"


def alerts(**spec: Any) -> dict[str, dict[str, Any]]:
    """The alerts of a resource, by name."""
    (group,) = prometheus_rule(a_deployment(**spec), Alerts())["spec"]["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_leaders_are_scraped_with_the_labels_that_a_prometheus_asks_for() -> None:
    deployment = a_deployment()
    made = pod_monitor(deployment, PodMonitoring(labels={"release": "prometheus"}, interval="30s"))
    assert made["metadata"]["labels"]["release"] == "prometheus"
    assert made["spec"]["selector"]["matchLabels"] == leader_selector(deployment)
    (endpoint,) = made["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"], endpoint["interval"]) == ("http", "/metrics", "30s")


def test_alerts_use_existing_series_of_this_resource_only() -> None:
    exported = set(re.findall(r"\"((?:vllm:|trimtab_)[a-z_]+)\"", FAMILIES.read_text()))
    objectives = {"ttft": {"target": "500ms"}, "itl": {"target": "50ms", "kind": "Tokens"}}
    for rule in alerts(objectives=objectives).values():
        series = re.findall(r"((?:vllm:|trimtab_)?[a-z_]+)(\{[^}]*\})", rule["expr"])
        assert series
        for name, selector in series:
            assert name == "up" or re.sub(SUFFIXES, "", name) in exported
            assert selector == '{namespace="n",pod=~"m-g[0-9]+-0"}'


def test_a_promise_of_latency_is_an_alert_with_the_promised_time() -> None:
    found = alerts(objectives={"ttft": {"target": "500ms", "percentile": 90}})
    assert found["TrimtabFirstTokensLate"]["expr"].startswith("histogram_quantile(0.9, sum by (le) (rate(")
    assert found["TrimtabFirstTokensLate"]["expr"].endswith("> 0.5")
    assert "TTFT target of 500ms" in found["TrimtabFirstTokensLate"]["annotations"]["summary"]


@pytest.mark.parametrize(
    "objectives",
    [
        None,
        {"ttft": {"target": "500ms", "perPromptToken": "100us"}},  # grows with the prompt
        {"itl": {"target": "50ms"}},  # a request's mean, which the histogram of single tokens does not know
    ],
)
def test_objectives_without_histogram_have_no_alert(objectives: dict[str, Any] | None) -> None:
    assert not {"TrimtabFirstTokensLate", "TrimtabTokensLate"} & alerts(objectives=objectives).keys()


def test_every_alert_names_its_resource_and_says_what_is_lost() -> None:
    for rule in alerts().values():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["labels"]["inferencedeployment"] == "m"
        assert rule["annotations"]["summary"].startswith("n/m: ")
        assert re.fullmatch("[0-9]+m", rule["for"])
