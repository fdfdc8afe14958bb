"""Load from inside the cluster: a pod of the operator's image (it has Python and httpx) runs load_script.py.

The Service is addressed by its ClusterIP, so that nothing depends on cluster DNS.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.kube import Kube, KubectlError, Manifest
from harness.report import log_line
from harness.wait import NotYet, Waiter

SCRIPT = Path(__file__).with_name("load_script.py")
POD_START_SECONDS = 60.0
KILLED = "exit code 137"  # kubectl exec's result if the pod ends first
DRAIN_SECONDS = 240.0  # running requests may have to be computed to their end on a slow machine


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Closed-loop load: `concurrency` clients, each with one request of fixed size (in tokens) at a time.

    In addition the list of models is requested `probes_per_second` times, each over a new connection, and requests of
    the same size are sent `requests_per_second` times.
    """

    url: str
    model: str
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    duration_seconds: float = 1800.0  # a limit only: stop() ends it
    stagger_seconds: float = 0.0  # between the clients' first requests
    pause_seconds: float = 0.0  # between two requests of a client
    probes_per_second: float = 0.0
    requests_per_second: float = 0.0  # in addition to the clients' requests, whatever their latency
    max_requests: int = 0  # of those; 0: no limit
    tenants: tuple[str, ...] = ()  # of those, in turn

    def as_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Results of the clients."""

    seconds: float
    completed: int
    probed: int
    """Number of successful requests for the list of models, in addition to `completed`."""
    failed: list[dict[str, Any]]
    output_tokens: int
    ttft_seconds: dict[str, float]
    latency_seconds: dict[str, float]
    windows: list[dict[str, float]]
    overtaken_seconds: float = 0.0
    """Longest time by which a request got its first token before an earlier one of the same tenant."""

    @property
    def lost(self) -> list[dict[str, Any]]:
        """The failures of requests that had not got a first token."""
        return [failure for failure in self.failed if not failure.get("started")]

    def __str__(self) -> str:
        rate = self.output_tokens / self.seconds if self.seconds else 0.0
        probed = f" and {self.probed} lists of models" if self.probed else ""
        return (
            f"{self.completed} requests{probed} completed, {len(self.failed)} failed in {self.seconds:.0f} s, "
            f"{rate:.0f} tokens/s; time to first token p50 {self.ttft_seconds.get('p50', 0):.2f} s, "
            f"p95 {self.ttft_seconds.get('p95', 0):.2f} s"
        )


@dataclass(frozen=True, slots=True)
class Load:
    """A running load pod."""

    kube: Kube
    namespace: str
    pod: str

    def live(self) -> dict[str, float] | None:
        """The last 5-s window, or None before the first."""
        for line in reversed(self._lines(tail=5)):
            if "live" in line:
                return dict(line["live"])
        return None

    def stop(self) -> LoadReport:
        """Stop sending new requests, wait for running ones, and return the results."""
        log_line("load: stopping; running requests are completed")
        try:
            self.kube.exec(self.namespace, self.pod, "python3", "-c", "import os; os.kill(1, 15)")
        except KubectlError as error:
            if KILLED not in str(error):
                raise
            log_line("load: the pod ended before the stop command returned")
        return Waiter(self.kube, self.namespace).until(
            "the load's summary", self._summary, deadline_seconds=DRAIN_SECONDS, every_seconds=2.0
        )

    def _summary(self) -> LoadReport:
        lines = self._lines(tail=3)
        for line in reversed(lines):
            if "summary" in line:
                return LoadReport(**line["summary"])
        raise NotYet(f"running requests are still being served: {lines[-1] if lines else 'no output yet'}")

    def _lines(self, tail: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.kube.logs(self.namespace, self.pod, tail=tail).splitlines() if line]


@contextmanager
def load(kube: Kube, namespace: str, image: str, options: LoadOptions, *, name: str = "load") -> Iterator[Load]:
    """Run load until the block ends, then delete the pod. `name` is the prefix of its unique name."""
    name = f"{name}-{secrets.token_hex(2)}"
    kube.apply(_pod(name, image, options), namespace=namespace)
    running = Load(kube, namespace, name)
    try:
        Waiter(kube, namespace).until(
            f"load: {options.concurrency} clients, each {options.prompt_tokens} + {options.output_tokens} tokens",
            lambda: _is_running(kube, namespace, name),
            deadline_seconds=POD_START_SECONDS,
        )
        yield running
    finally:
        try:
            kube.delete("pod", name, namespace, grace=0)
        except KubectlError as error:
            log_line(f"the load pod could not be deleted: {error}")


def _is_running(kube: Kube, namespace: str, name: str) -> None:
    pod = kube.get("pod", name, namespace)
    phase = (pod or {}).get("status", {}).get("phase")
    if phase != "Running":
        raise NotYet(f"phase {phase}")


def _pod(name: str, image: str, options: LoadOptions) -> Manifest:
    """Return the load pod. Its resource requests are small, so that the engine keeps the cores."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "trimtab-e2e-load"}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "load",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["python3", "-u", "-c", SCRIPT.read_text(), options.as_json()],
                    "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
                }
            ],
        },
    }


def gentle(options: LoadOptions, concurrency: int) -> LoadOptions:
    """Return the same load with fewer clients."""
    return replace(options, concurrency=concurrency)
