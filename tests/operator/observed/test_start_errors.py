"""Causes of failed starts: `Ready` and an Event name each within 10 s, for engines and for the facts Job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from operator_cluster import FakeCluster, a_loop, a_reconciler

MAX_SECONDS = 10.0
FORBIDDEN = 'pods "m-x" is forbidden: '


@dataclass(frozen=True)
class Cause:
    """Reports of the API server or the kubelet, and the words that a user must see."""

    words: str
    event: str | None = None
    """Reason of the Event; without one, `state` reports the cause."""
    message: str = ""
    state: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "containerStatuses"
    name: str = "main"

    @property
    def has_pod(self) -> bool:
        return self.event != "FailedCreate"


def rejected(words: str) -> Cause:
    return Cause(words, "FailedCreate", FORBIDDEN + words)


def not_mounted(words: str, reason: str = "FailedMount") -> Cause:
    return Cause(words, reason, f'MountVolume.SetUp failed for volume "v" : {words}')


def waiting(reason: str, message: str = "the kubelet's message", **where: str) -> Cause:
    return Cause(f"{reason}: {message}", state={"waiting": {"reason": reason, "message": message}}, **where)


CRASH = {"waiting": {"reason": "CrashLoopBackOff"}}
CAUSES = {
    "quota": rejected("exceeded quota: q, requested: pods=1, used: pods=9, limited: pods=9"),
    "limit range": rejected("maximum cpu usage per Container is 500m, but limit is 1"),
    "policy": rejected("ValidatingAdmissionPolicy 'labels' denied request: team is required"),
    "pod security": rejected('violates PodSecurity "restricted:latest"'),
    "missing account": rejected('error looking up service account n/m: serviceaccount "m" not found'),
    "missing secret": not_mounted('secret "typo" not found'),
    "missing config map": not_mounted('configmap "typo" not found'),
    "missing key": not_mounted("references non-existent secret key: token"),
    "missing CSI driver": not_mounted("driver name csi.example.com not found in the list of registered CSI drivers"),
    "attach": not_mounted("Multi-Attach error for volume pvc-1", "FailedAttachVolume"),
    "block device": not_mounted("no such device", "FailedMapVolume"),
    "network": Cause("plugin type=cni failed", "FailedCreatePodSandBox", "plugin type=cni failed (add): no addresses"),
    **{
        reason: waiting(reason)
        for reason in (
            "ErrImagePull",
            "ImagePullBackOff",
            "InvalidImageName",
            "ErrImageNeverPull",
            "ImageInspectError",
            "RegistryUnavailable",
            "SignatureValidationFailed",
            "CreateContainerConfigError",
            "CreateContainerError",
            "RunContainerError",
        )
    },
    "init container image": waiting("ErrImagePull", kind="initContainerStatuses", name="inject"),
    "init container crash": Cause(
        "init container inject is in a crash loop", state=CRASH, kind="initContainerStatuses", name="inject"
    ),
    "sidecar crash": Cause("container proxy is in a crash loop", state=CRASH, name="proxy"),
}


class ObstructedCluster(FakeCluster):
    """Cluster in which pods of the model's Job, or of engines, do not start."""

    cause: Cause | None = None

    def controllers(self) -> None:
        super().controllers()
        assert self.cause is not None
        for name in list(self.pods):
            if not self.cause.has_pod:
                del self.pods[name]
                continue
            creating = {"name": "main", "restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}}
            scheduled = [c for c in self.pods[name]["status"]["conditions"] if c["type"] == "PodScheduled"]
            status: dict[str, Any] = {"conditions": scheduled, "containerStatuses": [creating]}
            if self.cause.state:
                failing = {"name": self.cause.name, "restartCount": 3, "state": dict(self.cause.state)}
                others = [one for one in status["containerStatuses"] if one["name"] != self.cause.name]
                status[self.cause.kind] = [*(others if self.cause.kind == "containerStatuses" else []), failing]
            self.pods[name]["status"] = status

    def report(self, waiting_object: str) -> None:
        assert self.cause is not None
        if self.cause.event is not None:
            event = {"involvedObject": {"name": waiting_object}, "reason": self.cause.event}
            self.creation_failures = [event | {"message": self.cause.message, "lastTimestamp": self._time()}]


async def seconds_until_named(cluster: ObstructedCluster, words: str) -> float:
    began, (reconciler, loop) = cluster.now, (a_reconciler(cluster), a_loop(cluster))
    for _ in range(10):
        delay = await reconciler.guarded_tick(loop)
        if words in cluster.condition("Ready")["message"]:
            return cluster.now - began
        cluster.now += delay
        cluster.controllers()
    raise AssertionError(cluster.condition("Ready")["message"])


@pytest.mark.parametrize("cause", CAUSES)
async def test_cause_of_failed_reading_is_named(cause: str) -> None:
    cluster = ObstructedCluster(knows_the_model=False, replicas=1)
    cluster.cause = CAUSES[cause]
    cluster.report("m-facts-x" if cluster.cause.has_pod else "m-facts")
    if cluster.cause.event == "FailedCreate":
        cluster.creation_failures[0]["message"] = f"Error creating: {cluster.cause.message}"
    assert await seconds_until_named(cluster, cluster.cause.words) <= MAX_SECONDS
    if cluster.cause.event is not None:
        assert cluster.cause.event in cluster.events


@pytest.mark.parametrize("cause", CAUSES)
async def test_cause_of_failed_engine_is_named(cause: str) -> None:
    cluster = ObstructedCluster(replicas=1)
    cluster.cause = CAUSES[cause]
    cluster.report("m-g0-0" if cluster.cause.has_pod else "m-g0")
    if cluster.cause.event == "FailedCreate":
        message = f"create Pod m-g0-0 in StatefulSet m-g0 failed error: {cluster.cause.message}"
        cluster.creation_failures[0]["message"] = message
    assert await seconds_until_named(cluster, cluster.cause.words) <= MAX_SECONDS
    if cluster.cause.event is not None:
        assert cluster.cause.event in cluster.events


async def test_cause_is_forgotten_when_the_pod_starts() -> None:
    cluster = ObstructedCluster(replicas=1)
    cluster.cause = CAUSES["missing secret"]
    cluster.report("m-g0-0")
    await seconds_until_named(cluster, cluster.cause.words)
    cluster.__class__ = FakeCluster  # type: ignore[assignment]
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"
