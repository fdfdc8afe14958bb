"""Division of a GPU budget between all resources: by priority, then by age, replica by replica. Pure.

    running replicas within the resource's minimum (scaling.minReplicas)      are never preempted
    then, for each priority from the highest:  running → growth of running → up to the minimum → more, evenly

A running replica counts with the GPUs that it has. A change that needs more GPUs per replica waits until all replicas
fit; until then the running ones stay as they are and none are added. A running replica is therefore preempted only by a
higher priority or by a lower budget. New replicas start only after the replicas that they replace have drained: the
claimed GPUs never exceed the budget, except for replicas that are never preempted.

Every reconciler computes all shares from the same claims and uses its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from trimtab_operator.layout import layout_of
from trimtab_operator.observed.accelerators import gpus_draining, gpus_held, gpus_of
from trimtab_operator.observed.actions import Action, Apply, Event
from trimtab_operator.observed.groups import Group, ObservedChildren, groups_of, is_worker, revision_label
from trimtab_operator.resource.installation import GpuBudget
from trimtab_operator.resource.spec import InferenceDeployment

UNLIMITED = 1 << 60
OVER_BUDGET, WITHIN_BUDGET = "OverBudget", "WithinBudget"  # Event reasons; the first is also a condition reason
NO_ROOM_IN_BUDGET = "the GPU budget has no room for a further replica"
MAX_LISTED_RESOURCES = 3  # resources per message


@dataclass(frozen=True, slots=True)
class GpuClaim:
    """GPUs that one resource wants and holds.

    `key` is NAMESPACE/NAME, `since` the creation time as Kubernetes writes it, `gpus` the GPUs of one wanted replica,
    and `held` the GPUs of all replicas including draining ones.
    """

    key: str
    priority: int
    since: str
    gpus: int
    min_replicas: int
    """Number of replicas that are not preempted while they run."""
    wanted: int
    running: int
    """Number of replicas that are not being removed."""
    held: int
    smaller_replicas: tuple[int, ...] = ()
    """GPUs of each running replica that has fewer than `gpus`, because a change wants more; largest first."""
    draining: int = 0
    """GPUs of `held` that draining replicas will release."""
    extra_gpus_per_added: int = 0
    """GPUs beyond `gpus` of a replica that is added now.

    It is positive while a change to fewer GPUs is tried, because other replicas are added in the last known-good
    revision.
    """
    extra_gpus_per_surge: int = 0
    """The same for a surge replica during a rollout."""

    @property
    def namespace(self) -> str:
        return self.key.partition("/")[0]

    @property
    def guaranteed(self) -> int:
        """Number of replicas that are never preempted."""
        return min(self.running, self.min_replicas, self.wanted)

    def gpus_for(self, count: int) -> int:
        """Return the GPUs of `count` replicas as they are now: running ones first, the largest first."""
        unchanged = self.running - len(self.smaller_replicas)
        grown = min(count, unchanged) + max(0, count - self.running)
        return grown * self.gpus + sum(self.smaller_replicas[: max(0, count - unchanged)])

    def missing_gpus(self, count: int) -> int:
        """Return the GPUs that `count` of the running replicas lack to become wanted replicas."""
        count = min(count, self.running)
        return count * self.gpus - self.gpus_for(count)

    def gpus_to_add(self, count: int) -> int:
        """Return the GPUs of the replicas to add until there are `count`."""
        return max(0, count - self.running) * (self.gpus + self.extra_gpus_per_added)

    def with_grant(self, count: int, *, beside: int = 0, grows: bool = True) -> GpuClaim:
        """Return the claim after granting `count` replicas and `beside` surge replicas, including present ones.

        Removed replicas hold their GPUs until they have drained. `grows`: running replicas get their missing GPUs.
        """
        num_surge = max(0, count + beside - max(self.running, count))
        coming = self.gpus_to_add(count) + num_surge * (self.gpus + self.extra_gpus_per_surge)
        if grows:
            return replace(self, running=count, held=self.held + coming + self.missing_gpus(count), smaller_replicas=())
        unchanged = self.running - len(self.smaller_replicas)
        return replace(
            self,
            running=count,
            held=self.held + coming,
            smaller_replicas=self.smaller_replicas[: max(0, count - unchanged)],
        )


@dataclass(frozen=True, slots=True)
class BudgetShare:
    """Replicas that a resource may run now, of the wanted ones.

    `message` says why they are fewer and what would change it; empty if all are granted.
    """

    replicas: int
    wanted: int
    min_replicas: int = 0
    message: str = ""
    is_growth_pending: bool = False
    """True while running replicas stay as they are because the wanted revision needs more GPUs than are free."""

    @property
    def is_limited(self) -> bool:
        return self.replicas < self.wanted

    @property
    def is_below_min(self) -> bool:
        """True if fewer replicas than the minimum are granted."""
        return self.replicas < min(self.min_replicas, self.wanted)


# --- claims -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grant:
    """Replicas that one resource may run now.

    `grows`: running replicas may be updated to a revision with more GPUs; True if it does not need more.
    """

    replicas: int
    grows: bool


def build_gpu_claim(
    deployment: InferenceDeployment,
    children: ObservedChildren,
    *,
    wanted: int,
    revision: str | None = None,
    known_good: InferenceDeployment | None = None,
) -> GpuClaim:
    """Return the claim of a resource with `wanted` replicas.

    `revision` is the wanted revision; a group with its label counts as complete, even if pods are missing. `known_good`
    is the revision in which replicas are added while a canary tries a change.
    """
    gpus, groups = _gpus_per_replica(deployment), groups_of(children)
    running = len(groups)
    more = 0 if known_good is None else max(0, _gpus_per_replica(known_good) - gpus)
    is_tried = any(revision_label(group.stateful_set) == revision for group in groups)
    outdated = [group for group in groups if revision is None or revision_label(group.stateful_set) != revision]
    smaller_replicas = tuple(sorted((has for group in outdated if (has := gpus_of(group)) < gpus), reverse=True))
    scaling = deployment.spec.scaling
    return GpuClaim(
        key=f"{deployment.namespace}/{deployment.name}",
        priority=deployment.spec.priority,
        since=deployment.created_at,
        gpus=gpus,
        min_replicas=min(1, wanted) if scaling is None else max(1, scaling.min_replicas),
        wanted=wanted,
        running=running,
        held=max(gpus_held(children), (running - len(smaller_replicas)) * gpus + sum(smaller_replicas)),
        smaller_replicas=smaller_replicas,
        draining=gpus_draining(children),
        extra_gpus_per_added=more,
        extra_gpus_per_surge=more if is_tried else 0,
    )


def _gpus_per_replica(deployment: InferenceDeployment) -> int:
    layout = layout_of(deployment.spec)
    return layout.gpus_per_pod * layout.pods


def current_gpu_claim(deployment: InferenceDeployment, children: ObservedChildren) -> GpuClaim:
    """Return the claim of a resource that stays as it is, because it is paused, invalid or unreadable."""
    running, held = len(groups_of(children)), gpus_held(children)
    gpu_claim = build_gpu_claim(deployment, children, wanted=running)
    return replace(
        gpu_claim, gpus=-(-held // running) if running else 0, min_replicas=running, held=held, smaller_replicas=()
    )


# --- division ---------------------------------------------------------------------------------------------------------


class _FreeGpus:
    """Free GPUs of the whole budget and of each namespace that has a budget."""

    def __init__(self, budget: GpuBudget) -> None:
        self.total = UNLIMITED if budget.total is None else budget.total
        self.namespaces = dict(budget.namespaces)

    def take(self, gpu_claim: GpuClaim, gpus: int) -> None:
        """Reserve GPUs for a claim."""
        self.total -= gpus
        if gpu_claim.namespace in self.namespaces:
            self.namespaces[gpu_claim.namespace] -= gpus

    def fits(self, gpu_claim: GpuClaim, heavier: int = 0) -> int:
        """Return how many more replicas of a claim fit if each needs `heavier` additional GPUs."""
        gpus = gpu_claim.gpus + heavier
        return UNLIMITED if gpus == 0 else self.left(gpu_claim) // gpus

    def left(self, gpu_claim: GpuClaim) -> int:
        """Return the GPUs that are free for a claim."""
        return max(0, min(self.total, self.namespaces.get(gpu_claim.namespace, UNLIMITED)))


@dataclass(frozen=True, slots=True)
class _Allocation:
    """Final division: replicas by resource key, the resources whose replicas may grow, and the free GPUs."""

    replicas: Mapping[str, int]
    grown: frozenset[str]
    room: _FreeGpus


def final_replicas(gpu_claims: Iterable[GpuClaim], budget: GpuBudget) -> dict[str, int]:
    """Return the number of replicas that each resource gets in the end, by key."""
    return dict(_allocate(gpu_claims, budget).replicas)


def _allocate(gpu_claims: Iterable[GpuClaim], budget: GpuBudget) -> _Allocation:
    ranked = sorted(gpu_claims, key=_rank)
    room, grown = _FreeGpus(budget), set[str]()
    granted = {gpu_claim.key: gpu_claim.guaranteed for gpu_claim in ranked}
    for gpu_claim in ranked:
        room.take(gpu_claim, gpu_claim.gpus_for(gpu_claim.guaranteed))

    def grant(gpu_claim: GpuClaim, count: int) -> None:
        before = granted[gpu_claim.key]
        more = min(count - before, room.fits(gpu_claim))
        if more > 0:
            granted[gpu_claim.key] += more
            room.take(gpu_claim, more * gpu_claim.gpus)

    def keep_running(gpu_claim: GpuClaim) -> None:
        """Grant as many running and wanted replicas as fit, at their present size."""
        before = granted[gpu_claim.key]
        for count in range(min(gpu_claim.running, gpu_claim.wanted), before, -1):
            more = gpu_claim.gpus_for(count) - gpu_claim.gpus_for(before)
            if more <= room.left(gpu_claim):
                granted[gpu_claim.key] = count
                room.take(gpu_claim, more)
                return

    for _, equals in groupby(ranked, key=lambda gpu_claim: gpu_claim.priority):
        level = list(equals)
        for gpu_claim in level:
            keep_running(gpu_claim)
        for gpu_claim in level:
            lacking = gpu_claim.missing_gpus(granted[gpu_claim.key])
            if lacking == 0 or lacking <= room.left(gpu_claim):
                grown.add(gpu_claim.key)
                room.take(gpu_claim, lacking)
        level = [gpu_claim for gpu_claim in level if gpu_claim.key in grown]
        for gpu_claim in level:
            grant(gpu_claim, min(gpu_claim.min_replicas, gpu_claim.wanted))
        asking = [(granted[gpu_claim.key] * gpu_claim.gpus, place, gpu_claim) for place, gpu_claim in enumerate(level)]
        heapq.heapify(asking)
        while asking:
            _, place, gpu_claim = heapq.heappop(asking)
            before = granted[gpu_claim.key]
            grant(gpu_claim, min(before + 1, gpu_claim.wanted))
            if granted[gpu_claim.key] > before:
                heapq.heappush(asking, (granted[gpu_claim.key] * gpu_claim.gpus, place, gpu_claim))
    return _Allocation(granted, frozenset(grown), room)


def current_grants(gpu_claims: Sequence[GpuClaim], budget: GpuBudget) -> dict[str, Grant]:
    """Return what each resource may run now, by key: new replicas wait for removed ones to drain."""
    return _grants_now(gpu_claims, _allocate(gpu_claims, budget), budget)


def _grants_now(gpu_claims: Sequence[GpuClaim], allocation: _Allocation, budget: GpuBudget) -> dict[str, Grant]:
    room = _FreeGpus(budget)
    for gpu_claim in gpu_claims:
        room.take(gpu_claim, gpu_claim.held)
    found = {}
    for gpu_claim in sorted(gpu_claims, key=_rank):
        target = allocation.replicas[gpu_claim.key]
        lacking = gpu_claim.missing_gpus(target)
        grows = gpu_claim.key in allocation.grown and (lacking == 0 or lacking <= room.left(gpu_claim))
        more = target - gpu_claim.running
        if grows:
            room.take(gpu_claim, lacking)
        if more > 0:
            more = min(more, room.fits(gpu_claim, gpu_claim.extra_gpus_per_added)) if grows else 0
            room.take(gpu_claim, gpu_claim.gpus_to_add(gpu_claim.running + more))
        found[gpu_claim.key] = Grant(gpu_claim.running + more, grows)
    return found


def _rank(gpu_claim: GpuClaim) -> tuple[int, str, str]:
    """Return the sort key of a claim: priority, then age."""
    return -gpu_claim.priority, gpu_claim.since, gpu_claim.key


@dataclass(frozen=True, slots=True)
class SurgeRoom:
    """Surge replicas that a rollout may have.

    `groups` counts all of them, present ones included, once removed replicas have drained; `now` may be added
    immediately.
    """

    groups: int
    now: int


def surge_room(
    own: GpuClaim | None, count: int, others: Sequence[GpuClaim] | None, budget: GpuBudget | None
) -> SurgeRoom:
    """Return the surge replicas that fit into GPUs that no other resource holds or will get.

    If the other claims are unknown, only present surge replicas are allowed.
    """
    if own is None or budget is None:
        return SurgeRoom(UNLIMITED, UNLIMITED)
    present = max(0, own.running - count)
    if others is None:
        return SurgeRoom(present, 0)
    allocation, room = _allocate((own, *others), budget), _FreeGpus(budget)
    for other in others:
        room.take(other, max(other.held, _allocated_gpus(other, allocation)))
    room.take(own, own.with_grant(count).held - own.draining)
    in_the_end = room.fits(own, own.extra_gpus_per_surge)
    room.take(own, own.draining)
    return SurgeRoom(present + in_the_end, room.fits(own, own.extra_gpus_per_surge))


def _allocated_gpus(gpu_claim: GpuClaim, allocation: _Allocation) -> int:
    """Return the GPUs that a resource gets in the end."""
    count = allocation.replicas[gpu_claim.key]
    return count * gpu_claim.gpus if gpu_claim.key in allocation.grown else gpu_claim.gpus_for(count)


def num_groups_during(groups: Sequence[Group], actions: Iterable[Action]) -> int:
    """Return the number of replicas while these actions are executed: removed ones drain while new ones start."""
    present = {group.name for group in groups}
    for action in actions:
        if isinstance(action, Apply) and action.manifest["kind"] == "StatefulSet" and not is_worker(action.manifest):
            present.add(str(action.manifest["metadata"]["name"]))
    return len(present)


# --- messages ---------------------------------------------------------------------------------------------------------


def compute_share(own: GpuClaim, others: Sequence[GpuClaim] | None, budget: GpuBudget) -> BudgetShare:
    """Return the share of a resource.

    If the other claims are unknown, no replica is added and none is preempted.
    """
    if others is None:
        count = min(own.wanted, own.running) if own.gpus + own.extra_gpus_per_added else own.wanted
        unknown = "the GPU usage of other resources is unknown; no replica is added until it is known"
        return _share(own, Grant(count, grows=own.missing_gpus(count) == 0), unknown)
    gpu_claims = (own, *others)
    allocation = _allocate(gpu_claims, budget)
    granted = _grants_now(gpu_claims, allocation, budget)[own.key]
    is_to_come = own.key in allocation.grown and not granted.grows
    if granted.replicas < allocation.replicas[own.key] or is_to_come:
        return _share(own, granted, _pending_reason(own, others, allocation))
    return _share(own, granted, _shortage_reason(own, others, allocation, budget))


def budget_events(deployment: InferenceDeployment, share: BudgetShare | None) -> tuple[Event, ...]:
    """Return an Event if the budget limits the replica count and the status does not report it yet, or no longer limits
    it.
    """
    if share is None:
        return ()
    before, wanted = deployment.status.get("desiredReplicas"), deployment.status.get("wantedReplicas")
    count = share.replicas
    if share.is_growth_pending:
        if _is_reported(deployment):
            return ()
        return (Event("Warning", OVER_BUDGET, share.message, f"{deployment.generation}-{count}-grows"),)
    if share.is_limited and (before, wanted) != (count, share.wanted):
        return (Event("Warning", OVER_BUDGET, share.message, f"{deployment.generation}-{count}-{share.wanted}"),)
    if not share.is_limited and wanted is not None:
        message = f"the GPU budget has room for all wanted replicas ({count})"
        return (Event("Normal", WITHIN_BUDGET, message, f"{deployment.generation}-{count}"),)
    return ()


def _is_reported(deployment: InferenceDeployment) -> bool:
    """Return True if the status of this generation already reports that growth waits for the budget."""
    conditions = deployment.status.get("conditions")
    return any(
        (one.get("type"), one.get("reason"), one.get("observedGeneration"))
        == ("Progressing", OVER_BUDGET, deployment.generation)
        for one in (conditions if isinstance(conditions, list) else [])
        if isinstance(one, dict)
    )


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"


def _share(own: GpuClaim, granted: Grant, why: str) -> BudgetShare:
    count = granted.replicas
    if not granted.grows:
        message = (
            f"{_replicas(count)} of {own.wanted} wanted stay as they are ({_gpus(own.gpus_for(count))} in all), because"
            f" the new revision needs {_gpus(own.gpus)} each: {why}"
        )
        return BudgetShare(count, own.wanted, own.min_replicas, message, is_growth_pending=True)
    if count >= own.wanted:
        return BudgetShare(count, own.wanted, own.min_replicas)
    message = f"{count} of {own.wanted} wanted replicas ({_gpus(own.gpus)} each): {why}"
    return BudgetShare(count, own.wanted, own.min_replicas, message)


def _pending_reason(own: GpuClaim, others: Sequence[GpuClaim], allocation: _Allocation) -> str:
    releasing = [other.key for other in sorted(others, key=_rank) if other.held > _allocated_gpus(other, allocation)]
    if releasing:
        return f"more start after {_joined_list(releasing)} released GPUs of the budget"
    if own.extra_gpus_per_added:
        before = _gpus(own.gpus + own.extra_gpus_per_added)
        return f"more start after the change is verified; until then each new replica needs {before}"
    return "more start after removed replicas have drained"


def _shortage_reason(own: GpuClaim, others: Sequence[GpuClaim], allocation: _Allocation, budget: GpuBudget) -> str:
    """Return which budget is used up, by which resources, and what would free GPUs."""
    waits, room = own.key not in allocation.grown, allocation.room
    needed = own.missing_gpus(allocation.replicas[own.key]) if waits else own.gpus
    in_namespace = room.namespaces.get(own.namespace, UNLIMITED) < needed
    limit = budget.namespaces[own.namespace] if in_namespace else budget.total
    name = f"budget of {_gpus(limit or 0)}" + (f" for namespace {own.namespace}" if in_namespace else "")
    gets = {
        other.key: _allocated_gpus(other, allocation)
        for other in others
        if not in_namespace or other.namespace == own.namespace
    }
    getting = sorted(
        (other for other in others if gets.get(other.key)), key=lambda other: (-gets[other.key], _rank(other))
    )
    fewer_here = ["fewer replicas here"] if waits and allocation.replicas[own.key] > max(1, own.min_replicas) else []
    if not getting:
        return f"the {name} has no more; needs {' or '.join(['a larger budget', *fewer_here])}"
    users = [f"{other.key} (priority {other.priority}) uses {gets[other.key]}" for other in getting]
    takeable = [other.priority for other in getting if allocation.replicas[other.key] > other.guaranteed]
    helps = ["a larger budget", *fewer_here, "fewer replicas there"]
    if takeable and min(takeable) >= own.priority:
        helps.insert(0, f"a spec.priority above {min(takeable)} here")
    return f"of the {name} {_joined_list(users)}; needs {', '.join(helps[:-1])} or {helps[-1]}"


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _joined_list(items: Sequence[str]) -> str:
    """Return the first items, and how many more there are."""
    rest = len(items) - MAX_LISTED_RESOURCES
    return ", ".join(items[:MAX_LISTED_RESOURCES]) + (f" and {rest} more" if rest > 0 else "")
