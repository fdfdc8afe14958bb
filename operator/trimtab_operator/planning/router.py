"""Plan of a resource's router: its children, whether clients reach it, and replica counts from and to zero. Pure.

The client Service selects the router's pods while one of them is Ready, else the replicas (fail open). It also selects
the router while no replica serves, because only the router can hold requests. When the router is disabled, its pods are
deleted after the Service selects the replicas.

Zero replicas (ADR-0078): a held request raises the count at once, in every tuning mode, because it would otherwise
fail. The count falls to zero only in mode Auto, after `scaling.idleTimeout` in which every router pod and every replica
reported and none of them had a request. A router pod that does not answer keeps the replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from trimtab_operator.builders.account import router_account, router_role_binding
from trimtab_operator.builders.admin_token import router_token, token_hash
from trimtab_operator.builders.disruption import router_disruption_budget
from trimtab_operator.builders.labels import COMPONENT_LABEL, ROUTER_COMPONENT, router_selector, service_name
from trimtab_operator.builders.monitoring import router_pod_monitor
from trimtab_operator.builders.network_policy import router_network_policy
from trimtab_operator.builders.router import router_deployment
from trimtab_operator.builders.service import client_service, engines_service
from trimtab_operator.observed.actions import Action, delete_of
from trimtab_operator.observed.drift import plan_applies
from trimtab_operator.observed.engines import EngineObservation
from trimtab_operator.observed.groups import Group, ObservedChildren, is_terminating, label_of
from trimtab_operator.observed.router import RouterLoad, ready_routers
from trimtab_operator.planning.tuning import scaling_of
from trimtab_operator.resource.installation import Installation, RouterDefaults
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.quantity import parse_seconds
from trimtab_operator.resource.spec import DEFAULT_IDLE_TIMEOUT, InferenceDeployment, Router, Scaling
from trimtab_operator.resource.validation_error import ValidationError
from trimtab_operator.tuner.decide import TunerOutput
from trimtab_operator.tuner.explanation import sentence_of
from trimtab_operator.tuner.moves import Decision, Move, Reason, ReplicaCount, decision_id
from trimtab_operator.tuner.scaling.behavior import Behavior, ScaleEvent, Select, limit_change
from trimtab_operator.tuner.settings import Mode
from trimtab_operator.tuner.state import TunerState

NEEDED_KINDS = ("RoleBinding", "Deployment")  # without one of them there is no router
REMOVABLE_KINDS = ("Deployment", "RoleBinding", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor")
DEFAULT_SEQUENCE_SLOTS = 256  # requests that a replica runs at once, for a first estimate: vLLM's default
NO_ROUTER_IN_INSTALLATION = "this operator has no --router; set router.enabled in its chart, or remove spec.router"


@dataclass(frozen=True, slots=True)
class RouterView:
    """State of an enabled router for the status."""

    replicas: int
    ready: int
    is_selected: bool
    """True if the client Service selects the router's pods."""
    obstacle: str | None = None
    """Why no router pods can be created."""


@dataclass(frozen=True, slots=True)
class IdleWatch:
    """Observation without any request since Unix time `since`.

    `arrived` are the request counters of each router pod and each engine: a changed counter restarts the observation.
    """

    since: float
    arrived: tuple[tuple[str, float | None], ...]


# --- children ---------------------------------------------------------------------------------------------------------


def router_errors(deployment: InferenceDeployment, *, has_router: bool) -> tuple[ValidationError, ...]:
    """Return the validation error of a router in an installation without routers."""
    if has_router or deployment.spec.active_router is None:
        return ()
    return (ValidationError("spec.router", NO_ROUTER_IN_INSTALLATION),)


def selects_router(deployment: InferenceDeployment, observed: ObservedChildren, groups: Iterable[Group]) -> bool:
    """Return True if the client Service should select the router's pods."""
    if deployment.spec.active_router is None:
        return False
    return ready_routers(observed.router_pods) > 0 or not any(group.serves for group in groups)


def plan_client_service(
    deployment: InferenceDeployment, observed: ObservedChildren, *, to_router: bool
) -> tuple[Action, ...]:
    """Return the action for an existing client Service, while the replicas stay as they are."""
    name = service_name(deployment)
    if all(service["metadata"]["name"] != name for service in observed.services):
        return ()
    return plan_applies([client_service(deployment, to_router=to_router)], observed)


def view_router(deployment: InferenceDeployment, observed: ObservedChildren, *, is_selected: bool) -> RouterView | None:
    """Return the router's state for the status; None without a router."""
    router = deployment.spec.active_router
    if router is None:
        return None
    missing = [kind for kind in NEEDED_KINDS if kind not in observed.optional]
    obstacle = f"the operator has no permission for {' and '.join(missing)} objects" if missing else None
    return RouterView(router.replicas, ready_routers(observed.router_pods), is_selected, obstacle)


def plan_router(
    deployment: InferenceDeployment, observed: ObservedChildren, installation: Installation, *, admin_token: str
) -> tuple[Action, ...]:
    """Return the actions for the router's children: in the order of their dependencies, deletions last."""
    router, defaults = deployment.spec.active_router, installation.router
    wanted: tuple[Manifest, ...] = ()
    if router is not None and defaults is not None and all(kind in observed.optional for kind in NEEDED_KINDS):
        token_sha256 = token_hash(router_token(admin_token))
        wanted = tuple(router_manifests(deployment, router, installation, defaults, token_sha256))
    known = [m for m in wanted if m["kind"] in ("ServiceAccount", "Service") or m["kind"] in observed.optional]
    is_needed = not wanted and _is_selected_now(deployment, observed)
    removed = () if is_needed else _removals(observed, {(m["kind"], m["metadata"]["name"]) for m in wanted})
    return (*plan_applies(known, observed), *removed)


def is_router_child(manifest: Manifest) -> bool:
    """Return True if an object belongs to the router, by its label."""
    return label_of(manifest, COMPONENT_LABEL) == ROUTER_COMPONENT


def router_manifests(
    deployment: InferenceDeployment,
    router: Router,
    installation: Installation,
    defaults: RouterDefaults,
    admin_token_sha256: str,
) -> Iterator[Manifest]:
    """Yield the router's children in the order of their dependencies."""
    yield router_account(deployment)
    yield router_role_binding(deployment, role_kind=defaults.role.kind, role_name=defaults.role.name)
    yield engines_service(deployment)
    yield router_disruption_budget(deployment, evicts_unhealthy=defaults.evict_unhealthy)
    if installation.network is not None:
        yield router_network_policy(deployment, installation.network)
    if installation.pod_monitoring is not None:
        yield router_pod_monitor(deployment, installation.pod_monitoring)
    image = router.image or defaults.image
    yield router_deployment(deployment, router, image=image, admin_token_sha256=admin_token_sha256)


def _is_selected_now(deployment: InferenceDeployment, observed: ObservedChildren) -> bool:
    """Return True if the present client Service selects the router's pods, so that they may get new requests."""
    name = service_name(deployment)
    service = next((s for s in observed.services if s["metadata"]["name"] == name), None)
    return service is not None and (service.get("spec") or {}).get("selector") == router_selector(deployment)


def _removals(observed: ObservedChildren, wanted: set[tuple[str, str]]) -> Iterator[Action]:
    kinds = {"Service": observed.services, "ServiceAccount": observed.accounts}
    kinds |= {kind: observed.optional.get(kind, ()) for kind in REMOVABLE_KINDS}
    for kind in (*REMOVABLE_KINDS, "Service", "ServiceAccount"):
        for child in kinds[kind]:
            is_wanted = (kind, child["metadata"]["name"]) in wanted
            if is_router_child(child) and not is_wanted and not is_terminating(child):
                yield delete_of(kind, child, "there is no router any more")


# --- zero replicas ----------------------------------------------------------------------------------------------------


def watch_idle(
    before: IdleWatch | None,
    load: RouterLoad,
    groups: Iterable[Group],
    engines: Mapping[str, EngineObservation],
    *,
    now: float,
) -> IdleWatch | None:
    """Return since when no router pod and no replica has had a request.

    None if one has, does not report, or is not Ready: nothing is removed while something starts or fails.
    """
    if not load.is_complete or load.held or load.in_flight:
        return None
    arrived: list[tuple[str, float | None]] = list(load.arrived)
    for group in groups:
        seen = engines.get(group.name)
        sample = None if seen is None else seen.sample
        if not group.is_ready or sample is None or sample.gauges.running or sample.gauges.waiting:
            return None
        arrived.append((group.name, sample.counters.arrived))
    found = IdleWatch(now, tuple(arrived))
    if before is not None and before.arrived == found.arrived:
        found = replace(found, since=min(now, before.since))
    return found if load.last_arrival_at is None else replace(found, since=max(found.since, load.last_arrival_at))


def scale_from_or_to_zero(
    deployment: InferenceDeployment,
    tuned: TunerOutput,
    load: RouterLoad,
    idle: IdleWatch | None,
    groups: Iterable[Group],
    *,
    now: float,
) -> TunerOutput:
    """Return the tuner's output with a replica count for held requests, or zero after an idle time."""
    scaling = deployment.spec.scaling
    if scaling is None or deployment.spec.active_router is None or tuned.replicas is None:
        return tuned
    mode = Mode(deployment.spec.tuning.mode)
    move = None
    if load.held and not any(group.serves for group in groups):
        move = _move_for_held(deployment, scaling, tuned, load, mode, now)
    elif idle is not None and scaling.min_replicas == 0 and tuned.replicas > 0 and mode is Mode.AUTO:
        move = _move_to_zero(scaling, tuned, tuned.replicas, idle, now)
    return tuned if move is None else _with_move(tuned, move, now)


def _move_for_held(
    deployment: InferenceDeployment, scaling: Scaling, tuned: TunerOutput, load: RouterLoad, mode: Mode, now: float
) -> Move | None:
    """Return the move to the replicas that run all held requests at once; without Auto only the first replica.

    No rate of `scaling.behavior` delays the first replica. Requests that are held because the replicas restart need no
    further ones.
    """
    current = tuned.replicas or 0
    if current > 0 and not _was_started_for_held(tuned.state):
        return None
    slots = deployment.spec.engine.max_num_seqs or DEFAULT_SEQUENCE_SLOTS
    wanted = min(scaling.max_replicas, max(1, math.ceil(load.held / slots)))
    behavior = _behavior(scaling)
    limited = limit_change(behavior, current, max(current, wanted), tuned.state.scaling.events, now=now)
    target = max(1, limited) if mode is Mode.AUTO else max(1, current)
    if target <= current:
        return None
    evidence = {"held_requests": float(load.held), "oldest_held_seconds": round(load.oldest_held_seconds, 1)}
    return Move(Reason.REQUESTS_HELD, ReplicaCount(), current, target, evidence, (), "no held request")


def _was_started_for_held(state: TunerState) -> bool:
    """Return True if the last decision on replicas was made because requests were held."""
    found = [decision for decision in state.history if isinstance(decision.move.target, ReplicaCount)]
    return bool(found) and found[-1].reason is Reason.REQUESTS_HELD


def _move_to_zero(scaling: Scaling, tuned: TunerOutput, current: int, idle: IdleWatch, now: float) -> Move | None:
    """Return the move to zero, or towards it at the rate of `scaling.behavior`."""
    seconds = now - idle.since
    if seconds < parse_seconds(scaling.idle_timeout or DEFAULT_IDLE_TIMEOUT):
        return None
    behavior = _behavior(scaling)
    if behavior.down.select is Select.DISABLED:
        return None
    target = max(0, limit_change(behavior, current, 0, tuned.state.scaling.events, now=now))
    if target >= current:
        return None
    evidence = {"idle_seconds": round(seconds)}
    return Move(Reason.NO_REQUESTS, ReplicaCount(), current, target, evidence, (), "a request within the idle timeout")


def _behavior(scaling: Scaling) -> Behavior:
    found = scaling_of(scaling)
    assert found is not None
    return found.behavior


def _with_move(tuned: TunerOutput, move: Move, now: float) -> TunerOutput:
    """Return the output with the move applied, recorded and counted like one of the tuner."""
    assert isinstance(move.before, int)
    assert isinstance(move.after, int)
    decision = Decision(decision_id(now, move), now, move, sentence_of(move, Mode.AUTO))
    event = ScaleEvent(now, move.after - move.before)
    scaling = replace(tuned.state.scaling, desired=move.after, events=(*tuned.state.scaling.events, event))
    state = replace(tuned.state, scaling=scaling, moved_at={**tuned.state.moved_at, move.target.value: now})
    return replace(
        tuned, state=state.with_decision(decision), replicas=move.after, decisions=(*tuned.decisions, decision)
    )
