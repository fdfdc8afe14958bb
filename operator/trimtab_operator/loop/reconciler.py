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

from trimtab_operator.builders.admin_token import admin_token, token_hash
from trimtab_operator.decisions.actions import Action
from trimtab_operator.decisions.model_facts import Gate, gate_of, plan_facts
from trimtab_operator.decisions.plan import plan
from trimtab_operator.decisions.rollback import (
    Course,
    RolloutState,
    course_of,
    plan_rollout_state,
    proven_deployment,
    stored_rollout,
)
from trimtab_operator.decisions.validation import refusals
from trimtab_operator.edge.cluster import API_ERRORS, Cluster
from trimtab_operator.edge.health import Heartbeats, OperatorMetrics
from trimtab_operator.edge.lease import CONNECTION_ERRORS
from trimtab_operator.edge.nodes import Nodes
from trimtab_operator.errors import Gone, InvalidSpec, NameTaken
from trimtab_operator.layout.node_gpus import gpu_for, too_few_gpus
from trimtab_operator.loop.engine_tuning import EngineTuning
from trimtab_operator.loop.upkeep import refused_creations, upkeep
from trimtab_operator.loop.view import LoopMemory, facts_of_cluster, revision_wanted
from trimtab_operator.loop.wake_ups import WakeUps
from trimtab_operator.loop.writer import Writer, one_line
from trimtab_operator.observed.groups import Observed, groups_of, is_terminating
from trimtab_operator.observed.missing_pods import missing_pods, wants_words, with_words
from trimtab_operator.observed.shared_engine import learned, torn
from trimtab_operator.report.conditions import Reason
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.refusal import Refusal
from trimtab_operator.resource.spec import KIND, InferenceDeployment, ModelSource, Spec

logger = logging.getLogger(__name__)

BUSY_TICK_SECONDS = 5.0  # while something moves: load progress and readiness should show soon
TICK_DEADLINE_SECONDS = 120.0  # a tick that takes longer hangs; it is abandoned and begun anew
MAX_BACKOFF_SECONDS = 60.0  # between ticks that fail
FAILURES_TO_SHOW = 3  # in a row, before the status says so: one lost connection is no news
GATHER_SECONDS = 0.2  # wake-ups come in bursts: one tick serves all

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

    @property
    def _writer(self) -> Writer:
        return Writer(self.cluster, self.metrics, self.clock)

    @property
    def _tuning(self) -> EngineTuning:
        return EngineTuning(self.http, self._writer, self.metrics, self.tick_seconds, self.clock)

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
                extra={"resource": f"{namespace}/{name}", "error": one_line(error), "failures": memory.failures},
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
            await self._writer.write_status(deployment, replace(facts, problem=(reason, one_line(error))))
        except Exception as second:  # whatever failed once may fail here again; the loop must go on
            logger.warning(
                "the failure could not be shown",
                extra={"resource": f"{namespace}/{name}", "error": one_line(second)},
            )

    # --- one tick -----------------------------------------------------------------------------------------------------

    async def tick(self, namespace: str, name: str, uid: str, memory: LoopMemory) -> float:
        """Bring the resource one step nearer to what is wanted; seconds until the next tick."""
        deployment, refused = await self._judged(namespace, name, uid)
        token = self._token(deployment)
        observed = await self._observe(deployment, memory)
        if refused:
            return await self._refuse(deployment, observed, token, refused)
        self.metrics.desired_replicas.labels(namespace=namespace, name=name).set(deployment.replicas)
        unread: Exception | None = None
        try:
            if await self._writer.execute(deployment, plan_facts(deployment, observed, now=self.clock())):
                observed = await self._observe(deployment, memory)
        except (*API_ERRORS, NameTaken) as error:
            unread = error  # a quota, a policy, a name: engines that run need no reader, and are cared for first
        nodes = await self.nodes.present() if deployment.spec.runtime.device == "cuda" else None
        gate = self._gate(deployment, observed, token, memory, nodes)
        if gate.refusals:
            return await self._refuse(deployment, observed, token, gate.refusals, of_layout=gate.refusals)
        course = await self._choose_course(deployment, observed, token, memory, may_start=gate.is_open)
        if await self._writer.execute(deployment, await self._due(deployment, observed, token, course)):
            observed = await self._observe(deployment, memory)
        facts = await self._tuning.tune(deployment, course.target or deployment, observed, token, memory)
        facts = replace(facts, model=None if gate.is_open else gate.model, failed_change=course.failed)
        facts = replace(facts, target=course.target, too_few_gpus=too_few_gpus(deployment, nodes))
        status = await self._writer.write_status(deployment, facts)
        if unread is not None:
            raise unread
        return BUSY_TICK_SECONDS if _is_moving(status) else self.tick_seconds

    async def _judged(self, namespace: str, name: str, uid: str) -> tuple[InferenceDeployment, tuple[Refusal, ...]]:
        """The resource, and everything that is wrong with it."""
        try:
            deployment = await self._read(namespace, name, uid)
            return deployment, refusals(deployment)
        except InvalidSpec as error:
            return await self._read_unparsed(namespace, name, uid), (Refusal("spec", str(error)),)

    async def _refuse(
        self,
        deployment: InferenceDeployment,
        observed: Observed,
        token: str,
        refused: tuple[Refusal, ...],
        *,
        of_layout: tuple[Refusal, ...] = (),
    ) -> float:
        """Say what is wrong. What runs is cared for, and otherwise left as it is."""
        await self._writer.execute(deployment, await self._due(deployment, observed, token, LEFT_AS_THEY_ARE))
        facts = facts_of_cluster(deployment, observed, token, renders=False)
        await self._writer.write_status(deployment, replace(facts, refusals=refused, layout_refusals=of_layout))
        return self.tick_seconds

    def _gate(
        self,
        deployment: InferenceDeployment,
        observed: Observed,
        token: str,
        memory: LoopMemory,
        nodes: tuple[Manifest, ...] | None,
    ) -> Gate:
        """Whether engines may be started or changed."""
        revision = revision_wanted(deployment, token)
        proven = self._remembered_rollout(deployment, observed, token, memory).proven
        before = None if proven is None else proven_deployment(deployment, proven)
        is_proven = before is not None and revision_wanted(before, token) == revision
        gpu = gpu_for(deployment, nodes or ())
        return gate_of(deployment, observed, revision=revision, gpu=gpu, is_proven=is_proven)

    def _remembered_rollout(
        self, deployment: InferenceDeployment, observed: Observed, token: str, memory: LoopMemory
    ) -> RolloutState:
        """As of the last tick; of the first one, what the ConfigMap says."""
        if memory.rollout is None:
            memory.rollout = stored_rollout(deployment, observed, key=token)
        return memory.rollout

    async def _choose_course(
        self, deployment: InferenceDeployment, observed: Observed, token: str, memory: LoopMemory, *, may_start: bool
    ) -> Course:
        """What replicas are to run; remembered before it is acted upon."""
        groups = groups_of(observed)
        await self._tuning.learn_layouts(groups, token, memory)
        course = course_of(
            self._remembered_rollout(deployment, observed, token, memory),
            deployment,
            groups,
            memory.layouts_of(groups),
            may_start=may_start,
            render=lambda rendered: revision_wanted(rendered, token),
            now=self.clock(),
        )
        await self._writer.execute(deployment, plan_rollout_state(deployment, observed, course.state, key=token))
        memory.rollout = course.state
        return course

    async def _observe(self, deployment: InferenceDeployment, memory: LoopMemory) -> Observed:
        """The children, and what is known of them from before."""
        observed, now = await self.cluster.observe(deployment), self.clock()
        groups = groups_of(observed)
        memory.incarnations = learned(groups, memory.incarnations, now=now)
        memory.missing = missing_pods(groups, memory.missing, now=now)
        if any(wants_words(missing, now=now) for missing in memory.missing.values()):
            events = await refused_creations(self.cluster, deployment.namespace)
            memory.missing = with_words(groups, memory.missing, events, now=now)
        return replace(observed, torn=torn(groups, memory.incarnations), missing=memory.missing)

    async def _due(
        self, deployment: InferenceDeployment, observed: Observed, token: str, course: Course
    ) -> tuple[Action, ...]:
        """What the groups need, and what makes them as wanted."""
        now = datetime.fromtimestamp(self.clock(), UTC)
        target = course.target
        asked = None if target is None else f"{deployment.generation}-{revision_wanted(target, token)}"
        care = await upkeep(self.cluster, self.nodes, observed, now=now, asked=asked)
        for note in care.notes:
            if target is None and note.reason == "GaveBack":
                continue  # that is done by rendering, and nothing is rendered now
            await self._writer.event(deployment, "Warning", note.reason, note.message, note.key)
        if target is None:
            return care.deletions
        token_sha256 = token_hash(token)
        wanted = plan(target, observed, admin_token_sha256=token_sha256, held=care.held, unproven=course.unproven)
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
