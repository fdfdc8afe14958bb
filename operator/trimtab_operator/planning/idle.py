"""When nothing happens at a resource, and what is true of it as long as nothing does. Pure.

A resource is at rest when its last turn did and said nothing, everything that it asks for is there, and its engines
have no request. What could change that is told by watches, or shows in the engines' pages of metrics, which cost a
fraction of a look to compare. So looks are far apart while it rests: what passes is time alone, and nothing that time
decides is in the open (ADR-0041).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trimtab_operator.observed.engines import Target, target_of
from trimtab_operator.planning.plan import Turn, turn
from trimtab_operator.planning.snapshot import World
from trimtab_operator.planning.state import Memory

REST_SECONDS = 30.0  # between two looks at a resource at rest: as long as the tuner believes a sample, at the least


@dataclass(frozen=True, slots=True)
class Rest:
    """A resource at rest: what its last look saw, where its engines are, each with what its page of metrics says, and
    when they were last seen to say the same (Unix time)."""

    world: World
    engines: tuple[tuple[Target, bytes], ...]
    seen_at: float

    @property
    def until(self) -> float:
        """When the next look is due (Unix time)."""
        return self.world.at + REST_SECONDS

    def later(self, at: float) -> Rest:
        """The same, seen once more."""
        return replace(self, seen_at=at)

    def ended_in(self, world: World) -> bool:
        """Whether the engines say something else in a later look."""
        return any(_page_in(world, target) != page for target, page in self.engines)


def rest_of(world: World, decided: Turn, status: Mapping[str, Any], *, before: Mapping[str, Any]) -> Rest | None:
    """The rest that begins after a turn whose `status` stands, where it is as `before`, which is what we had said
    then; None: something happens, or may."""
    if world.remembered is None or not decided.is_idle or status != before or not _is_well(status):
        return None
    if _has_open_questions(world, decided):
        return None
    engines = []
    for group in decided.findings.groups:
        target, seen = target_of(group, decided.memory.layouts), world.engines.get(group.name)
        if not group.is_ready or target.address is None or seen is None or seen.page is None or not seen.is_at_rest:
            return None
        engines.append((target, seen.page))
    return Rest(world, tuple(engines), world.at) if engines else None


def caught_up(rest: Rest, memory: Memory) -> Memory:
    """What is remembered once a rest is over: as if a look had seen the same when it was last so. What an engine did
    after that is its work of those seconds, and not of the whole rest."""
    if rest.seen_at <= rest.world.at:
        return memory
    engines = {name: seen.again(rest.seen_at) for name, seen in rest.world.engines.items()}
    decided = turn(replace(rest.world, at=rest.seen_at, engines=engines), memory)
    return replace(decided.memory, futile=decided.futile) if decided.is_idle else memory


def _is_well(status: Mapping[str, Any]) -> bool:
    by_type = {condition["type"]: condition for condition in status["conditions"]}
    said = {kind: condition["status"] for kind, condition in by_type.items()}
    is_up = (said["Ready"], said["Degraded"], said["Progressing"]) == ("True", "False", "False")
    return is_up and by_type["TuningActive"]["reason"] != "NotYetApplied"


def _has_open_questions(world: World, decided: Turn) -> bool:
    """Whether something is waited for that comes by time alone: a verdict on a change, on a value, or on a replica that
    may not be needed any more."""
    memory, scaling = decided.memory, world.deployment.spec.scaling
    tuner, rollout = memory.tuner, memory.rollout
    is_tried = (tuner is not None and tuner.trial is not None) or (rollout is not None and rollout.attempt is not None)
    may_scale_in = scaling is not None and decided.desired_replicas > scaling.min_replicas
    is_awaited = len(decided.findings.groups) != decided.desired_replicas or bool(decided.findings.draining)
    return is_tried or may_scale_in or is_awaited or memory.comparison is not None or bool(memory.missing)


def _page_in(world: World, target: Target) -> bytes | None:
    seen = world.engines.get(target.group)
    return None if seen is None else seen.page
