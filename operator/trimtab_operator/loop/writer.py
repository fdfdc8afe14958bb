"""The hands of a loop: carries actions out at the API server, and tells of them by log line, metric, Event and status.

No rule lives here. What is written is counted, so that an idle loop can be seen to write nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kubernetes.aio.dynamic.exceptions import NotFoundError

from trimtab_operator.decisions.actions import Action, Apply
from trimtab_operator.edge.cluster import API_ERRORS, Cluster, is_invalid
from trimtab_operator.edge.health import OperatorMetrics
from trimtab_operator.edge.lease import CONNECTION_ERRORS
from trimtab_operator.errors import Gone
from trimtab_operator.report.conditions import Facts, changed_conditions
from trimtab_operator.report.status import status_of
from trimtab_operator.resource.spec import KIND, InferenceDeployment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes for all loops."""

    cluster: Cluster
    metrics: OperatorMetrics
    clock: Callable[[], float]

    async def execute(self, deployment: InferenceDeployment, actions: tuple[Action, ...]) -> bool:
        """Carry the plan out; whether there was anything to do."""
        for action in actions:
            if isinstance(action, Apply):
                manifest = action.manifest
                try:
                    await self.cluster.apply(manifest, deployment, is_new=action.is_new)
                except API_ERRORS as error:
                    if action.otherwise is None or not is_invalid(error):
                        raise
                    await self.cluster.apply(action.otherwise, deployment, is_new=action.is_new)
                self._log_write(deployment, "apply", manifest["kind"], manifest["metadata"]["name"], action.reason)
                if manifest["kind"] == "StatefulSet":
                    await self._event_of_replica(deployment, action)
            else:
                await self.cluster.delete(
                    action.kind, deployment.namespace, action.name, uid=action.uid, grace_seconds=action.grace_seconds
                )
                self._log_write(deployment, "delete", action.kind, action.name, action.reason)
                if action.kind == "StatefulSet":
                    await self.event(
                        deployment, "Normal", "ReplicaRemoved", f"{action.name}: {action.reason}; it drains", action.uid
                    )
        return bool(actions)

    async def _event_of_replica(self, deployment: InferenceDeployment, action: Apply) -> None:
        name = action.manifest["metadata"]["name"]
        if action.is_new:
            await self.event(deployment, "Normal", "ReplicaCreated", f"{name} was created")
        else:
            await self.event(
                deployment, "Normal", "ReplicaUpdated", f"{name} was brought back in line: {action.reason}"
            )

    def _log_write(self, deployment: InferenceDeployment, verb: str, kind: str, name: str, reason: str) -> None:
        self.metrics.writes.labels(verb=verb, kind=kind).inc()
        resource = f"{deployment.namespace}/{deployment.name}"
        logger.info(verb, extra={"resource": resource, "kind": kind, "child": name, "reason": reason})

    async def write_status(self, deployment: InferenceDeployment, facts: Facts) -> dict[str, Any]:
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
                await self.event(deployment, kind, condition["reason"], condition["message"], key)
        return status

    async def event(self, deployment: InferenceDeployment, kind: str, reason: str, message: str, key: str = "") -> None:
        """Events are told, not relied upon: one that cannot be written is logged."""
        now = datetime.fromtimestamp(self.clock(), UTC)
        try:
            await self.cluster.event(deployment, kind=kind, reason=reason, message=message, now=now, key=key)
        except CONNECTION_ERRORS as error:
            logger.warning("event not written", extra={"reason": reason, "error": one_line(error)})


def one_line(error: BaseException) -> str:
    """The API server's own words where there are some, else the error, on one line."""
    summary = getattr(error, "summary", None)
    text = str(summary()) if callable(summary) else str(error)
    return " ".join((text or type(error).__name__).split())[:1000]
