"""Objects that must be unchanged when a plan is executed. Pure.

A cache lags, and the snapshot is seconds old after polling engines and planning. Deletions and overwrites depend on
which other replicas serve, so their objects are read again before. Creations depend only on the resource itself, and
fail if the object exists (ADR-0076).
"""

from __future__ import annotations

from trimtab_operator.builders.labels import rollout_config_map_name
from trimtab_operator.observed.actions import Action, Apply, Delete
from trimtab_operator.observed.groups import groups_of
from trimtab_operator.planning.plan import ReconcilePlan
from trimtab_operator.planning.snapshot import ClusterSnapshot
from trimtab_operator.resource.manifest import Manifest


def preconditions_of(snapshot: ClusterSnapshot, plan: ReconcilePlan) -> tuple[Manifest, ...]:
    """Return the resource, the remaining replicas and the individually deleted pods; empty if the plan only creates.

    A Ready replica that is removed as a whole is not included, because the remaining ones matter. A replica that is
    removed because it was not Ready is included, because it may serve by now.
    """
    resource = snapshot.cached_resource or snapshot.live_resource
    if resource is None or not _is_destructive(snapshot, plan):
        return ()
    deleted_uids = {action.uid for action in (*plan.urgent_deletes, *plan.children) if isinstance(action, Delete)}
    of_groups: list[Manifest] = []
    for group in groups_of(snapshot.children):
        if group.stateful_set["metadata"].get("uid") not in deleted_uids:
            of_groups += (*group.stateful_sets, *group.pods)
        elif not group.is_ready:
            of_groups += group.pods
    single_pods = [
        pod for pod in snapshot.children.pods if pod["metadata"].get("uid") in deleted_uids and pod not in of_groups
    ]
    return (resource, *of_groups, *single_pods)


def _is_destructive(snapshot: ClusterSnapshot, plan: ReconcilePlan) -> bool:
    """Return True if the plan deletes or overwrites anything, or stores a verdict on a rollout."""
    rollout_state = rollout_config_map_name(snapshot.deployment)
    stores_rollout = any(action.manifest["metadata"]["name"] == rollout_state for action in plan.state_writes)
    return stores_rollout or not all(map(_is_creation, (*plan.urgent_deletes, *plan.children)))


def _is_creation(action: Action) -> bool:
    return isinstance(action, Apply) and action.is_new
