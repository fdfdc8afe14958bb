"""Story: a change that does not come up is taken back while requests are answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from conftest import Apply, Remove
from harness.answer import EXPECTED, ask, ask_at
from harness.deployment import TAKEN_BACK_SECONDS, Deployment
from harness.kube import CRD_KIND, Kube, Manifest, condition
from harness.report import measured
from harness.service import port_forward
from harness.wait import NotYet

TOO_LONG = 8000  # tokens that one request may have: more than the KV cache of this device holds


@dataclass
class Asked:
    """What a client saw that asked all the time."""

    answered: int = 0
    failed: list[str] = field(default_factory=list)


@contextmanager
def _asking(deployment: Deployment, group: str) -> Iterator[Asked]:
    """Ask the pod of one group again and again."""
    asked, stop = Asked(), threading.Event()

    def client(url: str) -> None:
        while not stop.is_set():
            try:
                assert EXPECTED in ask_at(f"{url}/v1", deployment.served_name()).text
                asked.answered += 1
            except Exception as error:  # whatever a client sees counts
                asked.failed.append(repr(error))

    with port_forward(deployment.kube, deployment.namespace, f"pod/{group}-0", 8000) as url:
        thread = threading.Thread(target=client, args=(url,))
        thread.start()
        try:
            yield asked
        finally:
            stop.set()
            thread.join(timeout=240.0)


@pytest.fixture(scope="module")
def two(apply: Apply) -> Deployment:
    deployment = apply(replicas=2, tuning={"mode": "Off", "bounds": None}, rollout={"startTimeout": "10m"})
    deployment.ready()
    return deployment


def test_a_change_that_the_engine_refuses_is_taken_back_while_the_other_replica_answers(
    two: Deployment, kube: Kube
) -> None:
    before, begin = two.revisions(), time.monotonic()
    kept = two.restarts()
    with _asking(two, f"{two.name}-g1") as asked:
        kube.patch(CRD_KIND, two.name, two.namespace, {"spec": {"engine": {"maxModelLen": TOO_LONG}}})
        told = two.waiter.until("it is taken back", two.taken_back, deadline_seconds=TAKEN_BACK_SECONDS)
    assert str(TOO_LONG) in told["message"] or f"{TOO_LONG:,}" in told["message"], told
    assert "exit code 2" in told["message"]
    assert asked.failed == []
    assert asked.answered > 0
    assert two.revisions() == before
    status = two.status()
    assert (status["readyReplicas"], status["updatedReplicas"]) == (2, 0)
    after = two.restarts()
    if after != kept:  # where no node has room for a third replica the change is tried in the place of one
        told_of = {event["reason"] for event in kube.events(two.namespace, two.name)}
        assert "NoRoomForSurge" in told_of, "a replica that served was replaced or restarted"
        (asked_one,) = {pod["metadata"]["uid"] for pod in two.pods() if pod["metadata"]["name"] == f"{two.name}-g1-0"}
        assert after[asked_one] == kept[asked_one]
    assert not any(after.values())
    measured(f"a refused change is taken back in {time.monotonic() - begin:.0f} s; {asked.answered} requests answered")


def test_it_is_not_tried_again_until_the_spec_changes(two: Deployment, kube: Kube) -> None:
    pods = two.restarts()
    assert two.waiter.stays("nothing is restarted", two.restarts, seconds=20.0) == pods
    kube.patch(CRD_KIND, two.name, two.namespace, {"spec": {"engine": {"maxModelLen": 1000}}})
    two.ready()

    def settled() -> None:
        item = two.get()
        degraded, status = condition(item, "Degraded"), item["status"]
        if degraded is None or degraded["status"] != "False" or status["updatedReplicas"] != 2:
            raise NotYet(f"{status['updatedReplicas']} updated; Degraded: {degraded}")

    two.waiter.until("the better change reaches both", settled, deadline_seconds=TAKEN_BACK_SECONDS)
    two.settled()
    assert EXPECTED in ask(two).text


def test_an_image_that_does_not_exist_stops_no_replica(two: Deployment, remove: Remove, kube: Kube) -> None:
    image = two.get()["spec"]["runtime"]["image"]
    pods = two.restarts()
    kube.patch(CRD_KIND, two.name, two.namespace, {"spec": {"runtime": {"image": "no.such.registry.invalid/e:1"}}})

    def told() -> Manifest:
        degraded = condition(two.get(), "Degraded")
        if degraded is None or degraded["reason"] != "ModelUnreadable":
            raise NotYet(f"Degraded: {degraded}")
        return degraded

    assert "no.such.registry.invalid" in two.waiter.until("it is told", told, deadline_seconds=90.0)["message"]
    assert two.restarts() == pods
    assert EXPECTED in ask(two).text
    kube.patch(CRD_KIND, two.name, two.namespace, {"spec": {"runtime": {"image": image}}})
    two.ready()
    assert two.restarts() == pods
    remove(two)
