"""Waiting on a condition with a deadline. When it expires, the evidence is printed: objects, events, logs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from harness.kube import CRD_KIND, Kube, KubectlError, Manifest, event_time
from harness.report import say

T = TypeVar("T")

POLL_SECONDS = 1.0
LEAST_SECONDS = 180.0  # of every deadline: with three stories at once all is slow, and a wait that ends costs no more
LOOK_SECONDS = 60.0  # for the cluster to answer a look at what is to stay
SAY_AGAIN_SECONDS = 20.0  # an unchanged state is repeated this often, as a sign of life
LOG_LINES = 25  # of each pod, in the evidence
EVENTS_SHOWN = 30
OPERATOR = "app.kubernetes.io/part-of=trimtab,app.kubernetes.io/component=operator"
LIST_PODS = 'jsonpath={range .items[*]}{.metadata.namespace} {.metadata.name}{"\\n"}{end}'


class NotYet(Exception):
    """Raised by a probe: what it saw instead of what is waited for."""


class DeadlineExpired(AssertionError):
    """What was waited for did not come; the message carries the evidence."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """Waits in one namespace and knows where to look for evidence."""

    kube: Kube
    namespace: str

    def until(
        self, what: str, probe: Callable[[], T], *, deadline_seconds: float, every_seconds: float = POLL_SECONDS
    ) -> T:
        """Call `probe` until it returns instead of raising NotYet; kubectl's errors count as NotYet.

        Raises DeadlineExpired with what was last seen and the namespace's evidence.
        """
        begin, deadline_seconds = time.monotonic(), max(deadline_seconds, LEAST_SECONDS)
        last_said, said_at = "", begin
        say(f"waiting for: {what} (at most {deadline_seconds:.0f} s)")
        while True:
            try:
                found = probe()
            except (NotYet, KubectlError) as error:
                seen = str(error)
            else:
                say(f"{what}: after {time.monotonic() - begin:.1f} s")
                return found
            now = time.monotonic()
            if now - begin >= deadline_seconds:
                raise DeadlineExpired(
                    f"waited {deadline_seconds:.0f} s for: {what}\nlast seen: {seen}\n{self.evidence()}"
                )
            if seen != last_said or now - said_at >= SAY_AGAIN_SECONDS:
                say(f"  {seen.splitlines()[0][:200] if seen else 'not yet'}")
                last_said, said_at = seen, now
            time.sleep(every_seconds)

    def stays(self, what: str, probe: Callable[[], T], *, seconds: float, every_seconds: float = 2.0) -> T:
        """`probe` must neither raise NotYet nor change its value for `seconds`; returns the value."""
        say(f"watching for {seconds:.0f} s that {what}")
        end = time.monotonic() + seconds
        first = _looked(probe)
        while time.monotonic() < end:
            time.sleep(every_seconds)
            now = _looked(probe)
            if now != first:
                raise AssertionError(f"expected that {what}, but it changed from {first} to {now}\n{self.evidence()}")
        return first

    def evidence(self) -> str:
        """The namespace's resources, events and log tails, as text; never raises."""
        parts = [f"--- evidence from namespace {self.namespace}"]
        for gather in (self._resources, self._pods, self._events, self._operator):
            try:
                parts.append(gather())
            except (KubectlError, KeyError, ValueError) as error:
                parts.append(f"(could not be read: {error})")
        return "\n".join(parts)

    def _resources(self) -> str:
        found = self.kube.items(CRD_KIND, self.namespace)
        return "\n".join(
            f"InferenceDeployment {item['metadata']['name']}:\n"
            + json.dumps({"spec": item.get("spec"), "status": item.get("status")}, indent=1)
            for item in found
        )

    def _pods(self) -> str:
        lines = []
        for pod in self.kube.items("pods", self.namespace):
            name = pod["metadata"]["name"]
            states = json.dumps(pod["status"].get("containerStatuses", []))
            lines.append(f"pod {name}: {pod['status'].get('phase')} {states}")
            for previous in (False, True):
                try:
                    text = self.kube.logs(self.namespace, name, tail=LOG_LINES, previous=previous)
                except KubectlError:
                    continue
                lines.append(f"log of {name}{' (previous container)' if previous else ''}:\n{text}")
        return "\n".join(lines)

    def _operator(self) -> str:
        """What the operator said last, wherever it is installed."""
        pods = self.kube.run("get", "pods", "-A", "-l", OPERATOR, "-o", LIST_PODS)
        named = [line.split() for line in pods.splitlines() if line.strip()]
        logs = [f"log of {name}:\n{self.kube.logs(space, name, tail=LOG_LINES)}" for space, name in named]
        return "\n".join(logs) or "(no operator pod runs)"

    def _events(self) -> str:
        events = self.kube.events(self.namespace)[-EVENTS_SHOWN:]
        return "events:\n" + "\n".join(event_line(event) for event in events)


def event_line(event: Manifest) -> str:
    about = event["involvedObject"]
    return (
        f"{event_time(event)} {event.get('type', '?')} {about.get('kind')}/{about.get('name')} "
        f"{event.get('reason')}: {event.get('message')}"
    )


def _looked(probe: Callable[[], T]) -> T:
    """What the probe sees, once the cluster answers."""
    end = time.monotonic() + LOOK_SECONDS
    while True:
        try:
            return probe()
        except KubectlError as error:
            if time.monotonic() >= end:
                raise
            say(f"  {error}")
            time.sleep(POLL_SECONDS)
