"""One loop per resource: read → validate → plan → apply → tune → status → wait for a wake-up or the next tick.

The decisions are elsewhere and pure; this module carries values between them and the edges. A tick that fails is
logged, shown in the status when it keeps failing, and tried again; it never ends the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import httpx
from kubernetes.aio.dynamic.exceptions import NotFoundError

from trimtab_operator.actions import Action, Apply
from trimtab_operator.admin_token import admin_token, token_hash
from trimtab_operator.bounded_http import pod_url
from trimtab_operator.cluster import API_ERRORS, Cluster
from trimtab_operator.conditions import Facts, Reason, TuningView, changed_conditions
from trimtab_operator.engine_client import EngineClient, Layout, Patched
from trimtab_operator.errors import InvalidSpec, NameTaken
from trimtab_operator.groups import Group, Observed, groups_of, is_terminating
from trimtab_operator.health import Heartbeats, OperatorMetrics
from trimtab_operator.incarnation import learned, torn
from trimtab_operator.lease import CONNECTION_ERRORS
from trimtab_operator.loop_view import LoopMemory, facts_of_cluster, revision_wanted, target_of, view_of
from trimtab_operator.metrics import ADMIN_PORT, GroupObservation, Target, observe
from trimtab_operator.model_facts import gate_of, plan_facts
from trimtab_operator.node_gpus import gpu_for, too_few_gpus
from trimtab_operator.nodes import Nodes
from trimtab_operator.plan import plan, plan_tuning_state
from trimtab_operator.refusal import Refusal
from trimtab_operator.rollback import (
    Course,
    RolloutState,
    course_of,
    plan_rollout_state,
    proven_deployment,
    stored_rollout,
)
from trimtab_operator.spec import KIND, InferenceDeployment, ModelSource, Spec
from trimtab_operator.status import status_of
from trimtab_operator.tuner import Decision, Mode, Pace, TickResult, tick
from trimtab_operator.tuning import settings_of, stored_state
from trimtab_operator.upkeep import upkeep
from trimtab_operator.validation import refusals
from trimtab_operator.wake_ups import WakeUps

logger = logging.getLogger(__name__)

BUSY_TICK_SECONDS = 5.0  # while something moves: load progress and readiness should show soon
TICK_DEADLINE_SECONDS = 120.0  # a tick that takes longer hangs; it is abandoned and begun anew
MAX_BACKOFF_SECONDS = 60.0  # between ticks that fail
FAILURES_TO_SHOW = 3  # in a row, before the status says so: one lost connection is no news
GATHER_SECONDS = 0.2  # wake-ups come in bursts: one tick serves all


class Gone(Exception):
    """The resource was deleted, or another one has its name: this loop has nothing left to do."""


LEFT_AS_THEY_ARE = Course(RolloutState(), None)  # of a refused spec nothing is rendered; its pods are cared for


@dataclass(frozen=True, slots=True)
class Reconciler:
    """What all loops share."""

    cluster: Cluster
    nodes: Nodes
    http: httpx.AsyncClient
    secret: bytes
    default_image: str | None
    tick_seconds: float
    heartbeats: Heartbeats
    metrics: OperatorMetrics
    wake_ups: WakeUps
    clock: Callable[[], float] = time.time

    async def run(self, namespace: str, name: str, uid: str) -> None:
        """Serve one resource until it is gone."""
        key = f"{namespace}/{name}"
        memory = LoopMemory()
        alarm = self.wake_ups.of(namespace, name)
        try:
            while True:
                alarm.clear()
                self.heartbeats.beat(key)
                delay = await self._guarded_tick(namespace, name, uid, memory)
                await _wait(alarm, delay)
        except Gone:
            self.metrics.desired_replicas.remove(namespace, name)
            logger.info("resource is gone; its children follow by ownership", extra={"resource": key})
        finally:
            self.heartbeats.forget(key)
            self.wake_ups.forget(namespace, name, alarm)

    async def _guarded_tick(self, namespace: str, name: str, uid: str, memory: LoopMemory) -> float:
        """One tick; seconds until the next. Errors end here."""
        try:
            with self.metrics.reconcile_seconds.time():
                async with asyncio.timeout(TICK_DEADLINE_SECONDS):
                    delay = await self.tick(namespace, name, uid, memory)
            memory.failures = 0
        except Gone:
            raise
        except Exception as error:
            memory.failures += 1
            self.metrics.reconcile_errors.labels(error=type(error).__name__).inc()
            is_expected = isinstance(error, (*CONNECTION_ERRORS, NameTaken))
            logger.log(
                logging.WARNING if is_expected else logging.ERROR,
                "tick failed",
                extra={"resource": f"{namespace}/{name}", "error": _one_line(error), "failures": memory.failures},
                exc_info=None if is_expected else error,
            )
            await self._show_failure(namespace, name, uid, error, memory)
            return float(min(MAX_BACKOFF_SECONDS, BUSY_TICK_SECONDS * 2 ** min(memory.failures - 1, 6)))
        return delay

    async def _show_failure(self, namespace: str, name: str, uid: str, error: Exception, memory: LoopMemory) -> None:
        """Say in the status why nothing moves: at once when the user must act, else when it keeps failing."""
        if not isinstance(error, NameTaken) and memory.failures < FAILURES_TO_SHOW:
            return
        reason = Reason.NAME_TAKEN if isinstance(error, NameTaken) else Reason.RECONCILE_ERROR
        try:
            deployment = await self._read(namespace, name, uid)
            observed = await self.cluster.observe(deployment)
            facts = facts_of_cluster(deployment, observed, self._token(deployment))
            await self._write_status(deployment, replace(facts, problem=(reason, _one_line(error))))
        except Exception as second:  # whatever failed once may fail here again; the loop must go on
            logger.warning(
                "the failure could not be shown",
                extra={"resource": f"{namespace}/{name}", "error": _one_line(second)},
            )

    # --- one tick -----------------------------------------------------------------------------------------------------

    async def tick(self, namespace: str, name: str, uid: str, memory: LoopMemory) -> float:
        """Bring the resource one step nearer to what is wanted; seconds until the next tick."""
        try:
            deployment = await self._read(namespace, name, uid)
            refused = refusals(deployment)
        except InvalidSpec as error:
            deployment = await self._read_unparsed(namespace, name, uid)
            refused = (Refusal("spec", str(error)),)
        token = self._token(deployment)
        observed = await self._observe(deployment, memory)
        if refused:
            await self._execute(deployment, await self._due(deployment, observed, token, LEFT_AS_THEY_ARE))
            facts = replace(facts_of_cluster(deployment, observed, token, renders=False), refusals=refused)
            await self._write_status(deployment, facts)
            return self.tick_seconds
        self.metrics.desired_replicas.labels(namespace=namespace, name=name).set(deployment.replicas)
        unread: Exception | None = None
        try:
            if await self._execute(deployment, plan_facts(deployment, observed, now=self.clock())):
                observed = await self._observe(deployment, memory)
        except (*API_ERRORS, NameTaken) as error:
            unread = error  # a quota, a policy, a name: engines that run need no reader, and are cared for first
        nodes = await self.nodes.present() if deployment.spec.runtime.device == "cuda" else None
        gpu = gpu_for(deployment, nodes or ())
        revision = revision_wanted(deployment, token)
        is_proven = self._proven_revision(deployment, observed, token, memory) == revision
        gate = gate_of(deployment, observed, revision=revision, gpu=gpu, is_proven=is_proven)
        if gate.refusals:
            await self._execute(deployment, await self._due(deployment, observed, token, LEFT_AS_THEY_ARE))
            facts = replace(facts_of_cluster(deployment, observed, token, renders=False), refusals=gate.refusals)
            await self._write_status(deployment, replace(facts, layout_refusals=gate.refusals))
            return self.tick_seconds
        course = await self._choose_course(deployment, observed, token, memory, may_start=gate.is_open)
        if await self._execute(deployment, await self._due(deployment, observed, token, course)):
            observed = await self._observe(deployment, memory)
        facts = await self._tune(deployment, course.target or deployment, observed, token, memory)
        facts = replace(facts, model=None if gate.is_open else gate.model, failed_change=course.failed)
        facts = replace(facts, target=course.target, too_few_gpus=too_few_gpus(deployment, nodes))
        status = await self._write_status(deployment, facts)
        if unread is not None:
            raise unread
        return BUSY_TICK_SECONDS if _is_moving(status) else self.tick_seconds

    def _proven_revision(
        self, deployment: InferenceDeployment, observed: Observed, token: str, memory: LoopMemory
    ) -> str | None:
        """What the last form that came up renders to."""
        if memory.rollout is None:
            memory.rollout = stored_rollout(deployment, observed, key=token)
        proven = memory.rollout.proven
        before = None if proven is None else proven_deployment(deployment, proven)
        return None if before is None else revision_wanted(before, token)

    async def _choose_course(
        self, deployment: InferenceDeployment, observed: Observed, token: str, memory: LoopMemory, *, may_start: bool
    ) -> Course:
        """What replicas are to run; remembered before it is acted upon."""
        groups = groups_of(observed)
        await self._learn_layouts(groups, token, memory)
        course = course_of(
            memory.rollout or RolloutState(),
            deployment,
            groups,
            memory.layouts_of(groups),
            may_start=may_start,
            render=lambda rendered: revision_wanted(rendered, token),
            now=self.clock(),
        )
        await self._execute(deployment, plan_rollout_state(deployment, observed, course.state, key=token))
        memory.rollout = course.state
        return course

    async def _observe(self, deployment: InferenceDeployment, memory: LoopMemory) -> Observed:
        """The children, and what is known of them from before."""
        observed = await self.cluster.observe(deployment)
        groups = groups_of(observed)
        memory.incarnations = learned(groups, memory.incarnations)
        return replace(observed, torn=torn(groups, memory.incarnations))

    async def _due(
        self, deployment: InferenceDeployment, observed: Observed, token: str, course: Course
    ) -> tuple[Action, ...]:
        """What the groups need, and what makes them as wanted."""
        care = await upkeep(self.cluster, self.nodes, observed, now=datetime.fromtimestamp(self.clock(), UTC))
        for note in care.notes:
            if course.target is None and note.reason == "GaveBack":
                continue  # that is done by rendering, and nothing is rendered now
            await self._event(deployment, "Warning", note.reason, note.message, note.key)
        if course.target is None:
            return care.deletions
        token_sha256 = token_hash(token)
        wanted = plan(
            course.target, observed, admin_token_sha256=token_sha256, held=care.held, unproven=course.unproven
        )
        return (*care.deletions, *wanted)

    async def _read(self, namespace: str, name: str, uid: str) -> InferenceDeployment:
        """The resource as it is now. Raises Gone, or InvalidSpec."""
        return InferenceDeployment.parse(await self._body(namespace, name, uid), default_image=self.default_image)

    async def _read_unparsed(self, namespace: str, name: str, uid: str) -> InferenceDeployment:
        """The resource with an empty spec, when its own cannot be read: enough to say so in its status."""
        body = await self._body(namespace, name, uid)
        parsed = InferenceDeployment.parse({**body, "spec": {"model": {"uri": "file:///"}}})
        count = (body.get("spec") or {}).get("replicas")
        spec = Spec(model=ModelSource(uri="file:///"), replicas=count if isinstance(count, int) else None)
        return replace(parsed, spec=spec)

    async def _body(self, namespace: str, name: str, uid: str) -> Mapping[str, Any]:
        body = await self.cluster.get(KIND, namespace, name)
        if body is None or body["metadata"]["uid"] != uid or is_terminating(body):
            raise Gone
        return body

    def _token(self, deployment: InferenceDeployment) -> str:
        return admin_token(self.secret, deployment.uid)

    async def _execute(self, deployment: InferenceDeployment, actions: tuple[Action, ...]) -> bool:
        """Carry the plan out; whether there was anything to do."""
        for action in actions:
            if isinstance(action, Apply):
                manifest = action.manifest
                await self.cluster.apply(manifest, deployment, is_new=action.is_new)
                self._log_write(deployment, "apply", manifest["kind"], manifest["metadata"]["name"], action.reason)
                if manifest["kind"] == "StatefulSet":
                    await self._event_of_replica(deployment, action)
            else:
                await self.cluster.delete(
                    action.kind, deployment.namespace, action.name, uid=action.uid, grace_seconds=action.grace_seconds
                )
                self._log_write(deployment, "delete", action.kind, action.name, action.reason)
                if action.kind == "StatefulSet":
                    await self._event(
                        deployment, "Normal", "ReplicaRemoved", f"{action.name}: {action.reason}; it drains", action.uid
                    )
        return bool(actions)

    async def _event_of_replica(self, deployment: InferenceDeployment, action: Apply) -> None:
        name = action.manifest["metadata"]["name"]
        if action.is_new:
            await self._event(deployment, "Normal", "ReplicaCreated", f"{name} was created")
        else:
            await self._event(
                deployment, "Normal", "ReplicaUpdated", f"{name} was brought back in line: {action.reason}"
            )

    def _log_write(self, deployment: InferenceDeployment, verb: str, kind: str, name: str, reason: str) -> None:
        self.metrics.writes.labels(verb=verb, kind=kind).inc()
        resource = f"{deployment.namespace}/{deployment.name}"
        logger.info(verb, extra={"resource": resource, "kind": kind, "child": name, "reason": reason})

    # --- tuning -------------------------------------------------------------------------------------------------------

    async def _tune(
        self,
        deployment: InferenceDeployment,
        target: InferenceDeployment,
        observed: Observed,
        token: str,
        memory: LoopMemory,
    ) -> Facts:
        """Read, decide, remember, say so, act: in this order, so that a crash in between loses nothing.

        Starts and bounds are those of what runs (`target`); the mode is always the owner's latest word.
        """
        facts = facts_of_cluster(deployment, observed, token)
        targets = [target_of(group) for group in facts.groups]
        seen = {o.reading.group: o for o in await observe(targets, http=self.http, token=token, clock=self.clock)}
        await self._learn_layouts(facts.groups, token, memory)
        if memory.tuner is None:
            memory.tuner = stored_state(deployment, observed.config_maps)
        readings = [observation.reading for observation in seen.values()]
        pace = Pace.for_tick(self.tick_seconds)
        settings = replace(settings_of(target.spec), mode=Mode(deployment.spec.tuning.mode), pace=pace)
        result = tick(memory.tuner, readings, settings, self.clock())
        await self._execute(deployment, plan_tuning_state(deployment, observed, result.state.to_json()))
        memory.tuner = result.state  # only now: a decision that could not be written is made again, and told
        for decision in result.decisions:
            await self._announce(deployment, decision)
        await self._patch_engines(deployment, targets, seen, result, token)
        views = {group.name: view_of(group, seen[group.name], memory) for group in facts.groups}
        tuning = TuningView(
            result.metrics_available, result.tuning_active, result.applied, result.history, result.recommendation
        )
        return replace(facts, engines=views, tuning=tuning if facts.groups else None)

    async def _learn_layouts(self, groups: tuple[Group, ...], token: str, memory: LoopMemory) -> None:
        """Ask each engine once what really runs; forget those that are gone."""
        ready = {str(g.leader["metadata"]["uid"]): g for g in groups if g.leader is not None and g.is_ready}
        memory.layouts = {uid: layout for uid, layout in memory.layouts.items() if uid in ready}
        for uid, group in ready.items():
            address = target_of(group).address
            if uid not in memory.layouts and address is not None:
                layout = await EngineClient(self.http, pod_url(address, ADMIN_PORT), token).layout()
                if isinstance(layout, Layout):
                    memory.layouts[uid] = layout.degrees()

    async def _announce(self, deployment: InferenceDeployment, decision: Decision) -> None:
        """One decision: one Event, one log line, one metric, all with the id that status.tuning.history shows."""
        mode, knob = deployment.spec.tuning.mode, decision.knob.value if decision.knob else "none"
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
                "from": decision.before,
                "to": decision.after,
                "mode": mode,
            },
        )
        await self._event(
            deployment, "Normal", decision.reason.value, f"{decision.sentence} [decision {decision.id}]", decision.id
        )

    async def _patch_engines(
        self,
        deployment: InferenceDeployment,
        targets: list[Target],
        seen: Mapping[str, GroupObservation],
        result: TickResult,
        token: str,
    ) -> None:
        """Bring every engine that answers to the applied values; who refuses is tried again on the next tick."""
        addresses = {target.group: target.address for target in targets}
        for patch in result.patches:
            address, config = addresses.get(patch.group), seen[patch.group].config
            if address is None or config is None:
                continue
            client = EngineClient(self.http, pod_url(address, ADMIN_PORT), token)
            answer = await client.patch(patch.fields, if_match=config.generation)
            values = {str(knob.value): value for knob, value in patch.fields.items()}
            resource = f"{deployment.namespace}/{deployment.name}"
            extra = {"resource": resource, "group": patch.group, "values": values}
            if isinstance(answer, Patched):
                logger.info("engine patched", extra={**extra, "step": answer.applied_at_step})
                continue
            logger.warning("engine refused a patch", extra={**extra, "answer": answer.message})
            message = f"{patch.group} did not take {values}: {answer.message}"
            await self._event(deployment, "Warning", "PatchRefused", message)

    # --- status and events --------------------------------------------------------------------------------------------

    async def _write_status(self, deployment: InferenceDeployment, facts: Facts) -> dict[str, Any]:
        """Write the status if it says something new, and an Event for each turn that matters."""
        now = datetime.fromtimestamp(self.clock(), UTC)
        status = status_of(deployment, facts, now=now)
        if status == deployment.status:
            return status
        try:
            await self.cluster.apply_status(deployment, status)
        except NotFoundError as error:
            raise Gone from error
        self.metrics.writes.labels(verb="apply_status", kind=KIND).inc()
        for condition in changed_conditions(deployment.status, status, ("Ready", "Degraded")):
            if condition["status"] == "True":
                kind = "Normal" if condition["type"] == "Ready" else "Warning"
                key = f"{condition['type']}{condition['lastTransitionTime']}"
                await self._event(deployment, kind, condition["reason"], condition["message"], key)
        return status

    async def _event(
        self, deployment: InferenceDeployment, kind: str, reason: str, message: str, key: str = ""
    ) -> None:
        """Events are told, not relied upon: one that cannot be written is logged."""
        now = datetime.fromtimestamp(self.clock(), UTC)
        try:
            await self.cluster.event(deployment, kind=kind, reason=reason, message=message, now=now, key=key)
        except CONNECTION_ERRORS as error:
            logger.warning("event not written", extra={"reason": reason, "error": _one_line(error)})


def _is_moving(status: Mapping[str, Any]) -> bool:
    by_type = {c["type"]: c for c in status["conditions"]}
    return bool(by_type["Progressing"]["status"] == "True" or by_type["TuningActive"]["reason"] == "NotYetApplied")


async def _wait(alarm: asyncio.Event, seconds: float) -> None:
    """Until the alarm rings or time is up. Rings come in bursts: the burst is let pass."""
    try:
        async with asyncio.timeout(seconds):
            await alarm.wait()
    except TimeoutError:
        return
    await asyncio.sleep(GATHER_SECONDS)


def _one_line(error: BaseException) -> str:
    """The API server's own words where there are some, else the error, on one line."""
    summary = getattr(error, "summary", None)
    text = str(summary()) if callable(summary) else str(error)
    return " ".join((text or type(error).__name__).split())[:1000]
