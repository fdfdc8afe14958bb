"""Scenario: the tuner reads its metrics from an existing Prometheus.

If Prometheus is unavailable or inconsistent, tuning pauses until it recovers or the pods are scraped directly.
"""

from __future__ import annotations

import pytest
from conftest import Apply
from harness.deployment import Deployment
from harness.install import Installation
from harness.kube import CRD_KIND, Kube, condition
from harness.prometheus import PrometheusServer
from harness.report import log_line, report_measurement
from harness.target import prometheus_in_cluster
from harness.traffic import load
from harness.tuning import (
    CALM_DEADLINE_SECONDS,
    DECISION_SECONDS,
    UTILIZATION,
    calm_probe,
    decision_probe,
    load_options,
)
from harness.wait import NotYet

NOTICED_SECONDS = 120.0  # three scrapes, a back-off of 15 s after a failure, and two reconciles
HELD_SECONDS = 25.0  # five reconciles without Prometheus


@pytest.fixture(scope="module")
def installation(chart: Installation) -> Installation:
    """Return the chart unchanged: the `prometheus` fixture installs its values."""
    return chart


@pytest.fixture(scope="module")
def observed(apply: Apply) -> Deployment:
    """Return the sample in mode Recommend with Prometheus as the only metrics source."""
    deployment = apply("observed", metrics={"source": "Prometheus"}, tuning={"mode": "Recommend"})
    deployment.ready()
    return deployment


@pytest.fixture(scope="module")
def prometheus(observed: Deployment, installation: Installation, kube: Kube, namespace: str) -> PrometheusServer:
    """Start a Prometheus that scrapes the sample's engine, and configure the operator to use it."""
    server = PrometheusServer(kube, namespace, prometheus_in_cluster())
    server.scrape(observed.pods())
    values = {"prometheus.url": server.url, "prometheus.scrapeSeconds": str(server.scrape_seconds)}
    installation.install(**values)
    return server


def test_prometheus_metrics_drive_tuning(
    observed: Deployment, prometheus: PrometheusServer, installation: Installation, kube: Kube, namespace: str,
    calm_seconds: float,
) -> None:  # fmt: skip
    """Preemptions seen in Prometheus raise KV memory, and preemptions end under the same load."""
    deployment = observed
    _await_metrics_reason(deployment, "Scraped")
    _reads_from(deployment, "Prometheus")
    before, restarts = deployment.engine(), deployment.restarts()
    with load(kube, namespace, installation.images.operator, load_options(deployment)) as running:
        kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"tuning": {"mode": "Auto"}}})
        decision = deployment.waiter.until(
            f"the operator moves {UTILIZATION}",
            decision_probe(deployment, UTILIZATION, before.values[UTILIZATION]),
            deadline_seconds=DECISION_SECONDS,
        )
        log_line(f"decided: {decision['message']}")
        after = deployment.waiter.until(
            "no preemptions under the same load",
            calm_probe(deployment, calm_seconds=calm_seconds),
            deadline_seconds=CALM_DEADLINE_SECONDS + calm_seconds,
        )
        report = running.stop()
    log_line(str(report))
    assert report.failed == []
    assert float(decision["to"]) > float(decision["from"])
    assert after.kv_tokens > before.kv_tokens
    assert deployment.restarts() == restarts
    report_measurement(f"from PromQL: {before.kv_tokens} to {after.kv_tokens} KV tokens, {report}")


def test_prometheus_outage_pauses_tuning(
    observed: Deployment, prometheus: PrometheusServer, kube: Kube, namespace: str
) -> None:
    deployment = observed
    generation = deployment.engine().config_generation
    prometheus.stop()
    _await_metrics_reason(deployment, "PrometheusUnavailable")
    deployment.waiter.stays(
        "the engine keeps its values", lambda: deployment.engine().config_generation, seconds=HELD_SECONDS
    )
    assert deployment.engine().config_generation == generation

    kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"metrics": {"source": "Auto"}}})
    message = _await_metrics_reason(deployment, "Scraped")
    assert "read from the pods because Prometheus cannot be used" in message
    _reads_from(deployment, "Pods")

    kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"metrics": {"source": "Prometheus"}}})
    prometheus.scrape(deployment.pods())
    _reads_from(deployment, "Prometheus")
    _await_metrics_reason(deployment, "Scraped")


def test_duplicate_scrape_jobs_are_reported_until_labels_select_one(
    observed: Deployment, prometheus: PrometheusServer, kube: Kube, namespace: str
) -> None:
    deployment = observed
    prometheus.scrape(deployment.pods(), jobs=("engines", "annotated"))
    message = _await_metrics_reason(deployment, "MetricsDuplicated")
    assert "job=annotated" in message
    kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"metrics": {"labels": {"job": "engines"}}}})
    _await_metrics_reason(deployment, "Scraped")


def _reads_from(deployment: Deployment, source: str) -> None:
    """Wait until status reports `source` as the source of metrics."""

    def probe() -> None:
        found = deployment.status().get("tuning", {}).get("source")
        if found != source:
            raise NotYet(f"metrics are read from {found}")

    deployment.waiter.until(f"metrics are read from {source}", probe, deadline_seconds=NOTICED_SECONDS)


def _await_metrics_reason(deployment: Deployment, reason: str) -> str:
    """Wait until MetricsAvailable has this reason, and return its message."""

    def probe() -> str:
        found = condition(deployment.get(), "MetricsAvailable") or {"reason": "none", "message": ""}
        if found["reason"] != reason:
            raise NotYet(f"MetricsAvailable: {found['reason']}: {found['message']}")
        return str(found["message"])

    return deployment.waiter.until(f"MetricsAvailable has reason {reason}", probe, deadline_seconds=NOTICED_SECONDS)
