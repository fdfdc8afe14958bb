"""Plan of a resource's children from the assignment of revisions to groups and the observed children. Pure.

Children that match are not written, so an idle iteration writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from trimtab_operator.builders.config_map import tuning_config_map
from trimtab_operator.builders.labels import ROLE_LABEL
from trimtab_operator.builders.rendezvous_secret import rendezvous_secret
from trimtab_operator.builders.service import client_service, rendezvous_service
from trimtab_operator.builders.stateful_set import Held, Rendered, leader_stateful_set, worker_stateful_set
from trimtab_operator.layout import layout_of
from trimtab_operator.observed.actions import Action, Apply, Delete, delete_of
from trimtab_operator.observed.drift import plan_applies
from trimtab_operator.observed.groups import (
    Group,
    ObservedChildren,
    groups_of,
    is_terminating,
    is_worker,
    ordinal_of,
    pod_rendezvous_address,
    revision_label,
)
from trimtab_operator.observed.phases import crashes_at_start
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.rollout.group_assignment import GroupAssignment, rendezvous_address


def plan_children(
    assignment: GroupAssignment,
    observed: ObservedChildren,
    *,
    held: Mapping[int, Held] | None = None,
    to_router: bool = False,
) -> tuple[Action, ...]:
    """Return all actions for an assignment: Services before the pods that they select, deletions last.

    `held` holds the back-offs to render, by ordinal (rollout/gang_placement.py). `to_router` is True if the client
    Service selects the router's pods.
    """
    wanted, known_good = assignment.wanted, assignment.known_good
    rendered = (wanted,) if known_good is None else (wanted, known_good)
    manifests: list[Manifest] = [client_service(wanted.deployment, to_router=to_router)]
    for revision in rendered:
        staying = [g for g in assignment.staying if assignment.revisions.get(g.ordinal, wanted) is revision]
        new = (ordinal for ordinal, one in assignment.created.items() if one is revision)
        manifests += _rendezvous_services(revision.deployment, staying, new, observed)
    for revision in rendered:
        manifests += _groups_manifests(revision, assignment.ordinals_of(revision), observed, held or {})
    applied = map(_with_address_fallback, plan_applies(manifests, observed))
    return (*applied, *_plan_removals(assignment, manifests, observed))


def _rendezvous_services(
    deployment: InferenceDeployment, staying: Iterable[Group], new: Iterable[int], observed: ObservedChildren
) -> Iterable[Manifest]:
    """Yield the Services that ranks of multi-pod replicas connect to; single-pod replicas need none."""
    if layout_of(deployment.spec).pods == 1:
        return
    for group in staying:
        yield rendezvous_service(deployment, group.ordinal, address=_known_address(group, deployment, observed))
    for ordinal in new:
        yield rendezvous_service(deployment, ordinal)


def _groups_manifests(
    rendered: Rendered, ordinals: Iterable[int], observed: ObservedChildren, held: Mapping[int, Held]
) -> Iterable[Manifest]:
    for ordinal in ordinals:
        yield from group_manifests(rendered, ordinal, observed, held.get(ordinal))


def group_manifests(
    wanted: Rendered, ordinal: int, observed: ObservedChildren, held: Held | None
) -> tuple[Manifest, ...]:
    """Return the StatefulSets of one group, both of one revision; none before the rendezvous Service has an address."""
    if layout_of(wanted.deployment.spec).pods == 1:
        return (leader_stateful_set(wanted, ordinal),)
    address = rendezvous_address(wanted.deployment, ordinal, observed)
    if address is None:
        return ()
    wanted = _with_present_start_values(wanted, ordinal, observed)
    return (
        leader_stateful_set(wanted, ordinal, address=address, held=held),
        worker_stateful_set(wanted, ordinal, address=address, held=held),
    )


def _with_present_start_values(wanted: Rendered, ordinal: int, observed: ObservedChildren) -> Rendered:
    """Return the revision with the start values of the group's present pods.

    The ranks of an engine must start with equal flags, and one pod may be replaced without the others. The engine gets
    the present values by PATCH. Pods whose engine does not start are replaced together to get them.
    """
    if any(group.ordinal == ordinal and crashes_at_start(group) for group in groups_of(observed)):
        return wanted
    templates = (
        (stateful_set.get("spec") or {}).get("template")
        for stateful_set in observed.stateful_sets
        if ordinal_of(stateful_set) == ordinal
    )
    pods = (pod for pod in observed.pods if ordinal_of(pod) == ordinal)
    same = (pod for pod in (*pods, *templates) if pod and revision_label(pod) == wanted.revision)
    present = next(same, None)
    return wanted if present is None else wanted.with_start_values_of(present)


def _known_address(group: Group, deployment: InferenceDeployment, observed: ObservedChildren) -> str | None:
    """Return the ClusterIP of the group's Service. If the Service was deleted, return the address in its pods, which
    avoids a restart.
    """
    pod_address = next(iter(sorted(group.rendezvous_addresses)), None)
    return rendezvous_address(deployment, group.ordinal, observed) or pod_address


def _with_address_fallback(action: Apply) -> Apply:
    """Return the action with a fallback without ClusterIP: a recreated Service's former address may be in use."""
    spec = action.manifest["spec"] if action.manifest["kind"] == "Service" else {}
    if not action.is_new or "clusterIP" not in spec:
        return action
    anywhere = {name: value for name, value in spec.items() if name != "clusterIP"}
    return replace(action, fallback={**action.manifest, "spec": anywhere})


def plan_tuning_state(deployment: InferenceDeployment, observed: ObservedChildren, state: str) -> tuple[Apply, ...]:
    """Return an apply of the tuner's ConfigMap if it differs from the stored one."""
    return plan_applies([tuning_config_map(deployment, state)], observed)


def plan_rendezvous_secret(wanted: InferenceDeployment, observed: ObservedChildren, *, token: str) -> tuple[Apply, ...]:
    """Return an apply of the Secret of multi-pod replicas if it is missing or empty.

    It precedes the pods, which do not start without it. An existing value is kept even if the operator's secret
    changes, because pods of one group that start at different times must read the same value.
    """
    if layout_of(wanted.spec).pods == 1:
        return ()
    wanted_secret = rendezvous_secret(wanted, token=token)
    present = next(iter(observed.secrets), None)
    value = None if present is None else (present.get("data") or {}).get(wanted.name)
    if value:
        wanted_secret["data"] = {wanted.name: value}
    return plan_applies([wanted_secret], observed)


def _plan_removals(
    assignment: GroupAssignment, wanted: Iterable[Manifest], observed: ObservedChildren
) -> Iterable[Delete]:
    """Yield deletions of removed groups, of workers that are not needed any more, and of unused rendezvous Services."""
    staying, leaving = assignment.staying, assignment.leaving
    for group, why in leaving:
        for stateful_set in group.stateful_sets:
            yield delete_of("StatefulSet", stateful_set, why)
    for group in staying:
        rendered = assignment.revisions.get(group.ordinal)
        if group.worker_set is not None and rendered is not None and layout_of(rendered.deployment.spec).pods == 1:
            yield delete_of("StatefulSet", group.worker_set, "a replica has a single pod now")
    present = {group.ordinal for group in (*staying, *(group for group, _ in leaving))}
    for stateful_set in observed.stateful_sets:
        if is_worker(stateful_set) and ordinal_of(stateful_set) not in present and not is_terminating(stateful_set):
            yield delete_of("StatefulSet", stateful_set, "its leader was deleted")
    needed = {m["metadata"]["name"] for m in wanted if m["kind"] == "Service"}
    rendezvous_ordinals: set[int | None] = {group.ordinal for group in staying if group.rendezvous_addresses}
    rendezvous_ordinals |= {ordinal_of(pod) for pod in observed.pods if pod_rendezvous_address(pod) is not None}
    for service in observed.services:
        metadata = service["metadata"]
        is_group_service = ROLE_LABEL in (metadata.get("labels") or {})
        is_needed = metadata["name"] in needed or ordinal_of(service) in rendezvous_ordinals
        if is_group_service and not is_needed and not is_terminating(service):
            yield delete_of("Service", service, "no pod uses it")
