"""Story: the administrator's Prometheus is what the tuner reads. The loop closes from PromQL; when Prometheus lies or
is gone nothing moves until it is back, or the pods are asked themselves."""

from __future__ import annotations

import pytest
from conftest import Apply
from harness.deployment import Deployment
from harness.install import Installation
from harness.kube import CRD_KIND, Kube, condition
from harness.prometheus import PrometheusServer
from harness.report import measured, say
from harness.target import prometheus_in_cluster
from harness.traffic import load
from harness.trim import (
    CALM_DEADLINE_SECONDS,
    DECISION_SECONDS,
    UTILIZATION,
    calm_probe,
    load_options,
    moved,
)
from harness.wait import NotYet

NOTICED_SECONDS = 120.0  # three scrapes, a rest of 15 s after a failure, and two looks
HELD_SECONDS = 25.0  # that nothing moves while Prometheus is away: five looks


@pytest.fixture(scope="module")
def installation(chart: Installation) -> Installation:
    """The chart as it is: its values come with Prometheus."""
    return chart


@pytest.fixture(scope="module")
def observed(apply: Apply) -> Deployment:
    """The sample in mode Recommend, whose metrics are read from Prometheus alone."""
    deployment = apply("observed", metrics={"source": "Prometheus"}, tuning={"mode": "Recommend"})
    deployment.ready()
    return deployment


@pytest.fixture(scope="module")
def prometheus(observed: Deployment, installation: Installation, kube: Kube, namespace: str) -> PrometheusServer:
    """A Prometheus that scrapes the sample's engine, and an operator that is told of it."""
    server = PrometheusServer(kube, namespace, prometheus_in_cluster())
    server.scrape(observed.pods())
    values = {"prometheus.url": server.url, "prometheus.scrapeSeconds": str(server.scrape_seconds)}
    installation.install(**values)
    return server


def test_the_loop_closes_from_promql(
    observed: Deployment, prometheus: PrometheusServer, installation: Installation, kube: Kube, namespace: str,
    calm_seconds: float,
) -> None:  # fmt: skip
    """Preemptions are seen in Prometheus alone, KV memory is moved, and they end under the same load."""
    deployment = observed
    _says(deployment, "Scraped")
    _reads_from(deployment, "Prometheus")
    before, restarts = deployment.engine(), deployment.restarts()
    with load(kube, namespace, installation.images.operator, load_options(deployment)) as running:
        kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"tuning": {"mode": "Auto"}}})
        decision = deployment.waiter.until(
            f"the operator moves {UTILIZATION}",
            moved(deployment, UTILIZATION, before.values[UTILIZATION]),
            deadline_seconds=DECISION_SECONDS,
        )
        say(f"decided: {decision['message']}")
        after = deployment.waiter.until(
            "no preemptions under the same load",
            calm_probe(deployment, calm_seconds=calm_seconds),
            deadline_seconds=CALM_DEADLINE_SECONDS + calm_seconds,
        )
        report = running.stop()
    say(str(report))
    assert report.failed == []
    assert float(decision["to"]) > float(decision["from"])
    assert after.kv_tokens > before.kv_tokens
    assert deployment.restarts() == restarts
    measured(f"from PromQL: {before.kv_tokens} to {after.kv_tokens} KV tokens, {report}")


def test_without_prometheus_nothing_moves_and_with_it_the_loop_goes_on(
    observed: Deployment, prometheus: PrometheusServer, kube: Kube, namespace: str
) -> None:
    deployment = observed
    generation = deployment.engine().config_generation
    prometheus.stop()
    _says(deployment, "PrometheusUnavailable")
    deployment.waiter.stays(
        "the engine keeps its values", lambda: deployment.engine().config_generation, seconds=HELD_SECONDS
    )
    assert deployment.engine().config_generation == generation

    kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"metrics": {"source": "Auto"}}})
    said = _says(deployment, "Scraped")
    assert "read from the pods, as Prometheus is of no use" in said
    _reads_from(deployment, "Pods")

    kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"metrics": {"source": "Prometheus"}}})
    prometheus.scrape(deployment.pods())
    _reads_from(deployment, "Prometheus")
    _says(deployment, "Scraped")


def test_two_scrape_jobs_are_named_until_a_label_chooses_one(
    observed: Deployment, prometheus: PrometheusServer, kube: Kube, namespace: str
) -> None:
    deployment = observed
    prometheus.scrape(deployment.pods(), jobs=("engines", "annotated"))
    said = _says(deployment, "MetricsDuplicated")
    assert "job=annotated" in said
    kube.patch(CRD_KIND, deployment.name, namespace, {"spec": {"metrics": {"labels": {"job": "engines"}}}})
    _says(deployment, "Scraped")


def _reads_from(deployment: Deployment, source: str) -> None:
    """Wait until status says that metrics come from there."""

    def probe() -> None:
        found = deployment.status().get("tuning", {}).get("source")
        if found != source:
            raise NotYet(f"metrics are read from {found}")

    deployment.waiter.until(f"metrics are read from {source}", probe, deadline_seconds=NOTICED_SECONDS)


def _says(deployment: Deployment, reason: str) -> str:
    """Wait until MetricsAvailable has this reason: its message."""

    def probe() -> str:
        found = condition(deployment.get(), "MetricsAvailable") or {"reason": "none", "message": ""}
        if found["reason"] != reason:
            raise NotYet(f"MetricsAvailable: {found['reason']}: {found['message']}")
        return str(found["message"])

    return deployment.waiter.until(f"MetricsAvailable says {reason}", probe, deadline_seconds=NOTICED_SECONDS)
