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
from harness.report import say
from harness.wait import NotYet, Waiter

SCRIPT = Path(__file__).with_name("load_script.py")
POD_START_SECONDS = 60.0
KILLED = "exit code 137"  # what becomes of a command in a pod that ends
DRAIN_SECONDS = 240.0  # running requests may have to be computed to their end on a slow machine


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """A closed loop: `concurrency` clients, each with one request of fixed size at a time. Sizes in tokens. Beside them
    `asks_per_second` for the list of models, each over a connection of its own."""

    url: str
    model: str
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    duration_seconds: float = 1800.0  # a limit only: stop() ends it
    stagger_seconds: float = 0.0  # between the clients' first requests
    pause_seconds: float = 0.0  # of each client, between two of its requests
    asks_per_second: float = 0.0

    def as_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What the clients saw."""

    seconds: float
    completed: int
    asked: int
    """How often the list of models was answered, beside `completed` requests."""
    failed: list[dict[str, Any]]
    output_tokens: int
    ttft_seconds: dict[str, float]
    latency_seconds: dict[str, float]
    windows: list[dict[str, float]]

    def __str__(self) -> str:
        rate = self.output_tokens / self.seconds if self.seconds else 0.0
        asked = f" and {self.asked} lists of models" if self.asked else ""
        return (
            f"{self.completed} requests{asked} completed, {len(self.failed)} failed in {self.seconds:.0f} s, "
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
        """Tell the clients to finish what they have begun; returns what they saw."""
        say("load: stopping, running requests may finish")
        try:
            self.kube.exec(self.namespace, self.pod, "python3", "-c", "import os; os.kill(1, 15)")
        except KubectlError as error:
            if KILLED not in str(error):
                raise
            say("load: the pod ended before the command that told it to")
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
    """Run load until the block ends; the pod is deleted then. `name` begins its name, so the next may follow."""
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
            say(f"the load pod could not be deleted: {error}")


def _is_running(kube: Kube, namespace: str, name: str) -> None:
    pod = kube.get("pod", name, namespace)
    phase = (pod or {}).get("status", {}).get("phase")
    if phase != "Running":
        raise NotYet(f"phase {phase}")


def _pod(name: str, image: str, options: LoadOptions) -> Manifest:
    """Small requests: the engine keeps the cores."""
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
    """The same requests from fewer clients."""
    return replace(options, concurrency=concurrency)
