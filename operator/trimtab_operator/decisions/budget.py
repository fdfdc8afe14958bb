"""How a GPU budget is shared out among all resources: by priority, then by who was first, replica by replica. Pure.

    a replica that runs within its resource's fewest (scaling.minReplicas)      is never taken
    then, of each priority from the highest down:  what runs → up to the fewest → more, evenly

So a running replica is taken for a higher priority alone, or where the budget itself was lowered. What is to come waits
until what goes has drained: at no time is more held than the budget, but for replicas that are never taken.

Everybody computes all shares from the same stakes, and takes its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from trimtab_operator.decisions.actions import Action, Apply, Delete, Note
from trimtab_operator.layout import layout_of
from trimtab_operator.observed.accelerators import gpus_held
from trimtab_operator.observed.groups import Group, Observed, groups_of, is_worker
from trimtab_operator.resource.installation import GpuBudget
from trimtab_operator.resource.spec import InferenceDeployment

UNLIMITED = 1 << 60
OVER_BUDGET, WITHIN_BUDGET = "OverBudget", "WithinBudget"  # reasons of Events; the first one of conditions, too
NO_ROOM_IN_BUDGET = "the GPU budget has no room for a further replica"
MOST_NAMED = 3  # of the others, in one sentence


@dataclass(frozen=True, slots=True)
class Stake:
    """What one resource asks for, and has. `key` is NAMESPACE/NAME, `since` its creation time as Kubernetes writes it.
    `gpus` is what one of its replicas takes; `held`, in GPUs, counts replicas that drain too."""

    key: str
    priority: int
    since: str
    gpus: int
    least: int
    """Replicas that are not taken from it while they run."""
    wanted: int
    running: int
    """Replicas that are there to stay."""
    held: int

    @property
    def namespace(self) -> str:
        return self.key.partition("/")[0]

    @property
    def kept(self) -> int:
        """The replicas that nobody takes."""
        return min(self.running, self.least, self.wanted)

    def with_replicas(self, count: int, *, beside: int = 0) -> Stake:
        """The same once so many were granted, and so many more while a change rolls; those that go are held until they
        have drained."""
        return replace(self, running=count, held=max(self.held, (count + beside) * self.gpus))


@dataclass(frozen=True, slots=True)
class Share:
    """What a resource gets: `replicas` now, of those that are `wanted`; `message` says why they are fewer, and what
    would change it. Empty where it gets all."""

    replicas: int
    wanted: int
    least: int = 0
    message: str = ""

    @property
    def is_limited(self) -> bool:
        return self.replicas < self.wanted

    @property
    def is_below_least(self) -> bool:
        """Whether fewer than the fewest are granted."""
        return self.replicas < min(self.least, self.wanted)


# --- what a resource asks for -----------------------------------------------------------------------------------------


def stake_of(deployment: InferenceDeployment, children: Observed, *, wanted: int) -> Stake:
    """The stake of a resource that is steered towards so many replicas."""
    layout, running = layout_of(deployment.spec), len(groups_of(children))
    gpus = layout.gpus_per_pod * layout.pods
    scaling = deployment.spec.scaling
    return Stake(
        key=f"{deployment.namespace}/{deployment.name}",
        priority=deployment.spec.priority,
        since=deployment.created_at,
        gpus=gpus,
        least=min(1, wanted) if scaling is None else max(1, scaling.min_replicas),
        wanted=wanted,
        running=running,
        held=max(gpus_held(children), running * gpus),
    )


def standing_stake(deployment: InferenceDeployment, children: Observed) -> Stake:
    """The stake of a resource that is left as it is, as it is paused, or its spec or its model cannot be read."""
    running, held = len(groups_of(children)), gpus_held(children)
    stake = stake_of(deployment, children, wanted=running)
    return replace(stake, gpus=-(-held // running) if running else 0, least=running, held=held)


# --- how it is shared out ---------------------------------------------------------------------------------------------


class _Room:
    """GPUs that are left: of the whole budget, and of each namespace that has one."""

    def __init__(self, budget: GpuBudget) -> None:
        self.total = UNLIMITED if budget.total is None else budget.total
        self.namespaces = dict(budget.namespaces)

    def take(self, stake: Stake, gpus: int) -> None:
        """Have so many of them less."""
        self.total -= gpus
        if stake.namespace in self.namespaces:
            self.namespaces[stake.namespace] -= gpus

    def fits(self, stake: Stake) -> int:
        """How many more of its replicas there is room for."""
        if stake.gpus == 0:
            return UNLIMITED
        left = min(self.total, self.namespaces.get(stake.namespace, UNLIMITED))
        return max(0, left // stake.gpus)


def targets_of(stakes: Iterable[Stake], budget: GpuBudget) -> dict[str, int]:
    """How many replicas each is to have in the end, by its key."""
    return _targets(stakes, budget)[0]


def _targets(stakes: Iterable[Stake], budget: GpuBudget) -> tuple[dict[str, int], _Room]:
    """The same, and what room is left."""
    ranked = sorted(stakes, key=_rank)
    room = _Room(budget)
    granted = {stake.key: stake.kept for stake in ranked}
    for stake in ranked:
        room.take(stake, stake.kept * stake.gpus)

    def grant(stake: Stake, count: int) -> None:
        more = min(count - granted[stake.key], room.fits(stake))
        if more > 0:
            granted[stake.key] += more
            room.take(stake, more * stake.gpus)

    for _, equals in groupby(ranked, key=lambda stake: stake.priority):
        level = list(equals)
        for stake in level:
            grant(stake, min(stake.running, stake.wanted))
        for stake in level:
            grant(stake, min(stake.least, stake.wanted))
        asking = [(granted[stake.key] * stake.gpus, place, stake) for place, stake in enumerate(level)]
        heapq.heapify(asking)
        while asking:
            _, place, stake = heapq.heappop(asking)
            before = granted[stake.key]
            grant(stake, min(before + 1, stake.wanted))
            if granted[stake.key] > before:
                heapq.heappush(asking, (granted[stake.key] * stake.gpus, place, stake))
    return granted, room


def shares_now(stakes: Sequence[Stake], budget: GpuBudget) -> dict[str, int]:
    """How many replicas each may have now, by its key: what is to come waits for what goes."""
    return _now(stakes, targets_of(stakes, budget), budget)


def _now(stakes: Sequence[Stake], targets: Mapping[str, int], budget: GpuBudget) -> dict[str, int]:
    room = _Room(budget)
    for stake in stakes:
        room.take(stake, stake.held)
    found = {}
    for stake in sorted(stakes, key=_rank):
        more = targets[stake.key] - stake.running
        if more > 0:
            more = min(more, room.fits(stake))
            room.take(stake, more * stake.gpus)
        found[stake.key] = stake.running + more
    return found


def _rank(stake: Stake) -> tuple[int, str, str]:
    """Who comes first."""
    return -stake.priority, stake.since, stake.key


def room_beside(own: Stake | None, count: int, others: Sequence[Stake] | None, budget: GpuBudget | None) -> int:
    """How many replicas there may be beyond `count` while a change rolls: of what nobody else holds or is to get. Where
    others are not known, those that are there."""
    if own is None or budget is None:
        return UNLIMITED
    if others is None:
        return max(0, own.running - count)
    targets, room = targets_of((own, *others), budget), _Room(budget)
    room.take(own, count * own.gpus)
    for other in others:
        room.take(other, max(other.held, targets[other.key] * other.gpus))
    return room.fits(own)


def num_groups_after(groups: Sequence[Group], actions: Iterable[Action]) -> int:
    """How many replicas there are once these actions were carried out."""
    present = {group.name for group in groups}
    for action in actions:
        if isinstance(action, Delete) and action.kind == "StatefulSet":
            present.discard(action.name)
        elif isinstance(action, Apply) and action.manifest["kind"] == "StatefulSet" and not is_worker(action.manifest):
            present.add(str(action.manifest["metadata"]["name"]))
    return len(present)


# --- what is told -----------------------------------------------------------------------------------------------------


def share_of(own: Stake, others: Sequence[Stake] | None, budget: GpuBudget) -> Share:
    """What a resource gets beside the others. Where these are not known, nothing is added, and nothing taken."""
    if others is None:
        count = min(own.wanted, own.running) if own.gpus else own.wanted
        unknown = "what other resources hold of the GPU budget is not known now; no replica is added until it is"
        return _share(own, count, unknown)
    stakes = (own, *others)
    targets, room = _targets(stakes, budget)
    count = _now(stakes, targets, budget)[own.key]
    if count < targets[own.key]:
        return _share(own, count, _what_is_waited_for(own, others, targets))
    return _share(own, count, _what_is_short(own, others, targets, room, budget))


def budget_notes(deployment: InferenceDeployment, share: Share | None) -> tuple[Note, ...]:
    """An Event when less is granted than is wanted, or more again, than the status says."""
    if share is None:
        return ()
    before, wanted = deployment.status.get("desiredReplicas"), deployment.status.get("wantedReplicas")
    count = share.replicas
    if share.is_limited and (before, wanted) != (count, share.wanted):
        return (Note("Warning", OVER_BUDGET, share.message, f"{deployment.generation}-{count}-{share.wanted}"),)
    if not share.is_limited and wanted is not None:
        said = f"the GPU budget has room for all {_replicas(count)} that are wanted"
        return (Note("Normal", WITHIN_BUDGET, said, f"{deployment.generation}-{count}"),)
    return ()


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"


def _share(own: Stake, count: int, why: str) -> Share:
    if count >= own.wanted:
        return Share(count, own.wanted, own.least)
    message = f"{count} of {own.wanted} wanted replicas ({_gpus(own.gpus)} each): {why}"
    return Share(count, own.wanted, own.least, message)


def _what_is_waited_for(own: Stake, others: Sequence[Stake], targets: Mapping[str, int]) -> str:
    going = [other.key for other in sorted(others, key=_rank) if other.held > targets[other.key] * other.gpus]
    if going:
        return f"more come once {_listed(going)} gave GPUs of the budget back"
    return "more come once replicas that go have drained"


def _what_is_short(
    own: Stake, others: Sequence[Stake], targets: Mapping[str, int], room: _Room, budget: GpuBudget
) -> str:
    """Which budget is spent, on whom, and what would change it."""
    in_namespace = room.namespaces.get(own.namespace, UNLIMITED) < own.gpus
    limit = budget.namespaces[own.namespace] if in_namespace else budget.total
    name = f"budget of {_gpus(limit or 0)}" + (f" for namespace {own.namespace}" if in_namespace else "")
    beside = [other for other in others if not in_namespace or other.namespace == own.namespace]
    getting = sorted(
        (other for other in beside if targets[other.key] * other.gpus),
        key=lambda other: (-targets[other.key] * other.gpus, _rank(other)),
    )
    if not getting:
        return f"the {name} holds no more; a larger budget would"
    said = [f"{other.key} (priority {other.priority}) gets {targets[other.key] * other.gpus}" for other in getting]
    takeable = [other.priority for other in getting if targets[other.key] > other.kept]
    helps = ["a larger budget", "fewer replicas there"]
    if takeable and min(takeable) >= own.priority:
        helps.insert(0, f"a spec.priority above {min(takeable)} here")
    return f"of the {name} {_listed(said)}; {', '.join(helps[:-1])} or {helps[-1]} would change it"


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _listed(said: Sequence[str]) -> str:
    """A few of them, and how many more there are."""
    rest = len(said) - MOST_NAMED
    return ", ".join(said[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
