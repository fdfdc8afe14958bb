"""Where the engines of a resource are asked, and what they said in one look. Pure.

The asking itself is engines/poller.py's. What an engine did not say is absent, and `problem` says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trimtab_operator.builders.labels import ADMIN_PORT, HTTP_PORT
from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.groups import Group, token_hash_of
from trimtab_operator.observed.phases import EngineView
from trimtab_operator.resource.time import parse_time
from trimtab_operator.tuner.knobs import Value
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.samples import Config, Ledger, RequestNews, Sample, Source


@dataclass(frozen=True, slots=True)
class Target:
    """One replica group to ask: its name, its leader pod (address, None before it has one; uid), whether it is Ready,
    whether its layout is still to be learned, and the hash of the admin token that its engine was started with."""

    group: str
    address: str | None
    ready: bool
    instance: str = ""
    asks_layout: bool = False
    token_sha256: str | None = None
    pod: str = ""
    """Name of that pod."""
    created_at: float = 0.0
    """When it was created: what was measured before was another pod of that name."""
    api_port: int = HTTP_PORT
    admin_port: int = ADMIN_PORT


@dataclass(frozen=True, slots=True)
class MetricsAsked:
    """Where a resource has its engines' metrics read: from Prometheus if there is one (Auto), from it alone, or from
    the pods. `labels` are what its series have there, beside the namespace and the pod."""

    source: Literal["Auto", "Prometheus", "Pods"] = "Auto"
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueSeen:
    """What an engine says of the order of its queue: which it has, None where it does not say, and which it could have.
    `times`: the targets in seconds that it knows, by the name of the live field."""

    policy: str | None = None
    policies: tuple[str, ...] = ()
    times: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """What one engine said in one look, asked as one that is `ready` or not. `problem` says why the sample, the
    configuration or the ledger is missing."""

    ready: bool
    problem: str | None = None
    absence: Reason = Reason.METRICS_MISSING
    """What kind of problem that is."""
    source: Source | None = None
    """Where its metrics were read; None: they were not."""
    detour: str | None = None
    """Why they were read there instead of from Prometheus."""
    sample: Sample | None = None
    config: Config | None = None
    ledger: Ledger | None = None
    load: tuple[str, int] | None = None
    """Stage and percent, while it loads."""
    load_message: str | None = None
    """The same in its own words."""
    downloaded_bytes: int | None = None
    """What it fetched of its model before that; None: nothing, or it does not say."""
    applied: Mapping[str, Value] | None = None
    """Every number in force, not only the tuner's."""
    queue: QueueSeen | None = None
    """There if its configuration is."""
    layout: Degrees | None = None
    """There if it was asked for."""
    next_request: int | None = None
    """After which finished request it is to be asked for more; None: it did not say."""
    page: bytes | None = None
    """A hash of all that is read of its page of metrics, where its pod was asked itself and nothing was amiss: as long
    as a page has the same, nothing happens in the engine."""

    @property
    def is_at_rest(self) -> bool:
        """Whether it has no request, and runs what it says that it does."""
        sample, config = self.sample, self.config
        if sample is None or config is None or sample.gauges.config_generation != config.generation:
            return False
        told = sample.requests
        is_empty = told is None or not (told.finished or told.unfinished or told.missed)
        return is_empty and sample.gauges.running == 0 and sample.gauges.waiting == 0

    def again(self, at: float) -> EngineSeen:
        """The same at a later time (Unix): nothing has happened in the engine since."""
        if self.sample is None:
            return self
        requests = None if self.sample.requests is None else RequestNews((), ())
        return replace(self, sample=replace(self.sample, at=at, requests=requests))


def target_of(group: Group, known_layouts: Mapping[str, Degrees]) -> Target:
    """Where the engine of a group is asked; a pod that goes away or runs an old revision is left alone.

    `known_layouts` are by the leader's uid: an engine's layout is asked for once.
    """
    pod = group.leader
    if pod is None or group.is_terminating or group.is_outdated:
        return Target(group.name, None, False)
    address, uid = (pod.get("status") or {}).get("podIP"), str(pod["metadata"]["uid"])
    asks_layout = group.is_ready and uid not in known_layouts
    created = parse_time(pod["metadata"].get("creationTimestamp"))
    return Target(
        group.name,
        address,
        group.is_ready,
        uid,
        asks_layout,
        token_hash_of(pod),
        pod=str(pod["metadata"]["name"]),
        created_at=0.0 if created is None else created.timestamp(),
    )


def view_of(group: Group, seen: EngineSeen | None, layout: Degrees | None) -> EngineView:
    """The part that status shows. `layout` is what the engine reported, now or earlier."""
    instance = "" if group.leader is None else str(group.leader["metadata"]["uid"])
    if seen is None:
        return EngineView(layout=layout, instance=instance)
    return EngineView(
        load=seen.load,
        load_message=seen.load_message,
        downloaded_bytes=seen.downloaded_bytes,
        instance=instance,
        config_generation=seen.config.generation if seen.config is not None else None,
        applied=seen.applied if group.is_ready else None,
        queue_policy=None if seen.queue is None else seen.queue.policy,
        layout=layout,
    )
