"""The hands of a loop: carry a turn out at the API server and the engines, and tell of it.

In this order: what must go in any case → what is remembered → children → engines → Events → status. What is remembered
is written before anything is done by it. No rule lives here. What is written is counted, so that an idle loop can be
seen to write nothing.
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
from trimtab_operator.engines.poller import Engines, PatchAnswer
from trimtab_operator.errors import Gone, NameTaken, NotLeading, NotYet
from trimtab_operator.kube.client import API_ERRORS, Cluster, is_invalid
from trimtab_operator.kube.leader_election import CONNECTION_ERRORS
from trimtab_operator.kube.rbac import missing_right
from trimtab_operator.observed.actions import Action, Apply, Delete, Event, Patch, event_of, merge_events
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
class Done:
    """What was carried out of a turn, and what kept the rest from it."""

    actions: tuple[Action, ...]
    refused: Exception | None


@dataclass(frozen=True, slots=True)
class Hands:
    """Act for all loops."""

    cluster: Cluster
    metrics: OperatorMetrics
    clock: Callable[[], float]
    is_leading: Callable[[], bool] = lambda: True
    _kept_of: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = field(default_factory=dict)
    """The last status that the API server did not keep as it was, and what it kept of it, by the uid of the resource:
    a CRD of an older version does not know all of its fields."""

    def _must_lead(self) -> None:
        """Raise NotLeading before anything is begun that is another process's by now. What is under way then is kept
        from writing by `Cluster` and `Engines`."""
        if not self.is_leading():
            raise NotLeading("the Lease has ended; another process acts now")

    async def persist_state(self, snapshot: ClusterSnapshot, plan: ReconcilePlan) -> None:
        """Take care of what cannot wait, then write down what the turn remembers. The memory may be adopted after."""
        names, share = (snapshot.deployment.namespace, snapshot.deployment.name), plan.status_inputs.share
        self.metrics.desired_replicas.labels(*names).set(plan.desired_replicas)
        self.metrics.wanted_replicas.labels(*names).set(plan.desired_replicas if share is None else share.wanted)
        await self.execute(snapshot.deployment, plan.urgent_deletes)
        await self.execute(snapshot.deployment, plan.state_writes)

    async def act(self, snapshot: ClusterSnapshot, plan: ReconcilePlan, engines: Engines) -> Done:
        """Do the rest. A child that is refused keeps no engine from its values."""
        deployment = snapshot.deployment
        refused: Exception | None = None
        done: list[Action] = []
        try:
            await self.execute(deployment, plan.children, done)
        except (*API_ERRORS, NameTaken, NotYet) as error:
            refused = error

        async def on_answer(order: Patch, answer: PatchAnswer) -> None:
            with suppress(NotLeading):  # it may come long after the tick
                await self._tell_answer(deployment, order, answer)

        self._must_lead()
        await engines.patch(plan.patches, snapshot.tokens, on_answer)
        return Done(tuple(done), refused)

    async def report(
        self, snapshot: ClusterSnapshot, plan: ReconcilePlan, done: Done, *, is_status_due: bool = True
    ) -> Mapping[str, Any]:
        """Tell of what was done; the status, which is written if `is_status_due`. A child that was refused keeps nobody
        from hearing of the others; the status is the caller's then. Raises what refused it."""
        deployment = snapshot.deployment
        for decision in plan.decisions:
            await self._announce(deployment, decision)
        for event in merge_events(
            (*plan.events, *(event for action in done.actions if (event := event_of(action)) is not None))
        ):
            await self.tell(deployment, event)
        if done.refused is not None:
            raise done.refused
        status = build_status(deployment, plan.status_inputs, now=self._now())
        return await self._write_status(deployment, status) if is_status_due else status

    async def execute(
        self, deployment: InferenceDeployment, actions: Iterable[Action], done: list[Action] | None = None
    ) -> None:
        """Carry actions out, one after the other; each that was is added to `done`."""
        for action in actions:
            self._must_lead()
            if isinstance(action, Apply):
                await self._apply(deployment, action)
                kind, name, verb = str(action.manifest["kind"]), str(action.manifest["metadata"]["name"]), "apply"
            else:
                kind, name, verb = action.kind, action.name, "delete"
                if not await self._delete(deployment, action):
                    continue
            self.metrics.writes.labels(verb=verb, kind=kind).inc()
            resource = f"{deployment.namespace}/{deployment.name}"
            logger.info(verb, extra={"resource": resource, "kind": kind, "child": name, "reason": action.reason})
            if done is not None:
                done.append(action)

    async def _delete(self, deployment: InferenceDeployment, action: Delete) -> bool:
        """Delete; whether it goes. What its budget does not let go now is decided again by the next look."""
        namespace = deployment.namespace
        if action.budget is None:
            await self.cluster.delete(
                action.kind, namespace, action.name, uid=action.uid, grace_seconds=action.grace_seconds
            )
            return True
        if await self.cluster.evict(namespace, action.name, uid=action.uid, budget=action.budget):
            return True
        extra = {"resource": f"{namespace}/{deployment.name}", "child": action.name, "budget": action.budget}
        logger.info("not evicted: the budget has nobody to spare", extra=extra)
        return False

    async def _apply(self, deployment: InferenceDeployment, action: Apply) -> None:
        try:
            await self.cluster.apply(action.manifest, deployment, is_new=action.is_new)
        except API_ERRORS as error:
            if action.fallback is None or not is_invalid(error):
                raise
            await self.cluster.apply(action.fallback, deployment, is_new=action.is_new)

    async def write_status(self, deployment: InferenceDeployment, status_inputs: StatusInputs) -> Mapping[str, Any]:
        """Write the status if it says something new, and an Event for each change that matters."""
        return await self._write_status(deployment, build_status(deployment, status_inputs, now=self._now()))

    async def write_in_the_dark(self, deployment: InferenceDeployment, problem: tuple[str, str]) -> None:
        """Write why nothing new can be said."""
        await self._write_status(deployment, status_without_observation(deployment, problem, now=self._now()))

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self.clock(), UTC)

    async def _write_status(self, deployment: InferenceDeployment, status: dict[str, Any]) -> Mapping[str, Any]:
        if status == self.said(deployment):
            return status
        self._must_lead()
        try:
            kept = without_foreign_conditions(await self.cluster.apply_status(deployment, status))
        except NotFoundError as error:
            raise Gone from error
        self._kept_of.pop(deployment.uid, None)
        if kept != status:
            self._kept_of[deployment.uid] = status, kept
        self.metrics.writes.labels(verb="apply_status", kind=KIND).inc()
        for condition in changed_conditions(deployment.status, status, ("Ready", "Degraded")):
            if condition["status"] == "True":
                kind = "Normal" if condition["type"] == "Ready" else "Warning"
                key = f"{condition['type']}{condition['lastTransitionTime']}"
                await self.tell(deployment, Event(kind, condition["reason"], condition["message"], key))
        return status

    def said(self, deployment: InferenceDeployment) -> Mapping[str, Any]:
        """What we said last of a resource: its status, or what the API server kept that of."""
        stands = without_foreign_conditions(deployment.status)
        said, kept = self._kept_of.get(deployment.uid, (stands, stands))
        return said if kept == stands else stands

    def forget(self, uid: str) -> None:
        """Drop what is known of a resource that no loop serves any more."""
        self._kept_of.pop(uid, None)

    async def tell(self, deployment: InferenceDeployment, event: Event) -> None:
        """Record an Event. Events are told, not relied upon: one that cannot be written is logged."""
        self._must_lead()
        try:
            await self.cluster.event(
                deployment, kind=event.type, reason=event.reason, message=event.message, now=self._now(), key=event.key
            )
        except CONNECTION_ERRORS as error:
            logger.warning("event not written", extra={"reason": event.reason, "error": one_line(error)})

    async def _announce(self, deployment: InferenceDeployment, decision: Decision) -> None:
        """Tell a decision as one Event, one log line and one metric, with the id that status.tuning.history shows."""
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
        await self.tell(deployment, Event("Normal", decision.reason.value, message, decision.id))

    async def _tell_answer(self, deployment: InferenceDeployment, order: Patch, answer: PatchAnswer) -> None:
        """Log what an engine said to a change; one that refuses is told, and tried again by the next turn."""
        values = {str(name): value for name, value in order.fields.items()}
        resource = f"{deployment.namespace}/{deployment.name}"
        extra = {"resource": resource, "group": order.target.group, "values": values}
        if isinstance(answer, Patched):
            logger.info("engine patched", extra={**extra, "step": answer.applied_at_step})
            return
        logger.warning("engine refused a patch", extra={**extra, "answer": answer.message})
        message = f"{order.target.group} did not take {values}: {answer.message}"
        await self.tell(deployment, Event("Warning", "PatchRefused", message))


def one_line(error: BaseException) -> str:
    """Which right is missing, or the API server's own words where there are some, else the error, on one line."""
    right = missing_right(error)
    if right is not None:
        return f"the operator has no right to {right}: its role lacks it; the chart's roles have it (rbac.create)"
    summary = getattr(error, "summary", None)
    text = str(summary()) if callable(summary) else str(error)
    return " ".join((text or type(error).__name__).split())[:1000]
