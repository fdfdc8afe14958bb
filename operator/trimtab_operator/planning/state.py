"""State that one reconcile loop keeps between iterations, and its update from observed children. Pure.

All of it may be lost. State that must survive operator restarts is also stored in ConfigMaps (`planning/tuning.py`,
`rollout/rollback.py`); the rest is observed again within a minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.engines import EngineObservation
from trimtab_operator.observed.groups import Group, MissingPods, ObservedChildren, StartError, groups_of
from trimtab_operator.observed.missing_pods import FAILED_CREATE, find_missing_pods, with_creation_errors
from trimtab_operator.observed.phases import is_placed
from trimtab_operator.observed.shared_engine import Incarnation, split_groups, update_incarnations
from trimtab_operator.observed.start_errors import StartErrors, update_start_errors
from trimtab_operator.planning.apply_backoff import RepeatedApply
from trimtab_operator.planning.router import IdleWatch
from trimtab_operator.planning.scheduling_policy import SchedulingSetting
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.rollout.canary_comparison import CanaryComparison
from trimtab_operator.rollout.rollback import RolloutState
from trimtab_operator.tuner.state import TunerState


@dataclass(frozen=True, slots=True)
class ReconcilerState:
    """State of one reconcile loop. An empty state only delays decisions."""

    tuner: TunerState | None = None
    rollout: RolloutState | None = None
    layouts: Mapping[str, Degrees] = field(default_factory=dict)
    """Layouts reported by engines, by the uid of the leader pod."""
    incarnations: Mapping[str, Incarnation] = field(default_factory=dict)
    """Pods that share an engine, by group name."""
    missing: Mapping[str, MissingPods] = field(default_factory=dict)
    """Pods that are not created, by group name."""
    ignored_replicas: int | None = None
    """Value of `spec.replicas` while `spec.scaling` is set; None without scaling."""
    comparison: CanaryComparison | None = None
    """Requests of the first replica of a change, compared with those of the others."""
    queue: SchedulingSetting | None = None
    """Scheduling policy last sent to engines, whether or not they applied it."""
    repeated_applies: Mapping[str, RepeatedApply] = field(default_factory=dict)
    """Children that differ again after each apply, by kind and name."""
    start_errors: StartErrors = field(default_factory=StartErrors)
    """Causes of pods that do not start."""
    rejected_group: str | None = None
    """Why the API server rejected the creation of a replica in the last iteration; None if it did not."""
    max_placed: int = 0
    """Largest number of present replicas that were scheduled at once."""
    idle: IdleWatch | None = None
    """Since when no request was observed; None while there are requests, or without a router."""

    def layouts_of(self, groups: Iterable[Group]) -> dict[str, Degrees]:
        """Return the layouts reported by the engines of these groups, by group name."""
        leaders = {group.name: leader_uid(group) for group in groups}
        return {name: self.layouts[uid] for name, uid in leaders.items() if uid in self.layouts}


@dataclass(frozen=True, slots=True)
class RecalledState:
    """Observed children joined with remembered state, and the updated reconciler state."""

    observed: ObservedChildren
    groups: tuple[Group, ...]
    state: ReconcilerState


def recall_state(
    children: ObservedChildren,
    state: ReconcilerState,
    *,
    now: float,
    failed_creations: Iterable[Manifest] | None = None,
) -> RecalledState:
    """Join the children observed at `now` (Unix time) with the remembered state.

    `failed_creations` are the Events about pods that were not created or do not start; None if they were not read.
    """
    groups = groups_of(children)
    incarnations = update_incarnations(groups, state.incarnations, now=now)
    missing = find_missing_pods(groups, state.missing, now=now)
    if failed_creations is not None:
        missing = with_creation_errors(groups, missing, failed_creations, now=now)
    errors = update_start_errors(children, state.start_errors, failed_creations, now=now)
    observed = replace(
        children,
        split_groups=split_groups(groups, incarnations),
        missing=missing,
        start_errors=errors.found,
        scale_ups=errors.scale_ups,
        new_start_errors=_new_errors(errors, missing, state),
    )
    max_placed = max(sum(map(is_placed, groups)), min(state.max_placed, len(groups)))
    kept = replace(state, incarnations=incarnations, missing=missing, start_errors=errors, max_placed=max_placed)
    return RecalledState(observed, groups_of(observed), kept)


def _new_errors(
    errors: StartErrors, missing: Mapping[str, MissingPods], state: ReconcilerState
) -> dict[str, StartError]:
    """Return the causes, including missing pods, that were not known in the last iteration."""
    found = {name: error for name, error in errors.found.items() if state.start_errors.found.get(name) != error}
    for name, now in missing.items():
        before = state.missing.get(name)
        if now.error and (before is None or before.error != now.error):
            found[name] = StartError(FAILED_CREATE, now.error)
    return found


def with_reported_layouts(
    state: ReconcilerState, groups: Iterable[Group], engines: Mapping[str, EngineObservation]
) -> ReconcilerState:
    """Return the state with the layouts of Ready groups, reported now or before; all others are forgotten."""
    found = {}
    for group in groups:
        uid, seen = leader_uid(group), engines.get(group.name)
        layout = seen.layout if seen is not None and seen.layout is not None else state.layouts.get(uid)
        if group.is_ready and layout is not None:
            found[uid] = layout
    return replace(state, layouts=found)


def leader_uid(group: Group) -> str:
    """Return the uid of the leader pod; empty if there is none."""
    return "" if group.leader is None else str(group.leader["metadata"]["uid"])
