"""Execution of a reconcile plan against the API server and the engines.

Order: urgent deletes, state, children, engines, Events, status. State is written before it is acted on. An object that
the API server rejects stops only the actions that depend on it; all rejections are returned. An API server that is
unavailable stops the iteration. This module contains no decisions. Writes are counted, so that tests and dashboards can
verify that an idle loop writes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kubernetes.aio.dynamic.exceptions import NotFoundError

from trimtab_operator.engines.admin_client import Patched
from trimtab_operator.engines.poller import EnginePoller, PatchAnswer
from trimtab_operator.errors import Gone, NameTaken, NotLeading, NotYet
from trimtab_operator.kube.client import API_ERRORS, Cluster, is_invalid, is_unavailable
from trimtab_operator.kube.leader_election import CONNECTION_ERRORS
from trimtab_operator.kube.rbac import missing_permission
from trimtab_operator.observed.actions import (
    Action,
    Apply,
    Delete,
    Event,
    Patch,
    Rejection,
    depends_on,
    event_of,
    kind_and_name,
    merge_events,
)
from trimtab_operator.planning.plan import ReconcilePlan
from trimtab_operator.planning.snapshot import ClusterSnapshot
from trimtab_operator.planning.status_inputs import StatusInputs
from trimtab_operator.reconcile.health import OperatorMetrics
from trimtab_operator.report.conditions import changed_conditions, without_foreign_conditions
from trimtab_operator.report.status import build_status, status_without_observation
from trimtab_operator.resource.spec import KIND, InferenceDeployment
from trimtab_operator.tuner.moves import Decision

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """Applied actions, and actions that the API server rejected."""

    done: tuple[Action, ...] = ()
    rejections: tuple[Rejection, ...] = ()

    def __add__(self, other: ExecutionResult) -> ExecutionResult:
        return ExecutionResult((*self.done, *other.done), (*self.rejections, *other.rejections))


@dataclass(frozen=True, slots=True)
class Executor:
    """Executor shared by all reconcile loops."""

    cluster: Cluster
    metrics: OperatorMetrics
    clock: Callable[[], float]
    is_leading: Callable[[], bool] = lambda: True
    _pruned_status: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = field(default_factory=dict)
    """The last status that the API server pruned, and its pruned form, by resource uid: an older CRD does not know all
    fields."""

    def _require_leadership(self) -> None:
        """Check the Lease before a new action starts. Writes already in progress are stopped by `Cluster` and
        `EnginePoller`.

        Raises:
            NotLeading: Another process may hold the Lease.
        """
        if not self.is_leading():
            raise NotLeading("the Lease expired; another process may lead now")

    async def persist_state(self, snapshot: ClusterSnapshot, plan: ReconcilePlan) -> ExecutionResult:
        """Apply the urgent deletes, then write the new reconciler state. The caller may adopt the state afterwards."""
        names, share = (snapshot.deployment.namespace, snapshot.deployment.name), plan.status_inputs.share
        self.metrics.desired_replicas.labels(*names).set(plan.desired_replicas)
        self.metrics.wanted_replicas.labels(*names).set(plan.desired_replicas if share is None else share.wanted)
        return await self.execute(snapshot.deployment, (*plan.urgent_deletes, *plan.state_writes))

    async def apply(
        self, snapshot: ClusterSnapshot, plan: ReconcilePlan, engines: EnginePoller, before: ExecutionResult
    ) -> ExecutionResult:
        """Apply the children, then patch the engines. `before` is the result of `persist_state`, which is included in
        the returned one. Rejected children do not prevent the patches, unless a patch needs state that was rejected.
        """
        deployment = snapshot.deployment
        result = before + await self.execute(deployment, plan.children, before.rejections)

        async def on_answer(order: Patch, answer: PatchAnswer) -> None:
            with suppress(NotLeading):  # the response may arrive long after the tick
                await self._report_patch_result(deployment, order, answer)

        self._require_leadership()
        patches: Iterable[Patch] = plan.patches
        if any(kind_and_name(rejected.action)[0] == "ConfigMap" for rejected in before.rejections):
            patches = [patch for one in plan.patches if (patch := one.without_state) is not None]
        await engines.patch(patches, snapshot.tokens, on_answer)
        return result

    async def update_status(
        self,
        snapshot: ClusterSnapshot,
        plan: ReconcilePlan,
        done: Iterable[Action],
        *,
        is_status_due: bool = True,
    ) -> Mapping[str, Any]:
        """Emit decisions and the Events of the actions that are `done`, and write the status if `is_status_due`. Return
        the status.
        """
        deployment = snapshot.deployment
        for decision in plan.decisions:
            await self._emit_decision(deployment, decision)
        for event in merge_events(
            (*plan.events, *(event for action in done if (event := event_of(action)) is not None))
        ):
            await self.emit_event(deployment, event)
        status = build_status(deployment, plan.status_inputs, now=self._now())
        return await self._write_status(deployment, status) if is_status_due else status

    async def execute(
        self, deployment: InferenceDeployment, actions: Iterable[Action], rejected: Iterable[Rejection] = ()
    ) -> ExecutionResult:
        """Apply actions in order, except actions that depend on a rejected one. `rejected` holds earlier rejections.

        Raises:
            Exception: The API server is unavailable, or another process leads.
        """
        done: list[Action] = []
        rejections: list[Rejection] = []
        for action in actions:
            if any(depends_on(action, other.action) for other in (*rejected, *rejections)):
                continue
            self._require_leadership()
            try:
                is_done = await self._execute(deployment, action)
            except (*API_ERRORS, NameTaken, NotYet) as error:
                if is_unavailable(error):
                    raise
                rejections.append(Rejection(action, error))
                self.metrics.reconcile_errors.labels(error=type(error).__name__).inc()
                kind, name = kind_and_name(action)
                resource = f"{deployment.namespace}/{deployment.name}"
                extra = {"resource": resource, "kind": kind, "child": name, "error": format_error(error)}
                logger.warning("the API server rejected an object", extra=extra)
                continue
            if is_done:
                done.append(action)
        return ExecutionResult(tuple(done), tuple(rejections))

    async def _execute(self, deployment: InferenceDeployment, action: Action) -> bool:
        """Apply one action. Return False if a PodDisruptionBudget blocks it."""
        if isinstance(action, Apply):
            await self._apply(deployment, action)
            verb = "apply"
        else:
            verb = "delete"
            if not await self._delete(deployment, action):
                return False
        kind, name = kind_and_name(action)
        self.metrics.writes.labels(verb=verb, kind=kind).inc()
        resource = f"{deployment.namespace}/{deployment.name}"
        logger.info(verb, extra={"resource": resource, "kind": kind, "child": name, "reason": action.reason})
        return True

    async def _delete(self, deployment: InferenceDeployment, action: Delete) -> bool:
        """Delete or evict. Return False if the PodDisruptionBudget blocks it; the next reconcile retries."""
        namespace = deployment.namespace
        if action.budget is None:
            await self.cluster.delete(
                action.kind, namespace, action.name, uid=action.uid, grace_seconds=action.grace_seconds
            )
            return True
        is_evicted = await self.cluster.evict(namespace, action.name, uid=action.uid, budget=action.budget)
        self.metrics.evictions.labels(result="done" if is_evicted else "blocked").inc()
        if is_evicted:
            return True
        extra = {"resource": f"{namespace}/{deployment.name}", "child": action.name, "budget": action.budget}
        logger.info("eviction blocked by the PodDisruptionBudget", extra=extra)
        return False

    async def _apply(self, deployment: InferenceDeployment, action: Apply) -> None:
        try:
            await self.cluster.apply(action.manifest, deployment, is_new=action.is_new)
        except API_ERRORS as error:
            if action.fallback is None or not is_invalid(error):
                raise
            await self.cluster.apply(action.fallback, deployment, is_new=action.is_new)

    async def write_status(self, deployment: InferenceDeployment, status_inputs: StatusInputs) -> Mapping[str, Any]:
        """Write the status if it changed, and emit an Event for each important condition change."""
        return await self._write_status(deployment, build_status(deployment, status_inputs, now=self._now()))

    async def write_error_status(self, deployment: InferenceDeployment, problem: tuple[str, str]) -> None:
        """Write the problem into the status when the cluster could not be observed."""
        await self._write_status(deployment, status_without_observation(deployment, problem, now=self._now()))

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self.clock(), UTC)

    async def _write_status(self, deployment: InferenceDeployment, status: dict[str, Any]) -> Mapping[str, Any]:
        self.metrics.conditions.set(deployment.namespace, deployment.name, status["conditions"])
        if status == self.last_status(deployment):
            return status
        self._require_leadership()
        try:
            kept = without_foreign_conditions(await self.cluster.apply_status(deployment, status))
        except NotFoundError as error:
            raise Gone from error
        self._pruned_status.pop(deployment.uid, None)
        if kept != status:
            self._pruned_status[deployment.uid] = status, kept
        self.metrics.writes.labels(verb="apply_status", kind=KIND).inc()
        for condition in changed_conditions(deployment.status, status, ("Ready", "Degraded")):
            if condition["status"] == "True":
                kind = "Normal" if condition["type"] == "Ready" else "Warning"
                key = f"{condition['type']}{condition['lastTransitionTime']}"
                await self.emit_event(deployment, Event(kind, condition["reason"], condition["message"], key))
        return status

    def last_status(self, deployment: InferenceDeployment) -> Mapping[str, Any]:
        """Return the last status this process wrote, even if the API server pruned unknown fields from it."""
        stands = without_foreign_conditions(deployment.status)
        said, kept = self._pruned_status.get(deployment.uid, (stands, stands))
        return said if kept == stands else stands

    def forget(self, uid: str) -> None:
        """Drop the state of a resource that no loop serves any more."""
        self._pruned_status.pop(uid, None)

    async def emit_event(self, deployment: InferenceDeployment, event: Event) -> None:
        """Emit an Event. Events are best effort: a failed write is logged."""
        self._require_leadership()
        self.metrics.events.labels(reason=event.reason).inc()
        try:
            await self.cluster.event(
                deployment, kind=event.type, reason=event.reason, message=event.message, now=self._now(), key=event.key
            )
        except CONNECTION_ERRORS as error:
            logger.warning("Event could not be written", extra={"reason": event.reason, "error": format_error(error)})

    async def _emit_decision(self, deployment: InferenceDeployment, decision: Decision) -> None:
        """Emit a decision as one Event, one log line and one metric, with the id that status.tuning.history shows."""
        mode, move = deployment.spec.tuning.mode, decision.move
        knob = move.target.value
        self.metrics.decisions.labels(
            namespace=deployment.namespace, name=deployment.name, knob=knob, reason=decision.reason.value, mode=mode
        ).inc()
        logger.info(
            decision.sentence,
            extra={
                "resource": f"{deployment.namespace}/{deployment.name}",
                "decision": decision.id,
                "reason": decision.reason.value,
                "knob": knob,
                "from": move.before,
                "to": move.after,
                "mode": mode,
            },
        )
        message = f"{decision.sentence} [decision {decision.id}]"
        await self.emit_event(deployment, Event("Normal", decision.reason.value, message, decision.id))

    async def _report_patch_result(self, deployment: InferenceDeployment, order: Patch, answer: PatchAnswer) -> None:
        """Log an engine's response to a patch. A rejected patch is also emitted as an Event, and the next iteration
        retries it.
        """
        values = {str(name): value for name, value in order.fields.items()}
        resource = f"{deployment.namespace}/{deployment.name}"
        extra = {"resource": resource, "group": order.target.group, "values": values}
        if isinstance(answer, Patched):
            logger.info("engine patched", extra={**extra, "step": answer.applied_at_step})
            return
        logger.warning("engine rejected a patch", extra={**extra, "answer": answer.message})
        message = f"{order.target.group}: the engine rejected {values}: {answer.message}"
        await self.emit_event(deployment, Event("Warning", "PatchRejected", message))


def format_error(error: BaseException) -> str:
    """Return an error as one line: the missing permission, or the API server's message if there is one, or the error
    text.
    """
    permission = missing_permission(error)
    if permission is not None:
        return f"the operator has no permission to {permission}; add it to its role (the chart's roles have it)"
    summary = getattr(error, "summary", None)
    text = str(summary()) if callable(summary) else str(error)
    return " ".join((text or type(error).__name__).split())[:1000]
