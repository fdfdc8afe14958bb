"""Scenario: a change that fails to start is rolled back while requests are served."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from conftest import Apply, Remove
from harness.answer import EXPECTED, ask, ask_at
from harness.deployment import ROLLED_BACK_SECONDS, Deployment
from harness.kube import CRD_KIND, Kube, Manifest, condition
from harness.report import report_measurement
from harness.service import port_forward
from harness.wait import NotYet

TOO_LONG = 8000  # tokens of one request: more than the KV cache holds


@dataclass
class ClientStats:
    """Requests of a client that sends them continuously."""

    answered: int = 0
    failed: list[str] = field(default_factory=list)


@contextmanager
def _continuous_requests(deployment: Deployment, group: str) -> Iterator[ClientStats]:
    """Send requests to the pod of one group until the block ends."""
    stats, stop = ClientStats(), threading.Event()

    def client(url: str) -> None:
        while not stop.is_set():
            try:
                assert EXPECTED in ask_at(f"{url}/v1", deployment.served_name()).text
                stats.answered += 1
            except Exception as error:  # any client error counts
                stats.failed.append(repr(error))

    with port_forward(deployment.kube, deployment.namespace, f"pod/{group}-0", 8000) as url:
        thread = threading.Thread(target=client, args=(url,))
        thread.start()
        try:
            yield stats
        finally:
            stop.set()
            thread.join(timeout=240.0)


@pytest.fixture(scope="module")
def two(apply: Apply) -> Deployment:
    deployment = apply(replicas=2, tuning={"mode": "Off", "bounds": None}, rollout={"startTimeout": "10m"})
    deployment.ready()
    return deployment


def test_change_rejected_by_engine_rolls_back_without_downtime(two: Deployment, kube: Kube) -> None:
    before, begin = two.revisions(), time.monotonic()
    kept = two.restarts()
    with _continuous_requests(two, f"{two.name}-g1") as stats:
        kube.patch(CRD_KIND, two.name, two.namespace, {"spec": {"engine": {"maxModelLen": TOO_LONG}}})
        rolled_back = two.waiter.until(
            "the change is rolled back", two.rolled_back, deadline_seconds=ROLLED_BACK_SECONDS
        )
    assert str(TOO_LONG) in rolled_back["message"] or f"{TOO_LONG:,}" in rolled_back["message"], rolled_back
    assert "exit code 2" in rolled_back["message"]
    assert stats.failed == []
    assert stats.answered > 0
    assert two.revisions() == before
    status = two.status()
    assert (status["readyReplicas"], status["updatedReplicas"]) == (2, 0)
    after = two.restarts()
    if after != kept:  # without room for a third replica, the rollout replaces one in place
        reasons = {event["reason"] for event in kube.events(two.namespace, two.name)}
        assert "SurgeUnschedulable" in reasons, "a replica that served was replaced or restarted"
        (served,) = {pod["metadata"]["uid"] for pod in two.pods() if pod["metadata"]["name"] == f"{two.name}-g1-0"}
        assert after[served] == kept[served]
    assert not any(after.values())
    report_measurement(
        f"a rejected change is rolled back in {time.monotonic() - begin:.0f} s; {stats.answered} requests answered"
    )


def test_rolled_back_change_is_not_retried_until_spec_changes(two: Deployment, kube: Kube) -> None:
    pods = two.restarts()
    assert two.waiter.stays("nothing is restarted", two.restarts, seconds=20.0) == pods
    kube.patch(CRD_KIND, two.name, two.namespace, {"spec": {"engine": {"maxModelLen": 1000}}})
    two.ready()

    def settled() -> None:
        item = two.get()
        degraded, status = condition(item, "Degraded"), item["status"]
        if degraded is None or degraded["status"] != "False" or status["updatedReplicas"] != 2:
            raise NotYet(f"{status['updatedReplicas']} updated; Degraded: {degraded}")

    two.waiter.until("the corrected change reaches both replicas", settled, deadline_seconds=ROLLED_BACK_SECONDS)
    two.settled()
    assert EXPECTED in ask(two).text


def test_missing_image_stops_no_replica(two: Deployment, remove: Remove, kube: Kube) -> None:
    image = two.get()["spec"]["runtime"]["image"]
    pods = two.restarts()
    kube.patch(CRD_KIND, two.name, two.namespace, {"spec": {"runtime": {"image": "no.such.registry.invalid/e:1"}}})

    def is_reported() -> Manifest:
        degraded = condition(two.get(), "Degraded")
        if degraded is None or degraded["reason"] != "ModelUnreadable":
            raise NotYet(f"Degraded: {degraded}")
        return degraded

    assert "no.such.registry.invalid" in two.waiter.until("Degraded", is_reported, deadline_seconds=90.0)["message"]
    assert two.restarts() == pods
    assert EXPECTED in ask(two).text
    kube.patch(CRD_KIND, two.name, two.namespace, {"spec": {"runtime": {"image": image}}})
    two.ready()
    assert two.restarts() == pods
    remove(two)
