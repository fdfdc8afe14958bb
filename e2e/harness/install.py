"""Installation of the chart with helm and the images built by e2e/cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from harness.kube import Kube, KubectlError, Manifest
from harness.report import log_line
from harness.target import REPOSITORY, Images, NoCluster, Target, run_tool
from harness.wait import NotYet, Waiter

CHART = REPOSITORY / "charts" / "trimtab"
NAMESPACE = "trimtab-system"
RELEASE = "trimtab"
LEASE = "trimtab-operator"
SAMPLE = REPOSITORY / "config" / "samples" / "smollm2-cpu.yaml"
OPERATOR_SECONDS = 120.0
TERMINATION_SECONDS = 20  # operators exit at once on SIGTERM


@dataclass(frozen=True, slots=True)
class Installation:
    """The installed chart."""

    kube: Kube
    images: Images

    @property
    def waiter(self) -> Waiter:
        return Waiter(self.kube, NAMESPACE)

    def settings(self, **values: str) -> dict[str, str]:
        """Return the chart values that differ from the defaults, by dotted name."""
        return {
            **image_values("image", self.images.operator),
            **image_values("engine.image", self.images.model),
            **image_values("router.image", self.images.router),
            **values,
        }

    def helm_arguments(self, **values: str) -> list[str]:
        settings = self.settings(**values)
        options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        return ["upgrade", "--install", RELEASE, str(CHART), "-n", NAMESPACE, "--create-namespace", *options]

    def install(self, **values: str) -> None:
        log_line("helm upgrade --install trimtab")
        run_tool("helm", *self.helm_arguments(**values), kube=self.kube)
        self.ready()

    def ensure(self, **values: str) -> None:
        """Install the chart unless it is already installed with exactly these values."""
        found = json.loads(run_tool("helm", "list", "-n", NAMESPACE, "-o", "json", kube=self.kube))
        if any(release["name"] == RELEASE and release["status"] == "deployed" for release in found):
            given = json.loads(
                run_tool("helm", "get", "values", RELEASE, "-n", NAMESPACE, "-o", "json", kube=self.kube)
            )
            if dict(dotted(given or {})) == self.settings(**values):
                self.ready()
                return
        self.install(**values)

    def ready(self) -> None:
        """Wait until all operator pods are Ready and the API server (with the webhook, if enabled) accepts a resource.

        A Service is routed only a moment after its pod is Ready; until then webhook calls fail.
        """
        self.waiter.until("the operator is Ready", self._ready, deadline_seconds=OPERATOR_SECONDS)

    def _ready(self) -> None:
        deployment = self.deployment()
        wanted, status = deployment["spec"]["replicas"], deployment.get("status", {})
        current = status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
        counts = [status.get(name, 0) for name in ("availableReplicas", "replicas", "updatedReplicas")]
        if not current or counts != [wanted] * 3:
            raise NotYet(f"{counts[0]} of {wanted} operator pods are available, {counts[2]} of them are up to date")
        self.kube.run("apply", "--dry-run=server", "--validate=false", "-n", "default", "-f", str(SAMPLE))

    def deployment(self) -> Manifest:
        found = self.kube.items("deployments", NAMESPACE, f"app.kubernetes.io/instance={RELEASE}")
        if not found:
            raise NotYet("there is no operator Deployment")
        return found[0]

    def pods(self) -> list[Manifest]:
        found = self.kube.items("pods", NAMESPACE, f"app.kubernetes.io/instance={RELEASE}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def holder(self) -> str:
        """Return the holderIdentity of the Lease. Raises NotYet if it has none."""
        lease = self.kube.get("lease", LEASE, NAMESPACE)
        holder = ((lease or {}).get("spec") or {}).get("holderIdentity")
        if not holder:
            raise NotYet("the Lease has no holder")
        return str(holder)

    def leader(self) -> Manifest:
        """Wait for a leader and return its pod."""
        return self.waiter.until("an operator leads", self._leader, deadline_seconds=OPERATOR_SECONDS)

    def _leader(self) -> Manifest:
        holder = self.holder()
        found = next((pod for pod in self.pods() if holder == pod["metadata"]["name"]), None)
        if found is None:
            raise NotYet(f"the Lease's holder {holder} is not a running pod")
        return found

    def log(self, *, tail: int = 2000) -> str:
        return "\n".join(self.kube.logs(NAMESPACE, pod["metadata"]["name"], tail=tail) for pod in self.pods())

    def uninstall(self) -> None:
        log_line("helm uninstall trimtab")
        run_tool("helm", "uninstall", RELEASE, "-n", NAMESPACE, "--ignore-not-found", kube=self.kube)
        # Pods first: Kubernetes retries a namespace that has pods only after half of their grace period.
        with suppress(KubectlError):
            self.kube.run("wait", "--for=delete", "pods", "--all", "-n", NAMESPACE, f"--timeout={TERMINATION_SECONDS}s")
        # They have got SIGTERM; a kubelet that misses their exit reports it a minute later.
        self.kube.run("delete", "pods", "--all", "-n", NAMESPACE, "--grace-period=0", "--force")
        self.waiter.until("the operator's pods are gone", self._gone, deadline_seconds=OPERATOR_SECONDS)
        self.kube.delete("namespace", NAMESPACE, wait=True)

    def _gone(self) -> None:
        if pods := self.kube.items("pods", NAMESPACE):
            raise NotYet(f"{len(pods)} operator pods remain")


def require_no_other_release(target: Target) -> None:
    """Raise NoCluster if a CLUSTER=current cluster already has a Trimtab release."""
    if target.is_own:
        return
    for release in json.loads(run_tool("helm", "list", "-A", "-o", "json", kube=target.kube)):
        if str(release["chart"]).startswith("trimtab-"):
            raise NoCluster(
                f"CLUSTER=current: release {release['name']} in namespace {release['namespace']} is Trimtab, "
                "which would be replaced; uninstall it first, or use another cluster"
            )


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield helm values as --set takes them: dotted names and literal values."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value).lower() if isinstance(value, bool) else str(value)


def image_values(prefix: str, name: str) -> dict[str, str]:
    """Return the chart's repository and tag values of an image named REPOSITORY:TAG."""
    repository, _, tag = name.rpartition(":")
    return {f"{prefix}.repository": repository, f"{prefix}.tag": tag}
