"""The chart, installed as a user would, with the images that were just built."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from harness.kube import Kube, KubectlError, Manifest
from harness.report import say
from harness.target import REPOSITORY, Images, NoCluster, Target, run_tool
from harness.wait import NotYet, Waiter

CHART = REPOSITORY / "charts" / "trimtab"
NAMESPACE = "trimtab-system"
RELEASE = "trimtab"
LEASE = "trimtab-operator"
SAMPLE = REPOSITORY / "config" / "samples" / "smollm2-cpu.yaml"
OPERATOR_SECONDS = 120.0
ENDED_SECONDS = 20  # for operators that were told to end; they do so at once


@dataclass(frozen=True, slots=True)
class Installation:
    """The installed chart."""

    kube: Kube
    images: Images

    @property
    def waiter(self) -> Waiter:
        return Waiter(self.kube, NAMESPACE)

    def settings(self, **values: str) -> dict[str, str]:
        """The chart's values that are not its defaults, by their dotted names."""
        return {
            **image_values("image", self.images.operator),
            **image_values("engine.image", self.images.model),
            **values,
        }

    def helm_arguments(self, **values: str) -> list[str]:
        settings = self.settings(**values)
        options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        return ["upgrade", "--install", RELEASE, str(CHART), "-n", NAMESPACE, "--create-namespace", *options]

    def install(self, **values: str) -> None:
        say("helm upgrade --install trimtab")
        run_tool("helm", *self.helm_arguments(**values), kube=self.kube)
        self.ready()

    def ensure(self, **values: str) -> None:
        """The same, but nothing is done where the chart is installed with just these values."""
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
        """Wait until every operator pod is Ready and a resource is accepted: through the webhook, where there is one.

        A Service is routed a moment after its pod is Ready; until then the API server finds nobody to ask.
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
        """Who holds the Lease now, by the identity that stands in it."""
        lease = self.kube.get("lease", LEASE, NAMESPACE)
        holder = ((lease or {}).get("spec") or {}).get("holderIdentity")
        if not holder:
            raise NotYet("nobody holds the Lease")
        return str(holder)

    def leader(self) -> Manifest:
        """The operator's pod that leads."""
        return self.waiter.until("an operator leads", self._leader, deadline_seconds=OPERATOR_SECONDS)

    def _leader(self) -> Manifest:
        holder = self.holder()
        found = next((pod for pod in self.pods() if holder == pod["metadata"]["name"]), None)
        if found is None:
            raise NotYet(f"{holder} holds the Lease, and is no pod that runs")
        return found

    def log(self, *, tail: int = 2000) -> str:
        return "\n".join(self.kube.logs(NAMESPACE, pod["metadata"]["name"], tail=tail) for pod in self.pods())

    def uninstall(self) -> None:
        say("helm uninstall trimtab")
        run_tool("helm", "uninstall", RELEASE, "-n", NAMESPACE, "--ignore-not-found", kube=self.kube)
        # First the pods: a namespace with pods in it is not looked at again before half of their grace is over.
        with suppress(KubectlError):
            self.kube.run("wait", "--for=delete", "pods", "--all", "-n", NAMESPACE, f"--timeout={ENDED_SECONDS}s")
        # They have been told to end; where a kubelet overlooks that they have, it says so a minute later.
        self.kube.run("delete", "pods", "--all", "-n", NAMESPACE, "--grace-period=0", "--force")
        self.waiter.until("the operator's pods are gone", self._gone, deadline_seconds=OPERATOR_SECONDS)
        self.kube.delete("namespace", NAMESPACE, wait=True)

    def _gone(self) -> None:
        if pods := self.kube.items("pods", NAMESPACE):
            raise NotYet(f"{len(pods)} are there")


def leave_others_alone(target: Target) -> None:
    """Raise NoCluster when a cluster that is not ours runs Trimtab already: installing here would replace it."""
    if target.is_own:
        return
    for release in json.loads(run_tool("helm", "list", "-A", "-o", "json", kube=target.kube)):
        if str(release["chart"]).startswith("trimtab-"):
            raise NoCluster(
                f"CLUSTER=current: release {release['name']} in namespace {release['namespace']} is Trimtab already, "
                "and this would replace it; uninstall it first, or use another cluster"
            )


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Helm's values as --set has them: a name with dots, and the value as it is written."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value).lower() if isinstance(value, bool) else str(value)


def image_values(prefix: str, name: str) -> dict[str, str]:
    """REPOSITORY:TAG as the chart's two values."""
    repository, _, tag = name.rpartition(":")
    return {f"{prefix}.repository": repository, f"{prefix}.tag": tag}
