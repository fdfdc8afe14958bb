"""One InferenceDeployment under test: the sample with changes laid over it, and what can be asked of it."""

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
BAKE_TIME = "5s"  # in which a story's change serves before it counts: its owner's choice, and 30 s would add up
DRAIN_TIMEOUT = "10s"  # for answers of a few tokens; where an ended container is overlooked, its pod stays for 30 s
TAKEN_BACK_SECONDS = 240.0  # drain, three starts with the kubelet's pauses between them, and the way back
GONE_SECONDS = 90.0  # the drain timeout and the garbage collector
CHILD_KINDS = "statefulsets,services,configmaps,pods,controllerrevisions,endpoints,endpointslices,secrets,jobs"


def sample(name: str | None = None, *, image: str, **changes: Any) -> Manifest:
    """The sample manifest with `image` and with `changes` laid over `spec` (None removes a field)."""
    manifest = dict(yaml.safe_load(SAMPLE.read_text()))
    manifest["metadata"] = {"name": name or manifest["metadata"]["name"]}
    spec = laid_over(
        manifest["spec"],
        {"runtime": {"image": image}, "rollout": {"bakeTime": BAKE_TIME, "drainTimeout": DRAIN_TIMEOUT}},
    )
    manifest["spec"] = laid_over(spec, changes)
    return manifest


def laid_over(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON merge patch (RFC 7386)."""
    merged = deepcopy(dict(base))
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = laid_over(merged[key], value)
        else:
            merged[key] = deepcopy(value)
    return merged


@dataclass(frozen=True, slots=True)
class Deployment:
    """A resource by name; every question is asked of the cluster anew."""

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
        """Where autoscalers read and write its replica count."""
        return f"/apis/trimtab.dev/v1alpha1/namespaces/{self.namespace}/inferencedeployments/{self.name}/scale"

    def scale(self) -> Manifest:
        """What an autoscaler reads."""
        return dict(json.loads(self.kube.raw(self.scale_path)))

    # --- waiting ------------------------------------------------------------------------------------------------------

    def ready(self, *, deadline_seconds: float = READY_SECONDS) -> Manifest:
        """Wait until Ready is True for the present generation; returns the resource."""
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
        """Wait until it is Ready and nothing moves any more: what a change replaced has drained and gone."""

        def at_rest() -> Manifest:
            item = self._ready()
            progressing = condition(item, "Progressing") or {"status": "Unknown", "message": ""}
            if progressing["status"] != "False":
                raise NotYet(f"Progressing: {progressing['message']}")
            return item

        return self.waiter.until(f"{self.name} is settled", at_rest, deadline_seconds=deadline_seconds)

    def taken_back(self) -> Manifest:
        """The Degraded condition, when replicas are back at what worked, all of them ready. Raises NotYet."""
        item = self.get()
        degraded, progressing = condition(item, "Degraded"), condition(item, "Progressing")
        if degraded is None or degraded["reason"] != "RolledBack" or progressing is None:
            raise NotYet(f"Degraded: {degraded}")
        if progressing["status"] != "False":
            raise NotYet(f"Progressing: {progressing['message']}")
        return degraded

    def revisions(self) -> list[str]:
        """What each replica runs, by the name of its revision."""
        return [group["revision"] for group in self.status()["groups"]]

    def gone(self, *, deadline_seconds: float = GONE_SECONDS) -> None:
        self.waiter.until(f"nothing of {self.name} is left", self._gone, deadline_seconds=deadline_seconds)

    def going(self, *, deadline_seconds: float = GONE_SECONDS) -> None:
        """The same, but pods may still be stopping: a kubelet takes up to a minute to say that one has ended."""
        self.waiter.until(
            f"nothing of {self.name} stays", lambda: self._gone(but_stopping=True), deadline_seconds=deadline_seconds
        )

    def _gone(self, *, but_stopping: bool = False) -> None:
        left = self.children(but_stopping=but_stopping)
        if self.kube.get(CRD_KIND, self.name, self.namespace) is not None:
            left = [f"{CRD_KIND}/{self.name}", *left]
        if left:
            raise NotYet(f"left: {', '.join(left)}")

    # --- what belongs to it -------------------------------------------------------------------------------------------

    def children(self, *, but_stopping: bool = False) -> list[str]:
        """KIND/NAME of everything in the namespace that this resource owns, labels or is named after."""
        found = []
        for item in self.kube.items(CHILD_KINDS, self.namespace):
            metadata = item["metadata"]
            if but_stopping and item["kind"] == "Pod" and "deletionTimestamp" in metadata:
                continue
            labels = metadata.get("labels", {})
            owners = [owner["name"] for owner in metadata.get("ownerReferences", [])]
            if self.name in labels.values() or self.name in owners or metadata["name"].startswith(f"{self.name}-"):
                found.append(f"{item['kind']}/{metadata['name']}")
        return sorted(found)

    def pods(self) -> list[Manifest]:
        """Pods that are not being deleted, behind `status.selector`."""
        selector = self.status().get("selector")
        if not selector:
            return []
        found = self.kube.items("pods", self.namespace, selector)
        return sorted(
            (pod for pod in found if "deletionTimestamp" not in pod["metadata"]),
            key=lambda pod: pod["metadata"]["name"],
        )

    def group_pods(self) -> list[Manifest]:
        """Every pod of every replica that is not being deleted, leaders and workers."""
        found = self.kube.items("pods", self.namespace, f"trimtab.dev/deployment={self.name},trimtab.dev/group")
        return sorted(
            (pod for pod in found if "deletionTimestamp" not in pod["metadata"]),
            key=lambda pod: pod["metadata"]["name"],
        )

    def pod(self) -> Manifest:
        """The only pod."""
        pods = self.pods()
        if len(pods) != 1:
            raise NotYet(f"{len(pods)} pods, not one")
        return pods[0]

    def pod_name(self) -> str:
        return str(self.pod()["metadata"]["name"])

    def restarts(self) -> dict[str, int]:
        """Restart counts by pod uid: equal before and after means that no pod and no container was restarted."""
        return {
            pod["metadata"]["uid"]: sum(entry["restartCount"] for entry in pod["status"].get("containerStatuses", []))
            for pod in self.pods()
        }

    def service(self) -> tuple[str, str, int]:
        """Name, ClusterIP and port of the client Service."""
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
    """The state as one line: readiness with its reason, and each group's load progress."""
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
