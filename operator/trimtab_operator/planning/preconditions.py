"""What of a world must still be so when a turn is carried out that was decided in it. Pure.

A cache lags, and what was read is seconds old once engines were asked and a turn was taken. What a turn takes away or
writes over rests on who else serves: that is confirmed. What a turn only adds rests on nothing but the resource itself,
and a creation makes nothing where there is such an object (ADR-0076).
"""

from __future__ import annotations

from trimtab_operator.builders.labels import rollout_config_map_name
from trimtab_operator.observed.actions import Action, Apply, Delete
from trimtab_operator.observed.groups import groups_of
from trimtab_operator.planning.plan import Turn
from trimtab_operator.planning.snapshot import World
from trimtab_operator.resource.manifest import Manifest


def grounds_of(world: World, decided: Turn) -> tuple[Manifest, ...]:
    """The resource, the replicas that stay and the pods that go one by one; nothing where a turn only adds.

    A replica that goes as a whole is known by its uid, and those that stay are what counts. One that was Ready can only
    have become worth less; one that was not goes for that, and may serve by now.
    """
    resource = world.remembered or world.read
    if resource is None or not _takes(world, decided):
        return ()
    going = {action.uid for action in (*decided.care, *decided.children) if isinstance(action, Delete)}
    of_groups: list[Manifest] = []
    for group in groups_of(world.children):
        if group.stateful_set["metadata"].get("uid") not in going:
            of_groups += (*group.stateful_sets, *group.pods)
        elif not group.is_ready:
            of_groups += group.pods
    lone = [pod for pod in world.children.pods if pod["metadata"].get("uid") in going and pod not in of_groups]
    return (resource, *of_groups, *lone)


def _takes(world: World, decided: Turn) -> bool:
    """Whether anything goes, is written over, or is said of a change for good."""
    verdict = rollout_config_map_name(world.deployment)
    is_judged = any(action.manifest["metadata"]["name"] == verdict for action in decided.remember)
    return is_judged or not all(map(_adds, (*decided.care, *decided.children)))


def _adds(action: Action) -> bool:
    return isinstance(action, Apply) and action.is_new
