"""Idle detection for a resource, and the state that stays valid while it is idle. Pure.

A resource is idle when its last reconcile changed and reported nothing, all its children are present, and its engines
have no request. Changes are reported by watches or visible in the engines' metrics pages, which are much cheaper to
compare than a full reconcile. Reconciles of an idle resource are therefore far apart: only time passes, and no pending
decision depends on it (ADR-0041).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trimtab_operator.observed.engines import EngineTarget, target_of
from trimtab_operator.planning.plan import ReconcilePlan, plan_reconcile
from trimtab_operator.planning.snapshot import ClusterSnapshot
from trimtab_operator.planning.state import ReconcilerState

IDLE_RECONCILE_SECONDS = (
    30.0  # reconcile interval of an idle resource: at most the age that the tuner accepts for a sample
)


@dataclass(frozen=True, slots=True)
class IdleState:
    """An idle resource: its last snapshot, and the hash of each engine's metrics page.

    `seen_at` is the Unix time at which all pages were last unchanged.
    """

    snapshot: ClusterSnapshot
    engines: tuple[tuple[EngineTarget, bytes], ...]
    seen_at: float

    @property
    def until(self) -> float:
        """Unix time of the next reconcile."""
        return self.snapshot.at + IDLE_RECONCILE_SECONDS

    def seen_again(self, at: float) -> IdleState:
        """Return the state after another comparison without changes."""
        return replace(self, seen_at=at)

    def has_ended(self, snapshot: ClusterSnapshot) -> bool:
        """Return True if an engine's metrics page differs in a later snapshot."""
        return any(_page_in(snapshot, target) != page for target, page in self.engines)


def detect_idle(
    snapshot: ClusterSnapshot, plan: ReconcilePlan, status: Mapping[str, Any], *, before: Mapping[str, Any]
) -> IdleState | None:
    """Return the idle state after a reconcile, or None if something happens or may happen.

    `status` is the new status and `before` the previous one as this operator wrote it.
    """
    if snapshot.cached_resource is None or not plan.is_idle or status != before or not _is_healthy(status):
        return None
    if _has_pending_decision(snapshot, plan):
        return None
    engines = []
    for group in plan.status_inputs.groups:
        target, seen = target_of(group, plan.state.layouts), snapshot.engines.get(group.name)
        if not group.is_ready or target.address is None or seen is None or seen.page is None or not seen.is_idle:
            return None
        engines.append((target, seen.page))
    return IdleState(snapshot, tuple(engines), snapshot.at) if engines else None


def replay_idle_period(idle: IdleState, state: ReconcilerState) -> ReconcilerState:
    """Return the reconciler state at the end of an idle period, as if one more reconcile had seen no change.

    Work that an engine did afterwards is then attributed to the seconds since, not to the whole idle period.
    """
    if idle.seen_at <= idle.snapshot.at:
        return state
    engines = {name: seen.repeated_at(idle.seen_at) for name, seen in idle.snapshot.engines.items()}
    plan = plan_reconcile(replace(idle.snapshot, at=idle.seen_at, engines=engines), state)
    return replace(plan.state, repeated_applies=plan.repeated_applies) if plan.is_idle else state


def _is_healthy(status: Mapping[str, Any]) -> bool:
    by_type = {condition["type"]: condition for condition in status["conditions"]}
    statuses = {kind: condition["status"] for kind, condition in by_type.items()}
    is_ready = (statuses["Ready"], statuses["Degraded"], statuses["Progressing"]) == ("True", "False", "False")
    return is_ready and by_type["TuningActive"]["reason"] != "NotYetApplied"


def _has_pending_decision(snapshot: ClusterSnapshot, plan: ReconcilePlan) -> bool:
    """Return True if a decision depends on time: on a change, on a tuned value, or on removing a replica."""
    state, scaling = plan.state, snapshot.deployment.spec.scaling
    tuner, rollout = state.tuner, state.rollout
    is_tried = (tuner is not None and tuner.trial is not None) or (rollout is not None and rollout.attempt is not None)
    may_scale_in = scaling is not None and plan.desired_replicas > scaling.min_replicas
    is_awaited = len(plan.status_inputs.groups) != plan.desired_replicas or bool(plan.status_inputs.draining)
    return is_tried or may_scale_in or is_awaited or state.comparison is not None or bool(state.missing)


def _page_in(snapshot: ClusterSnapshot, target: EngineTarget) -> bytes | None:
    seen = snapshot.engines.get(target.group)
    return None if seen is None else seen.page
