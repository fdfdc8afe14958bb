"""What one loop carries from tick to tick, and how what it observes becomes the values that others decide on. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab_operator.builders.admin_token import token_hash
from trimtab_operator.builders.stateful_set import pod_template, revision_of
from trimtab_operator.decisions.rollback import RolloutState
from trimtab_operator.edge.metrics import GroupObservation, Target
from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.groups import Group, Missing, Observed, groups_of, ordinal_of
from trimtab_operator.observed.phases import EngineView
from trimtab_operator.observed.shared_engine import Incarnation
from trimtab_operator.report.conditions import Facts
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.tuner import TunerState


@dataclass(slots=True)
class LoopMemory:
    """What one loop carries from tick to tick. All of it can be lost: it is read or measured again."""

    tuner: TunerState | None = None
    layouts: dict[str, Degrees] = field(default_factory=dict)  # what engines reported, by the leader's uid
    rollout: RolloutState | None = None
    incarnations: dict[str, Incarnation] = field(default_factory=dict)  # by the group's name
    missing: dict[str, Missing] = field(default_factory=dict)  # by the group's name
    failures: int = 0

    def layouts_of(self, groups: tuple[Group, ...]) -> dict[str, Degrees]:
        """What the engines of these groups report, by the group's name."""
        leaders = {group.name: str(group.leader["metadata"]["uid"]) for group in groups if group.leader is not None}
        return {name: self.layouts[uid] for name, uid in leaders.items() if uid in self.layouts}


def facts_of_cluster(deployment: InferenceDeployment, observed: Observed, token: str, *, renders: bool = True) -> Facts:
    """What the cluster alone says. A spec that is refused has no revision: nothing is rendered from it."""
    groups = groups_of(observed)
    present = {group.ordinal for group in groups}
    draining = tuple(pod for pod in observed.pods if ordinal_of(pod) is not None and ordinal_of(pod) not in present)
    return Facts(groups=groups, draining=draining, revision=revision_wanted(deployment, token) if renders else "")


def revision_wanted(deployment: InferenceDeployment, token: str) -> str:
    return revision_of(pod_template(deployment, admin_token_sha256=token_hash(token)))


def target_of(group: Group) -> Target:
    """Where the engine of a group answers; a pod that goes away or runs an old revision is left alone."""
    pod = group.leader
    if pod is None or group.is_terminating or group.is_outdated:
        return Target(group.name, None, False)
    return Target(group.name, (pod.get("status") or {}).get("podIP"), group.is_ready, str(pod["metadata"]["uid"]))


def view_of(group: Group, seen: GroupObservation, memory: LoopMemory) -> EngineView:
    uid = str(group.leader["metadata"]["uid"]) if group.leader is not None else ""
    progress = seen.progress
    return EngineView(
        load=(progress.stage, round(progress.percent)) if progress is not None else None,
        config_generation=seen.config.generation if seen.config is not None else None,
        applied=seen.config.applied if seen.config is not None and group.is_ready else None,
        layout=memory.layouts.get(uid),
    )
