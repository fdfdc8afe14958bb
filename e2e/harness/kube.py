"""A thin, typed wrapper around kubectl: scenarios use the commands that a user would type."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Manifest = dict[str, Any]

COMMAND_SECONDS = 120.0  # more than ten times the longest kubectl call on an idle machine
CRD_KIND = "inferencedeployments.trimtab.dev"
ENFORCE = "pod-security.kubernetes.io/enforce"  # namespace label with the enforced Pod Security level


class KubectlError(Exception):
    """kubectl failed; `stderr` has its error output."""

    def __init__(self, command: Sequence[str], stderr: str) -> None:
        self.stderr = stderr.strip()
        super().__init__(f"{' '.join(command)}: {self.stderr}")


@dataclass(frozen=True, slots=True)
class Kube:
    """One cluster, as kubectl sees it. `environment` is added to this process's own (KUBECONFIG, PATH)."""

    environment: Mapping[str, str] = field(default_factory=dict)
    kubectl: str = "kubectl"

    def full_environment(self) -> dict[str, str]:
        return {**os.environ, **self.environment}

    def run(self, *arguments: str, stdin: str | None = None, timeout_seconds: float = COMMAND_SECONDS) -> str:
        """Run kubectl and return its stdout. Raises KubectlError with its stderr."""
        command = [self.kubectl, *arguments]
        try:
            done = subprocess.run(
                command,
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                env=self.full_environment(),
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(command, f"did not answer within {timeout_seconds:g} s") from error
        if done.returncode != 0:
            raise KubectlError(command, done.stderr or done.stdout)
        return done.stdout

    # --- reading ------------------------------------------------------------------------------------------------------

    def get(self, kind: str, name: str, namespace: str | None = None) -> Manifest | None:
        """Return the object, or None if it does not exist."""
        text = self.run("get", kind, name, "--ignore-not-found", "-o", "json", *_in(namespace))
        return dict(json.loads(text)) if text.strip() else None

    def items(self, kind: str, namespace: str | None = None, selector: str | None = None) -> list[Manifest]:
        chosen = ["-l", selector] if selector else []
        return list(json.loads(self.run("get", kind, "-o", "json", *chosen, *_in(namespace)))["items"])

    def raw(self, path: str, *, timeout_seconds: float = 60.0) -> str:
        """GET a path of the API server, such as a pod's proxy."""
        return self.run("get", "--raw", path, timeout_seconds=timeout_seconds)

    def pod_http(self, namespace: str, pod: str, port: int, path: str) -> str:
        """GET from a pod through the API server. Raises KubectlError on an error status."""
        return self.raw(f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/{path.lstrip('/')}")

    def events(self, namespace: str, name: str | None = None) -> list[Manifest]:
        """Return Events, oldest first; only those of the object `name` if given."""
        found = self.items("events", namespace)
        chosen = [event for event in found if name is None or event["involvedObject"].get("name") == name]
        return sorted(chosen, key=event_time)

    def logs(
        self, namespace: str, pod: str, *, container: str | None = None, tail: int = 40, previous: bool = False
    ) -> str:
        extra = (["-c", container] if container else ["--all-containers"]) + (["--previous"] if previous else [])
        return self.run("logs", pod, f"--tail={tail}", *extra, *_in(namespace))

    def server_version(self) -> str:
        return str(json.loads(self.raw("/version"))["gitVersion"])

    # --- writing ------------------------------------------------------------------------------------------------------

    def apply(self, *manifests: Manifest, namespace: str | None = None, dry_run: bool = False) -> str:
        """Server-side apply without the client's validation (older clients refuse CRDs with CEL rules)."""
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        options = ["--dry-run=server"] if dry_run else []
        return self.run(
            "apply", "--server-side", "--force-conflicts", "--validate=false", "--field-manager=e2e",
            *options, *_in(namespace), "-f", "-", stdin=document,
        )  # fmt: skip

    def patch(self, kind: str, name: str, namespace: str | None, body: Any, *, type_: str = "merge") -> Manifest:
        text = self.run("patch", kind, name, f"--type={type_}", "-p", json.dumps(body), "-o", "json", *_in(namespace))
        return dict(json.loads(text))

    def put_raw(self, path: str, body: Manifest) -> Manifest:
        """PUT to a path of the API server: how a horizontal pod autoscaler writes `/scale`."""
        return dict(json.loads(self.run("replace", "--raw", path, "-f", "-", stdin=json.dumps(body))))

    def delete(
        self, kind: str, name: str, namespace: str | None = None, *, wait: bool = False, grace: int | None = None
    ) -> None:
        """Delete if it is there."""
        options = [f"--wait={str(wait).lower()}", "--ignore-not-found"]
        options += [f"--grace-period={grace}"] if grace is not None else []
        self.run("delete", kind, name, *options, *_in(namespace), timeout_seconds=180.0)

    def evict(self, namespace: str, pod: str) -> None:
        """Evict a pod as `kubectl drain` does. Raises KubectlError if a PodDisruptionBudget blocks it."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
        self.run("create", "--raw", path, "-f", "-", stdin=json.dumps(body))

    def serves(self, group_version: str) -> bool:
        """Return True if the cluster serves an API group version such as policy/v1."""
        return group_version in self.run("api-versions").split()

    def exec(self, namespace: str, pod: str, *command: str, container: str | None = None) -> str:
        chosen = ["-c", container] if container else []
        return self.run("exec", pod, *chosen, *_in(namespace), "--", *command)


def _in(namespace: str | None) -> list[str]:
    return ["-n", namespace] if namespace else []


def event_time(event: Manifest) -> str:
    """Return when the Event was last seen. RFC 3339, so text order is time order."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"])


def condition(item: Manifest, kind: str) -> Manifest | None:
    """Return `status.conditions[type=kind]`, or None."""
    found = item.get("status", {}).get("conditions", [])
    return next((dict(entry) for entry in found if entry["type"] == kind), None)


def is_true(item: Manifest, kind: str) -> bool:
    found = condition(item, kind)
    return found is not None and found["status"] == "True"
