"""Router pods of a resource, and the demand that they reported. Pure; `engines/router_client.py` sends the requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_operator.builders.engine_args import TOKEN_FLAG
from trimtab_operator.builders.labels import ROUTER_ADMIN_PORT
from trimtab_operator.observed.groups import flag_of, is_pod_ready
from trimtab_operator.resource.manifest import Manifest

FRESH_SECONDS = 30.0  # of a report: routers answer a long poll within a third of it


@dataclass(frozen=True, slots=True)
class RouterTarget:
    """Admin endpoint of one running router pod, with the hash of the token that it was started with."""

    pod: str
    instance: str
    """uid of the pod."""
    address: str
    token_sha256: str | None = None
    port: int = ROUTER_ADMIN_PORT


@dataclass(frozen=True, slots=True)
class RouterReport:
    """Demand that one router pod reported at Unix time `at`. Counts are of requests."""

    at: float
    held: int
    in_flight: int
    arrived: int
    """Since the pod started."""
    last_arrival_seconds_ago: float | None = None
    """None if none arrived yet."""
    oldest_held_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """Demand of all router pods of a resource."""

    held: int = 0
    in_flight: int = 0
    oldest_held_seconds: float = 0.0
    arrived: tuple[tuple[str, int], ...] = ()
    """Requests that arrived at each pod, by its uid."""
    last_arrival_at: float | None = None
    """Unix time; None if none arrived at the present pods."""
    is_complete: bool = False
    """True if every running router pod reported recently, and at least one runs."""


def router_targets(pods: Iterable[Manifest]) -> tuple[RouterTarget, ...]:
    """Return the targets of the running router pods. Terminating ones still finish requests."""
    found = []
    for pod in pods:
        address = (pod.get("status") or {}).get("podIP")
        if address and _is_running(pod):
            metadata = pod["metadata"]
            token_sha256 = flag_of(pod, TOKEN_FLAG)
            found.append(RouterTarget(str(metadata["name"]), str(metadata["uid"]), str(address), token_sha256))
    return tuple(found)


def router_load(pods: Iterable[Manifest], reports: Mapping[str, RouterReport], *, now: float) -> RouterLoad:
    """Return the sum of the fresh reports. Reports of pods that do not run any more are left out."""
    targets = router_targets(pods)
    fresh = {
        target.instance: report
        for target in targets
        if (report := reports.get(target.instance)) is not None and now - report.at <= FRESH_SECONDS
    }
    arrivals = [
        report.at - report.last_arrival_seconds_ago
        for report in fresh.values()
        if report.last_arrival_seconds_ago is not None
    ]
    return RouterLoad(
        held=sum(report.held for report in fresh.values()),
        in_flight=sum(report.in_flight for report in fresh.values()),
        oldest_held_seconds=max((report.oldest_held_seconds for report in fresh.values()), default=0.0),
        arrived=tuple(sorted((instance, report.arrived) for instance, report in fresh.items())),
        last_arrival_at=max(arrivals, default=None),
        is_complete=bool(targets) and len(fresh) == len(targets),
    )


def ready_routers(pods: Iterable[Manifest]) -> int:
    """Return the number of router pods that take requests."""
    return sum(map(is_pod_ready, pods))


def _is_running(pod: Manifest) -> bool:
    """Return True if the router's process runs and may have requests; a pod that has not started yet has none."""
    statuses: list[dict[str, Any]] = (pod.get("status") or {}).get("containerStatuses") or []
    return any("running" in (status.get("state") or {}) and status.get("started", True) for status in statuses)
