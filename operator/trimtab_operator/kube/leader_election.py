"""Leader election by Lease: one operator reconciles, the others are on standby. ADR-0004 explains why this is not a
library.

A holder that cannot renew in time must stop before another candidate may start. It counts RENEW_SECONDS from the moment
at which its last successful renewal *began*. Other candidates take over LEASE_SECONDS after they observed that renewal,
by their own clock, which is later. `is_held` is True while writing is allowed.
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

LEASE_SECONDS = 15  # as in kube-controller-manager: takeover time after a crash
RENEW_SECONDS = 10.0  # a leader without a renewal for this long stops
RETRY_SECONDS = 2.0  # between attempts
ATTEMPT_TIMEOUT_SECONDS = 5.0  # per attempt: leaves time for a second one
EXPIRY_MARGIN_SECONDS = 0.05  # a Lease may be taken only after its end
CONNECTION_ERRORS = (*API_ERRORS, aiohttp.ClientError, OSError, TimeoutError)


@dataclass(slots=True)
class ObservedLease:
    """Lease at its last observed change, by the local monotonic clock: other clocks may be wrong."""

    version: str = ""
    at: float = 0.0
    seconds: float = LEASE_SECONDS
    """Duration of the Lease, counted from `at`."""

    def is_expired(self, lease: Mapping[str, Any], *, now: float) -> bool:
        """Return True if the holder released the Lease or has not renewed it for the duration in the Lease."""
        version = str(lease["metadata"].get("resourceVersion", ""))
        if version != self.version:
            self.version, self.at = version, now
        spec = lease.get("spec") or {}
        self.seconds = float(spec.get("leaseDurationSeconds") or LEASE_SECONDS)
        return not spec.get("holderIdentity") or now - self.at > self.seconds

    def retry_delay(self, *, now: float) -> float:
        """Return the seconds until the next attempt: until the Lease expires if that is soon."""
        left = self.at + self.seconds - now
        return min(RETRY_SECONDS, left + EXPIRY_MARGIN_SECONDS) if left > 0 else RETRY_SECONDS


class LeaderLease:
    """Lease to acquire, renew and release. It is renewed only while `may_renew` returns True, which is while the
    leader makes progress.
    """

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
        self._observed_lease = ObservedLease()
        self._held_until = 0.0
        self._last_written: Mapping[str, Any] | None = None
        """The Lease as last written by this process. None if another process may have written it since."""

    @property
    def is_held(self) -> bool:
        """Return True if this process leads. A process that was suspended sees the loss at once, because its clock
        went on.
        """
        return _now() < self._held_until

    async def acquire(self) -> None:
        """Return when the Lease is held. API server errors are retried."""
        waiting_for = ""
        while True:
            try:
                async with asyncio.timeout(ATTEMPT_TIMEOUT_SECONDS):
                    holder = await self.try_acquire()
            except CONNECTION_ERRORS as error:
                holder = f"the API server ({error})"
            if self.is_held:
                return
            if holder != waiting_for:
                logger.info("waiting for the Lease", extra={"leader": holder})
                waiting_for = holder
            await asyncio.sleep(self._observed_lease.retry_delay(now=_now()))

    async def renew_until_lost(self) -> None:
        """Renew until that fails for RENEW_SECONDS or another process holds the Lease. The caller must then stop at
        once.
        """
        while self.is_held:
            try:
                async with asyncio.timeout_at(self._held_until):
                    await asyncio.sleep(RETRY_SECONDS)
                    if not self._may_renew():
                        logger.warning("the Lease is not renewed: the reconcile loops are blocked")
                        continue
                    async with asyncio.timeout(ATTEMPT_TIMEOUT_SECONDS):
                        holder = await self.try_acquire()
            except CONNECTION_ERRORS as error:
                logger.warning("the Lease could not be renewed", extra={"error": str(error) or "timeout"})
                continue
            if holder != self._identity:
                logger.error("the Lease was taken by another process", extra={"leader": holder})
                self._held_until = 0.0

    async def try_acquire(self) -> str:
        """Try once to acquire or renew. Return the holder's identity. A renewal writes the last known Lease without
        a read: a concurrent write makes it a conflict.
        """
        began = _now()
        known, self._last_written = self._last_written, None
        if known is not None:
            with suppress(ConflictError, NotFoundError):
                return await self._write(known, began)
        lease = await self._cluster.get("Lease", self._namespace, self._name)
        if lease is not None and not self._is_ours(lease) and not self._observed_lease.is_expired(lease, now=_now()):
            return str(lease["spec"]["holderIdentity"])
        try:
            return await self._write(lease, began)
        except ConflictError:
            return "another candidate"

    async def _write(self, before: Mapping[str, Any] | None, began: float) -> str:
        """Write the Lease with this process as holder if it is unchanged. Return this process's identity.

        Raises:
            ConflictError: Another process wrote it.
            NotFoundError: It was deleted.
        """
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        if before is None:
            self._last_written = await self._cluster.create(self._body(now, acquired=now, transitions=0))
        else:
            spec, is_ours = before.get("spec") or {}, self._is_ours(before)
            acquired = spec.get("acquireTime") or now if is_ours else now
            transitions = int(spec.get("leaseTransitions") or 0) + (not is_ours)
            body = self._body(now, acquired=acquired, transitions=transitions)
            body["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
            self._last_written = await self._cluster.replace(body)
        self._held_until = began + RENEW_SECONDS
        return self._identity

    def _is_ours(self, lease: Mapping[str, Any]) -> bool:
        return bool((lease.get("spec") or {}).get("holderIdentity") == self._identity)

    async def release(self) -> None:
        """Release the Lease, so that the next leader need not wait. Best effort: it expires anyway."""
        self._held_until, self._last_written = 0.0, None
        try:
            async with asyncio.timeout(ATTEMPT_TIMEOUT_SECONDS):
                try:
                    await self._clear_holder()
                except ConflictError:  # a cancelled renewal was written in between
                    await self._clear_holder()
        except CONNECTION_ERRORS as error:
            logger.warning("the Lease could not be released", extra={"error": str(error) or "timeout"})

    async def _clear_holder(self) -> None:
        """Clear the holder of the Lease if this process holds it."""
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
    """Return the time of the event loop's clock: monotonic, and virtual in tests."""
    return asyncio.get_running_loop().time()
