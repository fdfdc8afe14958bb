"""How a GPU budget is shared out among all resources: by priority, then by who was first, replica by replica. Pure.

    a replica that runs within its resource's fewest (scaling.minReplicas)      is never taken
    then, of each priority from the highest down:  what runs → what it grows by → up to the fewest → more, evenly

A replica that runs counts with the GPUs that it has. A change to a form that takes more waits until there is room for
all replicas at once; until then those that run stay as they are, and no others come. So a running replica is taken for
a higher priority alone, or where the budget itself was lowered. What is to come waits until what goes has drained: at
no time is more held than the budget, but for replicas that are never taken.

Everybody computes all shares from the same stakes, and takes its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from trimtab_operator.layout import layout_of
from trimtab_operator.observed.accelerators import gpus_draining, gpus_held, gpus_of
from trimtab_operator.observed.actions import Action, Apply, Note
from trimtab_operator.observed.groups import Group, Observed, groups_of, is_worker, revision_label
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
    smaller: tuple[int, ...] = ()
    """The GPUs that each running replica takes of those that have to grow, as a change asks for more: the largest
    first."""
    draining: int = 0
    """GPUs of `held` that replicas which go will give back."""
    more_added: int = 0
    """By how many GPUs a replica that is added now takes more than `gpus`: while a change to fewer is tried, others
    come in the proven form."""
    more_beside: int = 0
    """The same of one that comes beside the wanted ones while a change rolls."""

    @property
    def namespace(self) -> str:
        return self.key.partition("/")[0]

    @property
    def kept(self) -> int:
        """The replicas that nobody takes."""
        return min(self.running, self.least, self.wanted)

    def takes(self, count: int) -> int:
        """The GPUs that so many replicas take as they stand: first those that run, the largest before others."""
        unchanged = self.running - len(self.smaller)
        grown = min(count, unchanged) + max(0, count - self.running)
        return grown * self.gpus + sum(self.smaller[: max(0, count - unchanged)])

    def lacks(self, count: int) -> int:
        """The GPUs that so many of the running replicas lack to be what is asked for."""
        count = min(count, self.running)
        return count * self.gpus - self.takes(count)

    def to_come(self, count: int) -> int:
        """The GPUs that those take which have to be added until there are so many."""
        return max(0, count - self.running) * (self.gpus + self.more_added)

    def with_replicas(self, count: int, *, beside: int = 0, grows: bool = True) -> Stake:
        """The same once so many were granted, and so many more while a change rolls, those that go counted; these are
        held until they have drained. `grows`: whether those that run get what they lack."""
        num_beside = max(0, count + beside - max(self.running, count))
        coming = self.to_come(count) + num_beside * (self.gpus + self.more_beside)
        if grows:
            return replace(self, running=count, held=self.held + coming + self.lacks(count), smaller=())
        unchanged = self.running - len(self.smaller)
        return replace(self, running=count, held=self.held + coming, smaller=self.smaller[: max(0, count - unchanged)])


@dataclass(frozen=True, slots=True)
class Share:
    """What a resource gets: `replicas` now, of those that are `wanted`; `message` says why they are fewer, and what
    would change it. Empty where it gets all."""

    replicas: int
    wanted: int
    least: int = 0
    message: str = ""
    waits_to_grow: bool = False
    """Whether the replicas that run stay as they are, as what is asked for takes more GPUs than there is room for."""

    @property
    def is_limited(self) -> bool:
        return self.replicas < self.wanted

    @property
    def is_below_least(self) -> bool:
        """Whether fewer than the fewest are granted."""
        return self.replicas < min(self.least, self.wanted)


# --- what a resource asks for -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Granted:
    """What one resource may have now. `grows`: its replicas may be what is asked for, though that takes more GPUs than
    they have; true where it does not."""

    replicas: int
    grows: bool


def stake_of(
    deployment: InferenceDeployment,
    children: Observed,
    *,
    wanted: int,
    revision: str | None = None,
    proven: InferenceDeployment | None = None,
) -> Stake:
    """The stake of a resource that is steered towards so many replicas. `revision` is what they are brought to: one
    that has it by now counts as whole, whatever of it is missing. `proven`: the form in which replicas are added while
    one of them tries a change."""
    gpus, groups = _gpus_per_replica(deployment), groups_of(children)
    running = len(groups)
    more = 0 if proven is None else max(0, _gpus_per_replica(proven) - gpus)
    is_tried = any(revision_label(group.stateful_set) == revision for group in groups)
    outdated = [group for group in groups if revision is None or revision_label(group.stateful_set) != revision]
    smaller = tuple(sorted((has for group in outdated if (has := gpus_of(group)) < gpus), reverse=True))
    scaling = deployment.spec.scaling
    return Stake(
        key=f"{deployment.namespace}/{deployment.name}",
        priority=deployment.spec.priority,
        since=deployment.created_at,
        gpus=gpus,
        least=min(1, wanted) if scaling is None else max(1, scaling.min_replicas),
        wanted=wanted,
        running=running,
        held=max(gpus_held(children), (running - len(smaller)) * gpus + sum(smaller)),
        smaller=smaller,
        draining=gpus_draining(children),
        more_added=more,
        more_beside=more if is_tried else 0,
    )


def _gpus_per_replica(deployment: InferenceDeployment) -> int:
    layout = layout_of(deployment.spec)
    return layout.gpus_per_pod * layout.pods


def standing_stake(deployment: InferenceDeployment, children: Observed) -> Stake:
    """The stake of a resource that is left as it is, as it is paused, or its spec or its model cannot be read."""
    running, held = len(groups_of(children)), gpus_held(children)
    stake = stake_of(deployment, children, wanted=running)
    return replace(stake, gpus=-(-held // running) if running else 0, least=running, held=held, smaller=())


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

    def fits(self, stake: Stake, heavier: int = 0) -> int:
        """How many more of its replicas there is room for, where each takes so many GPUs more."""
        gpus = stake.gpus + heavier
        return UNLIMITED if gpus == 0 else self.left(stake) // gpus

    def left(self, stake: Stake) -> int:
        """The GPUs that are left for it."""
        return max(0, min(self.total, self.namespaces.get(stake.namespace, UNLIMITED)))


@dataclass(frozen=True, slots=True)
class _Division:
    """How all is shared out in the end: replicas by their resource's key, which of those that ask for more GPUs for
    each replica get them, and what room is left."""

    replicas: Mapping[str, int]
    grown: frozenset[str]
    room: _Room


def targets_of(stakes: Iterable[Stake], budget: GpuBudget) -> dict[str, int]:
    """How many replicas each is to have in the end, by its key."""
    return dict(_divided(stakes, budget).replicas)


def _divided(stakes: Iterable[Stake], budget: GpuBudget) -> _Division:
    ranked = sorted(stakes, key=_rank)
    room, grown = _Room(budget), set[str]()
    granted = {stake.key: stake.kept for stake in ranked}
    for stake in ranked:
        room.take(stake, stake.takes(stake.kept))

    def grant(stake: Stake, count: int) -> None:
        before = granted[stake.key]
        more = min(count - before, room.fits(stake))
        if more > 0:
            granted[stake.key] += more
            room.take(stake, more * stake.gpus)

    def stay(stake: Stake) -> None:
        """Let it have as many as run and are wanted, as they stand."""
        before = granted[stake.key]
        for count in range(min(stake.running, stake.wanted), before, -1):
            more = stake.takes(count) - stake.takes(before)
            if more <= room.left(stake):
                granted[stake.key] = count
                room.take(stake, more)
                return

    for _, equals in groupby(ranked, key=lambda stake: stake.priority):
        level = list(equals)
        for stake in level:
            stay(stake)
        for stake in level:
            lacking = stake.lacks(granted[stake.key])
            if lacking == 0 or lacking <= room.left(stake):
                grown.add(stake.key)
                room.take(stake, lacking)
        level = [stake for stake in level if stake.key in grown]
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
    return _Division(granted, frozenset(grown), room)


def shares_now(stakes: Sequence[Stake], budget: GpuBudget) -> dict[str, Granted]:
    """What each may have now, by its key: what is to come waits for what goes."""
    return _now(stakes, _divided(stakes, budget), budget)


def _now(stakes: Sequence[Stake], division: _Division, budget: GpuBudget) -> dict[str, Granted]:
    room = _Room(budget)
    for stake in stakes:
        room.take(stake, stake.held)
    found = {}
    for stake in sorted(stakes, key=_rank):
        target = division.replicas[stake.key]
        lacking = stake.lacks(target)
        grows = stake.key in division.grown and (lacking == 0 or lacking <= room.left(stake))
        more = target - stake.running
        if grows:
            room.take(stake, lacking)
        if more > 0:
            more = min(more, room.fits(stake, stake.more_added)) if grows else 0
            room.take(stake, stake.to_come(stake.running + more))
        found[stake.key] = Granted(stake.running + more, grows)
    return found


def _rank(stake: Stake) -> tuple[int, str, str]:
    """Who comes first."""
    return -stake.priority, stake.since, stake.key


@dataclass(frozen=True, slots=True)
class Beside:
    """How many replicas there may be beyond the wanted ones while a change rolls: `groups`, those counted that are
    there, once what goes has drained; `now` of them may be added to all that is there by now."""

    groups: int
    now: int


def room_beside(own: Stake | None, count: int, others: Sequence[Stake] | None, budget: GpuBudget | None) -> Beside:
    """How many replicas there may be beyond `count` while a change rolls: of what nobody else holds or is to get. Where
    others are not known, those that are there."""
    if own is None or budget is None:
        return Beside(UNLIMITED, UNLIMITED)
    present = max(0, own.running - count)
    if others is None:
        return Beside(present, 0)
    division, room = _divided((own, *others), budget), _Room(budget)
    for other in others:
        room.take(other, max(other.held, _gets(other, division)))
    room.take(own, own.with_replicas(count).held - own.draining)
    in_the_end = room.fits(own, own.more_beside)
    room.take(own, own.draining)
    return Beside(present + in_the_end, room.fits(own, own.more_beside))


def _gets(stake: Stake, division: _Division) -> int:
    """The GPUs that it is to have in the end."""
    count = division.replicas[stake.key]
    return count * stake.gpus if stake.key in division.grown else stake.takes(count)


def num_groups_meanwhile(groups: Sequence[Group], actions: Iterable[Action]) -> int:
    """How many replicas there are while these actions are carried out: those that go drain beside those that come."""
    present = {group.name for group in groups}
    for action in actions:
        if isinstance(action, Apply) and action.manifest["kind"] == "StatefulSet" and not is_worker(action.manifest):
            present.add(str(action.manifest["metadata"]["name"]))
    return len(present)


# --- what is told -----------------------------------------------------------------------------------------------------


def share_of(own: Stake, others: Sequence[Stake] | None, budget: GpuBudget) -> Share:
    """What a resource gets beside the others. Where these are not known, nothing is added, and nothing taken."""
    if others is None:
        count = min(own.wanted, own.running) if own.gpus + own.more_added else own.wanted
        unknown = "what other resources hold of the GPU budget is not known now; no replica is added until it is"
        return _share(own, Granted(count, grows=own.lacks(count) == 0), unknown)
    stakes = (own, *others)
    division = _divided(stakes, budget)
    granted = _now(stakes, division, budget)[own.key]
    is_to_come = own.key in division.grown and not granted.grows
    if granted.replicas < division.replicas[own.key] or is_to_come:
        return _share(own, granted, _what_is_waited_for(own, others, division))
    return _share(own, granted, _what_is_short(own, others, division, budget))


def budget_notes(deployment: InferenceDeployment, share: Share | None) -> tuple[Note, ...]:
    """An Event when less is granted than is wanted, or more again, than the status says."""
    if share is None:
        return ()
    before, wanted = deployment.status.get("desiredReplicas"), deployment.status.get("wantedReplicas")
    count = share.replicas
    if share.waits_to_grow:
        if _is_said(deployment):
            return ()
        return (Note("Warning", OVER_BUDGET, share.message, f"{deployment.generation}-{count}-grows"),)
    if share.is_limited and (before, wanted) != (count, share.wanted):
        return (Note("Warning", OVER_BUDGET, share.message, f"{deployment.generation}-{count}-{share.wanted}"),)
    if not share.is_limited and wanted is not None:
        said = f"the GPU budget has room for all {_replicas(count)} that are wanted"
        return (Note("Normal", WITHIN_BUDGET, said, f"{deployment.generation}-{count}"),)
    return ()


def _is_said(deployment: InferenceDeployment) -> bool:
    """Whether the status says of this generation that what is asked for waits for the budget."""
    said = deployment.status.get("conditions")
    return any(
        (one.get("type"), one.get("reason"), one.get("observedGeneration"))
        == ("Progressing", OVER_BUDGET, deployment.generation)
        for one in (said if isinstance(said, list) else [])
        if isinstance(one, dict)
    )


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"


def _share(own: Stake, granted: Granted, why: str) -> Share:
    count = granted.replicas
    if not granted.grows:
        message = (
            f"{_replicas(count)} of {own.wanted} wanted stay as they are ({_gpus(own.takes(count))} in all), as those"
            f" that are asked for take {_gpus(own.gpus)} each: {why}"
        )
        return Share(count, own.wanted, own.least, message, waits_to_grow=True)
    if count >= own.wanted:
        return Share(count, own.wanted, own.least)
    message = f"{count} of {own.wanted} wanted replicas ({_gpus(own.gpus)} each): {why}"
    return Share(count, own.wanted, own.least, message)


def _what_is_waited_for(own: Stake, others: Sequence[Stake], division: _Division) -> str:
    going = [other.key for other in sorted(others, key=_rank) if other.held > _gets(other, division)]
    if going:
        return f"more come once {_listed(going)} gave GPUs of the budget back"
    if own.more_added:
        before = _gpus(own.gpus + own.more_added)
        return f"more come once the change that is tried has proven itself; until then each is added with {before}"
    return "more come once replicas that go have drained"


def _what_is_short(own: Stake, others: Sequence[Stake], division: _Division, budget: GpuBudget) -> str:
    """Which budget is spent, on whom, and what would change it."""
    waits, room = own.key not in division.grown, division.room
    needed = own.lacks(division.replicas[own.key]) if waits else own.gpus
    in_namespace = room.namespaces.get(own.namespace, UNLIMITED) < needed
    limit = budget.namespaces[own.namespace] if in_namespace else budget.total
    name = f"budget of {_gpus(limit or 0)}" + (f" for namespace {own.namespace}" if in_namespace else "")
    gets = {
        other.key: _gets(other, division) for other in others if not in_namespace or other.namespace == own.namespace
    }
    getting = sorted(
        (other for other in others if gets.get(other.key)), key=lambda other: (-gets[other.key], _rank(other))
    )
    fewer_here = ["fewer replicas here"] if waits and division.replicas[own.key] > max(1, own.least) else []
    if not getting:
        return f"the {name} holds no more; {' or '.join(['a larger budget', *fewer_here])} would"
    said = [f"{other.key} (priority {other.priority}) gets {gets[other.key]}" for other in getting]
    takeable = [other.priority for other in getting if division.replicas[other.key] > other.kept]
    helps = ["a larger budget", *fewer_here, "fewer replicas there"]
    if takeable and min(takeable) >= own.priority:
        helps.insert(0, f"a spec.priority above {min(takeable)} here")
    return f"of the {name} {_listed(said)}; {', '.join(helps[:-1])} or {helps[-1]} would change it"


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _listed(said: Sequence[str]) -> str:
    """A few of them, and how many more there are."""
    rest = len(said) - MOST_NAMED
    return ", ".join(said[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
