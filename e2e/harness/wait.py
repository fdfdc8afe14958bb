"""Waiting for a condition with a deadline. If it expires, diagnostics are printed: objects, events, logs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from harness.kube import CRD_KIND, Kube, KubectlError, Manifest, event_time
from harness.report import log_line

T = TypeVar("T")

POLL_SECONDS = 1.0
MIN_DEADLINE_SECONDS = 180.0  # three scenarios at once are slow, and longer deadlines cost nothing if they are met
PROBE_TIMEOUT_SECONDS = 60.0  # for the cluster to answer a probe of `stays`
REPEAT_SECONDS = 20.0  # interval at which an unchanged state is printed again
LOG_LINES = 25  # per pod, in the diagnostics
EVENTS_SHOWN = 30
OPERATOR = "app.kubernetes.io/part-of=trimtab,app.kubernetes.io/component=operator"
LIST_PODS = 'jsonpath={range .items[*]}{.metadata.namespace} {.metadata.name}{"\\n"}{end}'


class NotYet(Exception):
    """Raised by a probe whose condition is not met; the message is the current state."""


class DeadlineExpired(AssertionError):
    """A condition was not met in time; the message has the diagnostics."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """Waits for conditions in a namespace and collects its diagnostics."""

    kube: Kube
    namespace: str

    def until(
        self, what: str, probe: Callable[[], T], *, deadline_seconds: float, every_seconds: float = POLL_SECONDS
    ) -> T:
        """Call `probe` until it returns instead of raising NotYet; kubectl's errors count as NotYet.

        Raises:
            DeadlineExpired: with the last state and the namespace's diagnostics.
        """
        begin, deadline_seconds = time.monotonic(), max(deadline_seconds, MIN_DEADLINE_SECONDS)
        last_printed, printed_at = "", begin
        log_line(f"waiting for: {what} (at most {deadline_seconds:.0f} s)")
        while True:
            try:
                found = probe()
            except (NotYet, KubectlError) as error:
                seen = str(error)
            else:
                log_line(f"{what}: after {time.monotonic() - begin:.1f} s")
                return found
            now = time.monotonic()
            if now - begin >= deadline_seconds:
                raise DeadlineExpired(
                    f"waited {deadline_seconds:.0f} s for: {what}\nlast seen: {seen}\n{self.diagnostics()}"
                )
            if seen != last_printed or now - printed_at >= REPEAT_SECONDS:
                log_line(f"  {seen.splitlines()[0][:200] if seen else 'not yet'}")
                last_printed, printed_at = seen, now
            time.sleep(every_seconds)

    def stays(self, what: str, probe: Callable[[], T], *, seconds: float, every_seconds: float = 2.0) -> T:
        """Assert that `probe` neither raises NotYet nor changes its value for `seconds`. Return the value."""
        log_line(f"watching for {seconds:.0f} s that {what}")
        end = time.monotonic() + seconds
        first = _probe_with_retries(probe)
        while time.monotonic() < end:
            time.sleep(every_seconds)
            now = _probe_with_retries(probe)
            if now != first:
                raise AssertionError(
                    f"expected that {what}, but it changed from {first} to {now}\n{self.diagnostics()}"
                )
        return first

    def diagnostics(self) -> str:
        """Return the namespace's resources, events and log tails as text. Never raises."""
        parts = [f"--- diagnostics of namespace {self.namespace}"]
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
        """Return the log tails of all operator pods in any namespace."""
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


def _probe_with_retries(probe: Callable[[], T]) -> T:
    """Return the probe's result, retrying while the cluster does not respond."""
    end = time.monotonic() + PROBE_TIMEOUT_SECONDS
    while True:
        try:
            return probe()
        except KubectlError as error:
            if time.monotonic() >= end:
                raise
            log_line(f"  {error}")
            time.sleep(POLL_SECONDS)
