"""Causes of pods that are not created or whose containers do not start, from Events. Pure.

A Job has no condition for pods that a quota or policy rejects, and a pod none for a missing Secret or claim: the API
server's and the kubelet's messages are only in Events. They are read only while an object waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from trimtab_operator.observed.groups import ObservedChildren, StartError, is_terminating
from trimtab_operator.observed.pods import node_of, placed_since, unschedulable_since
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.time import parse_time

START_REASONS = ("FailedCreate", "FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox")
SCALE_UP_REASONS = ("TriggeredScaleUp", "Nominated")  # of cluster-autoscaler and Karpenter: a node is coming
STARTING_REASONS = ("", "ContainerCreating", "PodInitializing")  # of waiting containers without information
FIRST_READ_SECONDS = 5.0  # most pods have started by then
REREAD_SECONDS = 15.0
MAX_MESSAGE = 1024  # characters
_PREFIXES = ("Error creating: ",)  # of Events of Jobs


@dataclass(frozen=True, slots=True)
class StartErrors:
    """Causes by the name of the object that waits, as of Unix time `read_at`; None before the first read.

    `scale_ups` are the pods for which a cluster autoscaler adds a node.
    """

    read_at: float | None = None
    found: Mapping[str, StartError] = field(default_factory=dict)
    scale_ups: frozenset[str] = frozenset()


def needs_start_errors(observed: ObservedChildren, known: StartErrors, *, now: float) -> bool:
    """Return True if it is time to read Events about objects that wait."""
    is_due = known.read_at is None or now - known.read_at >= REREAD_SECONDS
    return is_due and any(now - since >= FIRST_READ_SECONDS for _, since in _waiting(observed, now))


def update_start_errors(
    observed: ObservedChildren, known: StartErrors, events: Iterable[Manifest] | None, *, now: float
) -> StartErrors:
    """Return the causes of the objects that still wait, from new `events`; None if they were not read."""
    names = {name for name, _ in _waiting(observed, now)}
    if events is None:
        found = {name: error for name, error in known.found.items() if name in names}
        return StartErrors(known.read_at, found, known.scale_ups & names)
    latest: dict[str, tuple[str, StartError]] = {}
    scale_ups = set()
    for event in events:
        name, reason = str((event.get("involvedObject") or {}).get("name", "")), str(event.get("reason", ""))
        at = str(event.get("lastTimestamp") or event.get("eventTime") or "")
        if name in names and reason in SCALE_UP_REASONS:
            scale_ups.add(name)
        if name in names and reason in START_REASONS and at >= latest.get(name, ("",))[0]:
            latest[name] = at, StartError(reason, _message(event))
    return StartErrors(now, {name: error for name, (_, error) in latest.items()}, frozenset(scale_ups))


def _message(event: Manifest) -> str:
    message = " ".join(str(event.get("message") or "").split())
    for prefix in _PREFIXES:
        message = message.removeprefix(prefix)
    return message[:MAX_MESSAGE]


def _waiting(observed: ObservedChildren, now: float) -> Iterator[tuple[str, float]]:
    """Yield what waits and since when: Jobs without a pod, and pods without a node or without started containers."""
    owners = {owner.get("uid") for pod in observed.pods for owner in pod["metadata"].get("ownerReferences") or []}
    for job in observed.jobs:
        created = parse_time(job["metadata"].get("creationTimestamp"))
        if job["metadata"].get("uid") not in owners and not is_terminating(job):
            yield str(job["metadata"]["name"]), now if created is None else created.timestamp()
    for pod in observed.pods:
        is_placed = node_of(pod) is not None
        since = placed_since(pod) if is_placed else unschedulable_since(pod)
        if since is not None and not is_terminating(pod) and (not is_placed or _is_starting(pod)):
            yield str(pod["metadata"]["name"]), since.timestamp()


def _is_starting(pod: Manifest) -> bool:
    status = pod.get("status") or {}
    states = [c.get("state") or {} for c in status.get("containerStatuses") or []]
    waiting = [str((state.get("waiting") or {}).get("reason", "")) for state in states if "waiting" in state]
    return not states or any(reason in STARTING_REASONS for reason in waiting)
