"""An InferenceDeployment under test: the sample with changes merged into it, and helpers to inspect and await it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import yaml

from harness.engine import EngineReading, read_engine
from harness.kube import CRD_KIND, Kube, Manifest, condition, is_true
from harness.target import REPOSITORY
from harness.wait import NotYet, Waiter

SAMPLE = REPOSITORY / "config" / "samples" / "smollm2-cpu.yaml"
READY_SECONDS = 180.0  # pod start, 0.5 GB of weights, profile: about 25 s on two idle cores
BAKE_TIME = "5s"  # how long a change must serve before a rollout continues; the default of 30 s would add up
DRAIN_TIMEOUT = "10s"  # answers have a few tokens; a kubelet that misses a container's exit keeps the pod for 30 s
ROLLED_BACK_SECONDS = 240.0  # drain, three starts with the kubelet's back-off, and the rollback
GONE_SECONDS = 90.0  # drainTimeout and Kubernetes' garbage collection
CHILD_KINDS = "statefulsets,services,configmaps,pods,controllerrevisions,endpoints,endpointslices,secrets,jobs"


def sample(name: str | None = None, *, image: str, **changes: Any) -> Manifest:
    """Return the sample manifest with `image` and with `changes` merged into `spec` (None removes a field)."""
    manifest = dict(yaml.safe_load(SAMPLE.read_text()))
    manifest["metadata"] = {"name": name or manifest["metadata"]["name"]}
    spec = merge_patch(
        manifest["spec"],
        {"runtime": {"image": image}, "rollout": {"bakeTime": BAKE_TIME, "drainTimeout": DRAIN_TIMEOUT}},
    )
    manifest["spec"] = merge_patch(spec, changes)
    return manifest


def merge_patch(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` applied as a JSON merge patch (RFC 7386)."""
    merged = deepcopy(dict(base))
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge_patch(merged[key], value)
        else:
            merged[key] = deepcopy(value)
    return merged


@dataclass(frozen=True, slots=True)
class Deployment:
    """A resource by name. Every call reads the cluster; nothing is cached."""

    kube: Kube
    namespace: str
    name: str

    @property
    def waiter(self) -> Waiter:
        return Waiter(self.kube, self.namespace)

    def get(self) -> Manifest:
        found = self.kube.get(CRD_KIND, self.name, self.namespace)
        if found is None:
            raise NotYet(f"there is no InferenceDeployment {self.name}")
        return found

    def status(self) -> Manifest:
        return dict(self.get().get("status", {}))

    @property
    def scale_path(self) -> str:
        """The API path of the scale subresource."""
        return f"/apis/trimtab.dev/v1alpha1/namespaces/{self.namespace}/inferencedeployments/{self.name}/scale"

    def scale(self) -> Manifest:
        """Return the scale subresource."""
        return dict(json.loads(self.kube.raw(self.scale_path)))

    # --- waiting ------------------------------------------------------------------------------------------------------

    def ready(self, *, deadline_seconds: float = READY_SECONDS) -> Manifest:
        """Wait until Ready is True for the current generation, and return the resource."""
        return self.waiter.until(f"{self.name} is Ready", self._ready, deadline_seconds=deadline_seconds)

    def _ready(self) -> Manifest:
        item = self.get()
        observed = item.get("status", {}).get("observedGeneration")
        if observed != item["metadata"]["generation"]:
            raise NotYet(f"generation {item['metadata']['generation']} is not observed yet (status has {observed})")
        if not is_true(item, "Ready"):
            raise NotYet(describe(item))
        return item

    def settled(self, *, deadline_seconds: float = READY_SECONDS) -> Manifest:
        """Wait until Ready is True and Progressing is False (replaced pods are gone), and return the resource."""

        def is_settled() -> Manifest:
            item = self._ready()
            progressing = condition(item, "Progressing") or {"status": "Unknown", "message": ""}
            if progressing["status"] != "False":
                raise NotYet(f"Progressing: {progressing['message']}")
            return item

        return self.waiter.until(f"{self.name} is settled", is_settled, deadline_seconds=deadline_seconds)

    def rolled_back(self) -> Manifest:
        """Return the Degraded condition once a rollback has completed. Raises NotYet until then."""
        item = self.get()
        degraded, progressing = condition(item, "Degraded"), condition(item, "Progressing")
        if degraded is None or degraded["reason"] != "RolledBack" or progressing is None:
            raise NotYet(f"Degraded: {degraded}")
        if progressing["status"] != "False":
            raise NotYet(f"Progressing: {progressing['message']}")
        return degraded

    def revisions(self) -> list[str]:
        """Return the revision name of each replica."""
        return [group["revision"] for group in self.status()["groups"]]

    def await_deletion(self, *, deadline_seconds: float = GONE_SECONDS) -> None:
        self.waiter.until(f"{self.name} and its children are deleted", self._gone, deadline_seconds=deadline_seconds)

    def await_deletion_started(self, *, deadline_seconds: float = GONE_SECONDS) -> None:
        """Like `await_deletion`, but ignore terminating pods: kubelets report their end up to a minute late."""
        self.waiter.until(
            f"{self.name} and its children are deleted or terminating",
            lambda: self._gone(ignore_terminating=True),
            deadline_seconds=deadline_seconds,
        )

    def _gone(self, *, ignore_terminating: bool = False) -> None:
        left = self.children(ignore_terminating=ignore_terminating)
        if self.kube.get(CRD_KIND, self.name, self.namespace) is not None:
            left = [f"{CRD_KIND}/{self.name}", *left]
        if left:
            raise NotYet(f"left: {', '.join(left)}")

    # --- children -----------------------------------------------------------------------------------------------------

    def children(self, *, ignore_terminating: bool = False) -> list[str]:
        """Return KIND/NAME of objects that this resource owns or labels, or that have its name as prefix."""
        found = []
        for item in self.kube.items(CHILD_KINDS, self.namespace):
            metadata = item["metadata"]
            if ignore_terminating and item["kind"] == "Pod" and "deletionTimestamp" in metadata:
                continue
            labels = metadata.get("labels", {})
            owners = [owner["name"] for owner in metadata.get("ownerReferences", [])]
            if self.name in labels.values() or self.name in owners or metadata["name"].startswith(f"{self.name}-"):
                found.append(f"{item['kind']}/{metadata['name']}")
        return sorted(found)

    def pods(self) -> list[Manifest]:
        """Return the pods that match `status.selector`, without terminating ones."""
        selector = self.status().get("selector")
        if not selector:
            return []
        found = self.kube.items("pods", self.namespace, selector)
        return sorted(
            (pod for pod in found if "deletionTimestamp" not in pod["metadata"]),
            key=lambda pod: pod["metadata"]["name"],
        )

    def group_pods(self) -> list[Manifest]:
        """Return all pods of all replicas (leaders and workers), without terminating ones."""
        found = self.kube.items("pods", self.namespace, f"trimtab.dev/deployment={self.name},trimtab.dev/group")
        return sorted(
            (pod for pod in found if "deletionTimestamp" not in pod["metadata"]),
            key=lambda pod: pod["metadata"]["name"],
        )

    def pod(self) -> Manifest:
        """Return the only pod. Raises NotYet if there is not exactly one."""
        pods = self.pods()
        if len(pods) != 1:
            raise NotYet(f"{len(pods)} pods, not one")
        return pods[0]

    def pod_name(self) -> str:
        return str(self.pod()["metadata"]["name"])

    def restarts(self) -> dict[str, int]:
        """Return restart counts by pod uid. Equal values mean that no pod was replaced and no container restarted."""
        return {
            pod["metadata"]["uid"]: sum(entry["restartCount"] for entry in pod["status"].get("containerStatuses", []))
            for pod in self.pods()
        }

    def service(self) -> tuple[str, str, int]:
        """Return name, ClusterIP and port of the client Service."""
        found = self.kube.get("service", self.name, self.namespace)
        if found is None:
            raise NotYet(f"there is no Service {self.name}")
        return self.name, str(found["spec"]["clusterIP"]), int(found["spec"]["ports"][0]["port"])

    def cluster_url(self) -> str:
        _, address, port = self.service()
        return f"http://{address}:{port}"

    def served_name(self) -> str:
        model = self.get()["spec"]["model"]
        return str(model.get("servedName") or model["uri"].rstrip("/").rsplit("/", 1)[-1])

    # --- the engine and the tuner -------------------------------------------------------------------------------------

    def engine(self) -> EngineReading:
        return read_engine(self.kube, self.namespace, self.pod_name())

    def history(self) -> list[dict[str, Any]]:
        return list(self.status().get("tuning", {}).get("history", []))


def describe(item: Manifest) -> str:
    """Return the state as one line: readiness with its reason, and each group's load progress."""
    ready = condition(item, "Ready") or {"status": "Unknown", "reason": "NoCondition", "message": ""}
    groups = [
        f"{group.get('name')} {group.get('phase')} {load_progress(group)}".strip()
        for group in item.get("status", {}).get("groups", [])
    ]
    return f"Ready={ready['status']} ({ready['reason']}: {ready['message']}) {'; '.join(groups)}".strip()


def load_progress(group: Mapping[str, Any]) -> str:
    load = group.get("load") or {}
    return f"{load.get('stage')} {load.get('percent')} %" if load else ""


def seconds_since(begin: float) -> float:
    return time.monotonic() - begin
