"""Admin endpoints of a resource's engines, and what each of them reported in one observation. Pure.

`engines/poller.py` sends the requests. A value that an engine did not report is None, and `problem` says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trimtab_operator.builders.labels import ADMIN_PORT, HTTP_PORT
from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.groups import Group, token_hash_of
from trimtab_operator.observed.phases import EngineView, is_placed
from trimtab_operator.observed.pods import readiness_since
from trimtab_operator.observed.terminations import exit_code_of, num_terminations, was_oom_killed
from trimtab_operator.resource.time import parse_time
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.parameters import Value
from trimtab_operator.tuner.samples import Config, Ledger, Phase, ReplicaSnapshot, RequestUpdates, Sample, Source


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """The engine of one replica group to poll.

    Holds the group's name, its leader pod (address, None before it has one, and uid), whether it is Ready, whether its
    layout is still unknown, and the hash of the admin token that its engine was started with.
    """

    group: str
    address: str | None
    ready: bool
    instance: str = ""
    needs_layout: bool = False
    token_sha256: str | None = None
    pod: str = ""
    """Name of the leader pod."""
    created_at: float = 0.0
    """Creation time of the pod in Unix seconds. Older samples belong to a previous pod of the same name."""
    api_port: int = HTTP_PORT
    admin_port: int = ADMIN_PORT


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Where to read the metrics of a resource's engines.

    Auto prefers Prometheus if one is configured and falls back to the pods. `labels` are the labels of its series in
    Prometheus, in addition to the namespace and the pod.
    """

    source: Literal["Auto", "Prometheus", "Pods"] = "Auto"
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReportedScheduling:
    """Scheduling policy that an engine reports: the active one (None if not reported) and the supported ones.

    `times` maps the names of its supported time parameters to their values in seconds.
    """

    policy: str | None = None
    policies: tuple[str, ...] = ()
    times: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineObservation:
    """Everything one engine reported in one observation.

    `ready` is the readiness of its group at that time. `problem` says why the sample, the configuration or the ledger
    is missing.
    """

    ready: bool
    problem: str | None = None
    problem_reason: Reason = Reason.METRICS_MISSING
    """Kind of that problem."""
    source: Source | None = None
    """Source of its metrics; None if they were not read."""
    fallback_reason: str | None = None
    """Why the metrics were not read from Prometheus; None if they were, or if it is not configured."""
    sample: Sample | None = None
    config: Config | None = None
    ledger: Ledger | None = None
    load: tuple[str, int] | None = None
    """Stage and percentage while the engine loads its model."""
    load_message: str | None = None
    """Load progress as the engine words it."""
    downloaded_bytes: int | None = None
    """Bytes of the model that the engine downloaded before loading; None if none or not reported."""
    applied: Mapping[str, Value] | None = None
    """All numeric live parameters in force, including those that the tuner does not change."""
    queue: ReportedScheduling | None = None
    """Scheduling policy; present if the configuration is."""
    layout: Degrees | None = None
    """Layout; present if it was requested."""
    next_request: int | None = None
    """Sequence number after which to request further finished requests; None if not reported."""
    page: bytes | None = None
    """Hash of the relevant metrics page, if it was read from the pod and had no problem.

    The engine is idle for as long as the hash stays the same.
    """

    @property
    def is_idle(self) -> bool:
        """Return True if the engine has no request and its metrics belong to its current configuration."""
        sample, config = self.sample, self.config
        if sample is None or config is None or sample.gauges.config_generation != config.generation:
            return False
        news = sample.requests
        is_empty = news is None or not (news.finished or news.unfinished or news.missed)
        return is_empty and sample.gauges.running == 0 and sample.gauges.waiting == 0

    def repeated_at(self, at: float) -> EngineObservation:
        """Return a copy as observed at Unix time `at`, for an engine that was idle since."""
        if self.sample is None:
            return self
        requests = None if self.sample.requests is None else RequestUpdates((), ())
        return replace(self, sample=replace(self.sample, at=at, requests=requests))


def target_of(group: Group, known_layouts: Mapping[str, Degrees]) -> EngineTarget:
    """Return the poll target of a group; without an address if its pod terminates or is outdated.

    `known_layouts` is keyed by the leader's uid: the layout of an engine is requested once.
    """
    pod = group.leader
    if pod is None or group.is_terminating or group.is_outdated:
        return EngineTarget(group.name, None, False)
    address, uid = (pod.get("status") or {}).get("podIP"), str(pod["metadata"]["uid"])
    needs_layout = group.is_ready and uid not in known_layouts
    created = parse_time(pod["metadata"].get("creationTimestamp"))
    return EngineTarget(
        group.name,
        address,
        group.is_ready,
        uid,
        needs_layout,
        token_hash_of(pod),
        pod=str(pod["metadata"]["name"]),
        created_at=0.0 if created is None else created.timestamp(),
    )


def view_of(group: Group, seen: EngineObservation | None, layout: Degrees | None) -> EngineView:
    """Return the part of an observation that the status shows; `layout` is the latest reported one."""
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


# --- for the tuner ----------------------------------------------------------------------------------------------------


def observe_replica(group: Group, seen: EngineObservation | None) -> ReplicaSnapshot:
    """Return the tuner's observation of a replica: its pods' state joined with its engine's report.

    An engine that was not polled, or polled before its pod became Ready, has reported nothing.
    """
    leader = group.leader
    engine = seen if seen is not None else EngineObservation(group.is_ready, "its engine was not polled")
    return ReplicaSnapshot(
        replica=group.name,
        phase=phase_for_tuning(group),
        instance="" if leader is None else str(leader["metadata"]["uid"]),
        since=_phase_since(group),
        sample=engine.sample,
        config=engine.config,
        ledger=engine.ledger,
        problem=engine.problem,
        problem_reason=engine.problem_reason,
        was_oom_killed=any(map(was_oom_killed, group.pods)),
        exit_code=None if leader is None else exit_code_of(leader),
        restarts=0 if leader is None else num_terminations(leader),
    )


def phase_for_tuning(group: Group) -> Phase:
    """Return the tuner's phase of a replica.

    A replica whose pods are being replaced is starting. One with an unscheduled pod is pending as a whole.
    """
    if group.is_ready:
        return Phase.READY
    return Phase.STARTING if is_placed(group) else Phase.PENDING


def _phase_since(group: Group) -> float:
    """Return the Unix time at which the phase began; 0 if unknown."""
    if group.leader is None:
        return 0.0 if group.missing is None else group.missing.since
    since = readiness_since(group.leader)
    return 0.0 if since is None else since.timestamp()
