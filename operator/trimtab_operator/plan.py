"""From what is wanted and what is there to what must be done. Pure: no clock, no cluster.

Groups take the lowest free ordinal. Scale-in takes the group that is worth least: not ready first, then the highest
ordinal. A new revision reaches the groups one after another within rollout.maxUnavailable. What is as wanted is left
alone, so an idle tick writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_operator.builders.config_map import tuning_config_map
from trimtab_operator.builders.labels import GROUP_LABEL, REVISION_LABEL, ROLE_LABEL
from trimtab_operator.builders.service import client_service, rendezvous_service
from trimtab_operator.builders.stateful_set import leader_stateful_set, pod_template, revision_of
from trimtab_operator.quantity import is_same_quantity
from trimtab_operator.spec import InferenceDeployment

Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Observed:
    """The children of one resource as the API server gave them; all owned by it."""

    services: tuple[Manifest, ...] = ()
    stateful_sets: tuple[Manifest, ...] = ()
    config_maps: tuple[Manifest, ...] = ()
    pods: tuple[Manifest, ...] = ()


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply this. `is_new` says that no such child was seen."""

    manifest: Manifest
    is_new: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete this child, if it still is the one that was seen."""

    kind: str
    name: str
    uid: str
    reason: str


Action = Apply | Delete


@dataclass(frozen=True, slots=True)
class Group:
    """One replica group as observed. `pod` is None while there is none."""

    ordinal: int
    stateful_set: Manifest
    pod: Manifest | None

    @property
    def name(self) -> str:
        return str(self.stateful_set["metadata"]["name"])

    @property
    def revision(self) -> str:
        return str(self.stateful_set["metadata"].get("labels", {}).get(REVISION_LABEL, ""))

    @property
    def pod_revision(self) -> str | None:
        if self.pod is None:
            return None
        return str(self.pod["metadata"].get("labels", {}).get(REVISION_LABEL, ""))

    @property
    def is_ready(self) -> bool:
        """Its pod runs the group's revision, is Ready and is not going away."""
        return self.pod is not None and self.pod_revision == self.revision and is_pod_ready(self.pod)


def is_pod_ready(pod: Manifest) -> bool:
    """Ready by its condition and not being deleted."""
    if is_terminating(pod):
        return False
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def is_terminating(manifest: Manifest) -> bool:
    return bool(manifest["metadata"].get("deletionTimestamp"))


def groups_of(observed: Observed) -> tuple[Group, ...]:
    """The groups that are there to stay, by ordinal; StatefulSets being deleted are left out."""
    pods = {ordinal_of(pod): pod for pod in observed.pods if ordinal_of(pod) is not None}
    found = []
    for stateful_set in observed.stateful_sets:
        ordinal = ordinal_of(stateful_set)
        if ordinal is not None and not is_terminating(stateful_set):
            found.append(Group(ordinal, stateful_set, pods.get(ordinal)))
    return tuple(sorted(found, key=lambda group: group.ordinal))


def ordinal_of(manifest: Manifest) -> int | None:
    """The group's number, from its label; None when it carries none."""
    text = str((manifest["metadata"].get("labels") or {}).get(GROUP_LABEL, ""))
    return int(text) if text.isdigit() else None


def plan(deployment: InferenceDeployment, observed: Observed, *, admin_token_sha256: str) -> tuple[Action, ...]:
    """Everything to do now, in order: Services before the pods that they select, removals last."""
    template = pod_template(deployment, admin_token_sha256=admin_token_sha256)
    groups = groups_of(observed)
    staying, leaving = choose_victims(groups, deployment.replicas)
    to_update = {g.ordinal for g in choose_updates(staying, revision_of(template), allowed_down(deployment))}
    new = free_ordinals(observed, deployment.replicas - len(staying))
    wanted: list[Manifest] = [client_service(deployment)]
    wanted += [rendezvous_service(deployment, ordinal) for ordinal in sorted({*(g.ordinal for g in staying), *new})]
    for group in staying:
        if group.revision == revision_of(template) or group.ordinal in to_update:
            wanted.append(leader_stateful_set(deployment, group.ordinal, template))
    wanted += [leader_stateful_set(deployment, ordinal, template) for ordinal in new]
    kept = {group.name for group in staying}
    return (*differing(wanted, observed), *_removals(leaving, kept, wanted, observed))


def plan_tuning_state(deployment: InferenceDeployment, observed: Observed, state: str) -> tuple[Action, ...]:
    """The ConfigMap with the tuner's memory, when it differs from what is stored."""
    return differing([tuning_config_map(deployment, state)], observed)


def choose_victims(groups: tuple[Group, ...], wanted: int) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Split groups into those that stay and those that go: not ready first, then the highest ordinal."""
    by_worth = sorted(groups, key=lambda group: (not group.is_ready, group.ordinal))
    stay = sorted(by_worth[:wanted], key=lambda group: group.ordinal)
    go = sorted(by_worth[wanted:], key=lambda group: group.ordinal, reverse=True)
    return tuple(stay), tuple(go)


def allowed_down(deployment: InferenceDeployment) -> int:
    """rollout.maxUnavailable as a number of replicas; a percentage is rounded down, never below 1."""
    value = deployment.spec.rollout.max_unavailable
    if isinstance(value, int):
        return max(1, value)
    return max(1, deployment.replicas * int(value.rstrip("%")) // 100)


def choose_updates(groups: tuple[Group, ...], revision: str, allowed: int) -> tuple[Group, ...]:
    """Groups that may get the new revision now. One that is down already costs nothing; a ready one costs one."""
    outdated = [group for group in groups if group.revision != revision]
    down = sum(not group.is_ready for group in groups)
    budget = max(0, allowed - down)
    free = [group for group in outdated if not group.is_ready]
    ready = [group for group in outdated if group.is_ready]
    return (*free, *ready[:budget])


def free_ordinals(observed: Observed, count: int) -> tuple[int, ...]:
    """The lowest ordinals that nothing holds: neither a StatefulSet nor a pod that is still draining."""
    children = (*observed.stateful_sets, *observed.pods)
    taken = {ordinal_of(child) for child in children}
    free: list[int] = []
    candidate = 0
    while len(free) < count:
        if candidate not in taken:
            free.append(candidate)
        candidate += 1
    return tuple(free)


def _removals(
    leaving: Iterable[Group], kept: set[str], wanted: Iterable[Manifest], observed: Observed
) -> Iterable[Delete]:
    """StatefulSets of groups that go, and group Services that no group needs any more."""
    for group in leaving:
        yield Delete("StatefulSet", group.name, _uid(group.stateful_set), "scaled in")
    needed = {m["metadata"]["name"] for m in wanted if m["kind"] == "Service"} | kept
    draining = {ordinal_of(pod) for pod in observed.pods}
    for service in observed.services:
        metadata = service["metadata"]
        is_group_service = ROLE_LABEL in (metadata.get("labels") or {})
        is_needed = metadata["name"] in needed or ordinal_of(service) in draining
        if is_group_service and not is_needed and not is_terminating(service):
            yield Delete("Service", metadata["name"], _uid(service), "its replica is gone")


def _uid(manifest: Manifest) -> str:
    return str(manifest["metadata"].get("uid", ""))


# --- drift ------------------------------------------------------------------------------------------------------------


def differing(wanted: Iterable[Manifest], observed: Observed) -> tuple[Apply, ...]:
    """The manifests that are missing or that somebody changed."""
    everything = {
        "Service": observed.services,
        "StatefulSet": observed.stateful_sets,
        "ConfigMap": observed.config_maps,
    }
    actions = []
    for manifest in wanted:
        name = manifest["metadata"]["name"]
        present = next((m for m in everything[manifest["kind"]] if m["metadata"]["name"] == name), None)
        if present is None:
            actions.append(Apply(manifest, True, "missing"))
        elif not is_terminating(present):
            where = first_difference(manifest, present)
            if where is not None:
                actions.append(Apply(manifest, False, f"{where} differs"))
    return tuple(actions)


LIST_KEYS = {  # lists that server-side apply merges by key: entries of others are not ours to judge
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
}
EMPTY: tuple[Any, ...] = (None, "", {}, [])  # the API server leaves these out


def first_difference(wanted: Any, present: Any, path: str = "") -> str | None:
    """Path of the first thing that we render and that is otherwise in the cluster; None when all is as rendered.

    What is in the cluster and not rendered is somebody else's (defaults, injected labels) and does not count.
    """
    if wanted == present or (wanted in EMPTY and present in EMPTY):
        return None
    if isinstance(wanted, Mapping) and isinstance(present, Mapping):
        for key, value in wanted.items():
            if key in ("apiVersion", "kind") and not path:
                continue
            found = first_difference(value, present.get(key), f"{path}.{key}" if path else str(key))
            if found is not None:
                return found
        return None
    if isinstance(wanted, (list, tuple)) and isinstance(present, list):
        return _first_list_difference(list(wanted), present, path)
    if isinstance(wanted, (str, int, float)) and isinstance(present, (str, int, float)) and _holds_quantities(path):
        return None if is_same_quantity(wanted, present) else path
    return path


def _first_list_difference(wanted: list[Any], present: list[Any], path: str) -> str | None:
    key = LIST_KEYS.get(path.rsplit(".", 1)[-1])
    if key is None:
        if len(wanted) != len(present):
            return path
        pairs = list(zip(wanted, present, strict=True))
    else:
        by_key = {item.get(key): item for item in present}
        pairs = [(item, by_key.get(item.get(key))) for item in wanted]
    for index, (mine, theirs) in enumerate(pairs):
        found = first_difference(mine, theirs, f"{path}[{index}]")
        if found is not None:
            return found
    return None


def _holds_quantities(path: str) -> bool:
    return any(part in path for part in (".limits.", ".requests.", ".sizeLimit", ".divisor"))
