"""Leader by Lease: one operator works, others stand by. Why our own: ADR-0004.

A holder that cannot renew in time must stop before anybody else may start. It counts RENEW_SECONDS from the moment at
which it *began* its last renewal that succeeded; others take over LEASE_SECONDS after they saw that renewal, which is
later, by their own clock. `is_held` says at any moment whether writing is allowed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
from kubernetes.aio.dynamic.exceptions import ConflictError, NotFoundError

from trimtab_operator.kube.client import API_ERRORS, Cluster

logger = logging.getLogger(__name__)

LEASE_SECONDS = 15  # as kube-controller-manager: how long a dead leader keeps others waiting
RENEW_SECONDS = 10.0  # a leader that has not renewed for so long stops
RETRY_SECONDS = 2.0  # between attempts
ATTEMPT_SECONDS = 5.0  # for one: a leader has time for a second
PAST_THE_END_SECONDS = 0.05  # a Lease is taken once its time is over, not when it is
CONNECTION_ERRORS = (*API_ERRORS, aiohttp.ClientError, OSError, TimeoutError)


@dataclass(slots=True)
class Sighting:
    """The Lease as it was last seen changing, by our monotonic clock: others' clocks may be wrong."""

    version: str = ""
    at: float = 0.0
    seconds: float = LEASE_SECONDS
    """How long it counts from then on."""

    def is_expired(self, lease: Mapping[str, Any], *, now: float) -> bool:
        """Whether the holder has given up or has not renewed for the duration that the Lease states."""
        version = str(lease["metadata"].get("resourceVersion", ""))
        if version != self.version:
            self.version, self.at = version, now
        spec = lease.get("spec") or {}
        self.seconds = float(spec.get("leaseDurationSeconds") or LEASE_SECONDS)
        return not spec.get("holderIdentity") or now - self.at > self.seconds

    def pause(self, *, now: float) -> float:
        """How long to wait until it is worth looking again: to the moment at which it may be ours, if that is near."""
        left = self.at + self.seconds - now
        return min(RETRY_SECONDS, left + PAST_THE_END_SECONDS) if left > 0 else RETRY_SECONDS


class LeaderLease:
    """Acquire, keep and give back one Lease. Who leads renews it only while it `may_renew`: while it does its work."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        name: str,
        identity: str,
        may_renew: Callable[[], bool] = lambda: True,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._may_renew = may_renew
        self._sighting = Sighting()
        self._held_until = 0.0
        self._renewed: Mapping[str, Any] | None = None
        """The Lease as we wrote it last; None where somebody may have written it since."""

    @property
    def is_held(self) -> bool:
        """Whether we lead now. A process that was stopped for long is told so at once: its clock went on."""
        return _now() < self._held_until

    async def acquire(self) -> None:
        """Return once we hold the Lease. Trouble with the API server is waited out."""
        waiting_for = ""
        while True:
            try:
                async with asyncio.timeout(ATTEMPT_SECONDS):
                    holder = await self.attempt()
            except CONNECTION_ERRORS as error:
                holder = f"the API server ({error})"
            if self.is_held:
                return
            if holder != waiting_for:
                logger.info("standing by", extra={"leader": holder})
                waiting_for = holder
            await asyncio.sleep(self._sighting.pause(now=_now()))

    async def keep(self) -> None:
        """Renew until that fails for too long or somebody else holds the Lease; then return: stop working at once."""
        while self.is_held:
            try:
                async with asyncio.timeout_at(self._held_until):
                    await asyncio.sleep(RETRY_SECONDS)
                    if not self._may_renew():
                        logger.warning("the Lease is not renewed: what it is held for stands still")
                        continue
                    async with asyncio.timeout(ATTEMPT_SECONDS):
                        holder = await self.attempt()
            except CONNECTION_ERRORS as error:
                logger.warning("the Lease could not be renewed", extra={"error": str(error) or "timeout"})
                continue
            if holder != self._identity:
                logger.error("the Lease was taken", extra={"leader": holder})
                self._held_until = 0.0

    async def attempt(self) -> str:
        """Try once to hold or renew; the holder's identity, which may be ours. What we wrote last is written again
        without reading it: whoever wrote since makes that a conflict."""
        began = _now()
        known, self._renewed = self._renewed, None
        if known is not None:
            with suppress(ConflictError, NotFoundError):
                return await self._write(known, began)
        lease = await self._cluster.get("Lease", self._namespace, self._name)
        if lease is not None and not self._is_ours(lease) and not self._sighting.is_expired(lease, now=_now()):
            return str(lease["spec"]["holderIdentity"])
        try:
            return await self._write(lease, began)
        except ConflictError:
            return "another candidate"

    async def _write(self, before: Mapping[str, Any] | None, began: float) -> str:
        """Make the Lease ours from now on, if it still is as it was known before; our identity. Raises ConflictError,
        and NotFoundError where it is gone by now."""
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        if before is None:
            self._renewed = await self._cluster.create(self._body(now, acquired=now, transitions=0))
        else:
            spec, is_ours = before.get("spec") or {}, self._is_ours(before)
            acquired = spec.get("acquireTime") or now if is_ours else now
            transitions = int(spec.get("leaseTransitions") or 0) + (not is_ours)
            body = self._body(now, acquired=acquired, transitions=transitions)
            body["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
            self._renewed = await self._cluster.replace(body)
        self._held_until = began + RENEW_SECONDS
        return self._identity

    def _is_ours(self, lease: Mapping[str, Any]) -> bool:
        return bool((lease.get("spec") or {}).get("holderIdentity") == self._identity)

    async def release(self) -> None:
        """Give the Lease back, so that the next one need not wait. Best effort: it expires anyway."""
        self._held_until, self._renewed = 0.0, None
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS):
                try:
                    await self._give_back()
                except ConflictError:  # a renewal that was given up came in between
                    await self._give_back()
        except CONNECTION_ERRORS as error:
            logger.warning("the Lease could not be given back", extra={"error": str(error) or "timeout"})

    async def _give_back(self) -> None:
        """Let nobody hold the Lease, if it is ours."""
        lease = await self._cluster.get("Lease", self._namespace, self._name)
        if lease is not None and self._is_ours(lease):
            lease["spec"]["holderIdentity"] = ""
            lease["spec"]["leaseDurationSeconds"] = 1
            lease.update(apiVersion="coordination.k8s.io/v1", kind="Lease")
            await self._cluster.replace(lease)

    def _body(self, now: str, *, acquired: str, transitions: int) -> dict[str, Any]:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": LEASE_SECONDS,
                "acquireTime": acquired,
                "renewTime": now,
                "leaseTransitions": transitions,
            },
        }


def _now() -> float:
    """The event loop's clock: monotonic, and virtual in tests."""
    return asyncio.get_running_loop().time()
