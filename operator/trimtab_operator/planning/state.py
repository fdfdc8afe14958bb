"""What one loop carries from turn to turn, and what a look at the cluster adds to it. Pure.

All of it may be lost. What must outlive the operator is also kept in ConfigMaps (`planning/tuning.py`,
`rollout/rollback.py`); the rest is seen again within a minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.engines import EngineSeen
from trimtab_operator.observed.groups import Group, Missing, Observed, groups_of
from trimtab_operator.observed.missing_pods import missing_pods, with_words
from trimtab_operator.observed.phases import is_placed
from trimtab_operator.observed.shared_engine import Incarnation, learned, torn
from trimtab_operator.planning.apply_backoff import Futile
from trimtab_operator.planning.scheduling_policy import QueueOrder
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.rollout.canary_comparison import Comparison
from trimtab_operator.rollout.rollback import RolloutState
from trimtab_operator.tuner.state import Memory as TunerMemory


@dataclass(frozen=True, slots=True)
class Memory:
    """What one loop knows from before. A fresh one makes no difference but for a while."""

    tuner: TunerMemory | None = None
    rollout: RolloutState | None = None
    layouts: Mapping[str, Degrees] = field(default_factory=dict)
    """What engines reported, by the uid of the leader's pod."""
    incarnations: Mapping[str, Incarnation] = field(default_factory=dict)
    """Who shares an engine, by the group's name."""
    missing: Mapping[str, Missing] = field(default_factory=dict)
    """Pods that are not created, by the group's name."""
    unheard: int | None = None
    """What stood in `spec.replicas` while `spec.scaling` was set; None: nothing that was not heard."""
    comparison: Comparison | None = None
    """What users got of the first replica of a change, and of the others."""
    queue: QueueOrder | None = None
    """What order of their queue engines were told last, whether they took it or not."""
    futile: Mapping[str, Futile] = field(default_factory=dict)
    """Children that differ again whenever they are applied, by kind and name."""
    most_placed: int = 0
    """How many of the replicas that there are had a place at once."""

    def layouts_of(self, groups: Iterable[Group]) -> dict[str, Degrees]:
        """What the engines of these groups reported, by the group's name."""
        leaders = {group.name: leader_uid(group) for group in groups}
        return {name: self.layouts[uid] for name, uid in leaders.items() if uid in self.layouts}


@dataclass(frozen=True, slots=True)
class Recalled:
    """The children of a resource with what is remembered of them, and the memory that this leaves."""

    observed: Observed
    groups: tuple[Group, ...]
    memory: Memory


def recalled(
    children: Observed, memory: Memory, *, now: float, refused_creations: Iterable[Manifest] | None = None
) -> Recalled:
    """Join what is seen at `now` (Unix time) with what is known from before.

    `refused_creations` are the Events of pods that the API server did not create; None where nobody has looked.
    """
    groups = groups_of(children)
    incarnations = learned(groups, memory.incarnations, now=now)
    missing = missing_pods(groups, memory.missing, now=now)
    if refused_creations is not None:
        missing = with_words(groups, missing, refused_creations, now=now)
    observed = replace(children, torn=torn(groups, incarnations), missing=missing)
    most_placed = max(sum(map(is_placed, groups)), min(memory.most_placed, len(groups)))
    kept = replace(memory, incarnations=incarnations, missing=missing, most_placed=most_placed)
    return Recalled(observed, groups_of(observed), kept)


def with_layouts(memory: Memory, groups: Iterable[Group], engines: Mapping[str, EngineSeen]) -> Memory:
    """Keep what the engines of Ready groups reported, now or before; forget those that are gone or not Ready."""
    found = {}
    for group in groups:
        uid, seen = leader_uid(group), engines.get(group.name)
        said = seen.layout if seen is not None and seen.layout is not None else memory.layouts.get(uid)
        if group.is_ready and said is not None:
            found[uid] = said
    return replace(memory, layouts=found)


def leader_uid(group: Group) -> str:
    """The uid of the pod that serves; empty while there is none."""
    return "" if group.leader is None else str(group.leader["metadata"]["uid"])
