"""Recorder of the board: the timeline and the latest decisions of each deployment, in bounded memory.

The reconciler writes to it after each status; the board's server reads it in another thread. Everything is lost with
the process, except decisions, which the tuner's state keeps.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab_operator.board.timeline import NAN, Series, Timeline
from trimtab_operator.observed.engine_load import limits_of, measure_load
from trimtab_operator.observed.router import router_load
from trimtab_operator.planning.plan import ReconcilePlan
from trimtab_operator.planning.snapshot import ClusterSnapshot
from trimtab_operator.report.status import camel
from trimtab_operator.tuner.moves import Decision
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.samples import Sample
from trimtab_operator.tuner.state import AttainmentCounts

logger = logging.getLogger(__name__)

MAX_DEPLOYMENTS = 1000
MAX_DECISIONS = 32  # per deployment; the status keeps ten
Key = tuple[str, str]
"""Namespace and name."""


@dataclass(slots=True)
class Record:
    """Everything known of one deployment."""

    uid: str
    timeline: Timeline = field(default_factory=Timeline)
    decisions: dict[str, Decision] = field(default_factory=dict)
    """By id, oldest first."""
    recommendation: Decision | None = None
    status: Mapping[str, Any] = field(default_factory=dict)
    mode: str = ""
    attained: float | None = None
    """Share of requests that attained the objectives in about the last hour; None if unknown."""
    samples: dict[str, Sample] = field(default_factory=dict)
    """Last sample of each engine, by group name."""


class Recorder:
    """Records of at most MAX_DEPLOYMENTS deployments; further ones have none."""

    def __init__(self) -> None:
        self._records: dict[Key, Record] = {}
        self._lock = threading.Lock()
        self.num_without_room = 0
        """Number of reconciles whose deployment had no room."""

    def record(self, snapshot: ClusterSnapshot, plan: ReconcilePlan, status: Mapping[str, Any]) -> None:
        """Record the result of a reconcile iteration. Never raises: the board must not break reconciliation."""
        try:
            self._record(snapshot, plan, status)
        except Exception:
            logger.exception("the board could not record a reconcile", extra={"resource": snapshot.deployment.name})

    def _record(self, snapshot: ClusterSnapshot, plan: ReconcilePlan, status: Mapping[str, Any]) -> None:
        deployment, tuner = snapshot.deployment, plan.state.tuner
        with self._lock:
            record = self.find_or_add((deployment.namespace, deployment.name), deployment.uid)
            if record is None:
                return
            samples = {name: seen.sample for name, seen in snapshot.engines.items() if seen.sample is not None}
            values = {**_load(record, samples, status), **_settings(status)}
            if status.get("router"):
                load = router_load(snapshot.children.router_pods, snapshot.routers, now=snapshot.at)
                values[Series.ROUTER_HELD] = load.held
            record.timeline.add(snapshot.at, values)
            record.status, record.mode = status, str(deployment.spec.tuning.mode)
            keep_decisions(record, plan.status_inputs.history if tuner is None else tuner.history)
            record.recommendation = None if tuner is None else tuner.recommendation
            record.attained = None if tuner is None else _attained(tuner.attainment)

    def find_or_add(self, key: Key, uid: str) -> Record | None:
        """Return the record of a deployment, a new one if it was created again; None without room."""
        record = self._records.get(key)
        if record is not None and record.uid == uid:
            return record
        if record is None and len(self._records) >= MAX_DEPLOYMENTS:
            self.num_without_room += 1
            return None
        self._records[key] = record = Record(uid)
        return record

    def forget(self, namespace: str, name: str) -> None:
        """Drop the record of a deleted deployment."""
        with self._lock:
            self._records.pop((namespace, name), None)

    def read(self, key: Key) -> Record | None:
        """Return the record of a deployment; None if there is none. Other threads may change it meanwhile."""
        return self._records.get(key)

    def records(self) -> list[tuple[Key, Record]]:
        """Return all records by namespace and name."""
        with self._lock:
            return sorted(self._records.items(), key=lambda entry: entry[0])


def keep_decisions(record: Record, history: Iterable[Decision]) -> None:
    """Add new decisions and new outcomes of known ones; the oldest beyond MAX_DECISIONS are dropped."""
    known = dict(record.decisions)
    known.update((decision.id, decision) for decision in history)
    latest = sorted(known.values(), key=lambda decision: decision.at)[-MAX_DECISIONS:]
    record.decisions = {decision.id: decision for decision in latest}


def _load(record: Record, samples: Mapping[str, Sample], status: Mapping[str, Any]) -> dict[Series, float]:
    """Return the load since the previous samples, and the objectives. Replaces the record's samples."""
    limits = limits_of({"status": status})
    values = {
        Series.TTFT_OBJECTIVE: _or_nan(limits.ttft.seconds),
        Series.ITL_OBJECTIVE: _or_nan(limits.itl.seconds),
    }
    before = record.samples
    pairs = [(before[name], sample) for name, sample in samples.items() if name in before]
    is_new = {name: name not in before or sample.at > before[name].at for name, sample in samples.items()}
    record.samples = {name: s.repeated() if is_new[name] else before[name] for name, s in samples.items()}
    load = measure_load(pairs, limits)
    if load is None:
        return values
    return values | {
        Series.REQUESTS_PER_SECOND: _or_nan(load.requests_per_second),
        Series.TOKENS_PER_SECOND: load.tokens_per_second,
        Series.RUNNING: load.running,
        Series.WAITING: load.waiting,
        Series.KV_USAGE: load.kv_usage,
        Series.PREEMPTIONS_PER_MINUTE: load.preemptions_per_minute,
        Series.TTFT: _or_nan(load.ttft),
        Series.ITL: _or_nan(load.itl),
    }


def _attained(counts: AttainmentCounts) -> float | None:
    count = counts.met + counts.missed
    return counts.met / count if count > 0 else None


def _settings(status: Mapping[str, Any]) -> dict[Series, float]:
    """Return replica counts and the live parameters in force."""
    effective = (status.get("engine") or {}).get("effective") or {}
    values = {Series(parameter.value): _number(effective.get(camel(parameter.value))) for parameter in Parameter}
    values[Series.REPLICAS_DESIRED] = _number(status.get("desiredReplicas"))
    values[Series.REPLICAS_READY] = _number(status.get("readyReplicas"))
    return values


def _number(value: Any) -> float:
    try:
        return NAN if value is None else float(value)
    except (TypeError, ValueError):
        return NAN


def _or_nan(value: float | None) -> float:
    return NAN if value is None or not math.isfinite(value) else value
