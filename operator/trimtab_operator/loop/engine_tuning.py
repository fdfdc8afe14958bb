"""The tuner at work in one tick: read the engines, decide, remember, say so, act.

What is decided is the tuner's (pure); this module carries values between it, the engines and the API server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import httpx

from trimtab_operator.decisions.plan import plan_tuning_state
from trimtab_operator.decisions.tuning import settings_of, stored_state
from trimtab_operator.edge.bounded_http import pod_url
from trimtab_operator.edge.engine_client import EngineClient, Layout, Patched
from trimtab_operator.edge.health import OperatorMetrics
from trimtab_operator.edge.metrics import ADMIN_PORT, GroupObservation, Target, observe
from trimtab_operator.loop.view import LoopMemory, facts_of_cluster, target_of, view_of
from trimtab_operator.loop.writer import Writer
from trimtab_operator.observed.groups import Group, Observed
from trimtab_operator.report.conditions import Facts, TuningView
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.tuner import Decision, Mode, Pace, TickResult, tick

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineTuning:
    """Tunes for all loops."""

    http: httpx.AsyncClient
    writer: Writer
    metrics: OperatorMetrics
    tick_seconds: float
    clock: Callable[[], float]

    async def tune(
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
        await self.learn_layouts(facts.groups, token, memory)
        if memory.tuner is None:
            memory.tuner = stored_state(deployment, observed.config_maps)
        readings = [observation.reading for observation in seen.values()]
        pace = Pace.for_tick(self.tick_seconds)
        settings = replace(settings_of(target.spec), mode=Mode(deployment.spec.tuning.mode), pace=pace)
        result = tick(memory.tuner, readings, settings, self.clock())
        await self.writer.execute(deployment, plan_tuning_state(deployment, observed, result.state.to_json()))
        memory.tuner = result.state  # only now: a decision that could not be written is made again, and told
        for decision in result.decisions:
            await self._announce(deployment, decision)
        await self._patch_engines(deployment, targets, seen, result, token)
        views = {group.name: view_of(group, seen[group.name], memory) for group in facts.groups}
        tuning = TuningView(
            result.metrics_available, result.tuning_active, result.applied, result.history, result.recommendation
        )
        return replace(facts, engines=views, tuning=tuning if facts.groups else None)

    async def learn_layouts(self, groups: tuple[Group, ...], token: str, memory: LoopMemory) -> None:
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
        await self.writer.event(
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
            await self.writer.event(deployment, "Warning", "PatchRefused", message)
