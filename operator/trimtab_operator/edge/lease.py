"""Leader by Lease: one operator works, others stand by. Why our own: docs/decisions/leader-lease.md.

A holder that cannot renew in time must stop before anybody else may start: `held` ends RENEW_SECONDS after the last
renewal, others take over LEASE_SECONDS after the last renewal that they saw, by their own clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
from kubernetes.aio.dynamic.exceptions import ConflictError

from trimtab_operator.edge.cluster import API_ERRORS, Cluster

logger = logging.getLogger(__name__)

LEASE_SECONDS = 15  # as kube-controller-manager: how long a dead leader keeps others waiting
RENEW_SECONDS = 10.0  # a leader that has not renewed for so long stops
RETRY_SECONDS = 2.0  # between attempts
CONNECTION_ERRORS = (*API_ERRORS, aiohttp.ClientError, OSError, TimeoutError)


@dataclass(slots=True)
class Sighting:
    """The Lease as it was last seen changing, by our monotonic clock: others' clocks may be wrong."""

    version: str = ""
    at: float = 0.0

    def is_expired(self, lease: Mapping[str, Any], *, now: float) -> bool:
        """Whether the holder has given up or has not renewed for the duration that the Lease states."""
        version = str(lease["metadata"].get("resourceVersion", ""))
        if version != self.version:
            self.version, self.at = version, now
        spec = lease.get("spec") or {}
        return not spec.get("holderIdentity") or now - self.at > int(spec.get("leaseDurationSeconds") or LEASE_SECONDS)


class LeaderLease:
    """Acquire, keep and give back one Lease."""

    def __init__(self, cluster: Cluster, *, namespace: str, name: str, identity: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._sighting = Sighting()

    async def acquire(self) -> None:
        """Return once we hold the Lease. Trouble with the API server is waited out."""
        waiting_for = ""
        while True:
            try:
                holder = await self.attempt()
            except CONNECTION_ERRORS as error:
                holder = f"the API server ({error})"
            if holder == self._identity:
                return
            if holder != waiting_for:
                logger.info("standing by", extra={"leader": holder})
                waiting_for = holder
            await asyncio.sleep(RETRY_SECONDS)

    async def keep(self) -> None:
        """Renew until that fails for too long or somebody else holds the Lease; then return: stop working at once."""
        renewed = time.monotonic()
        while time.monotonic() - renewed < RENEW_SECONDS:
            await asyncio.sleep(RETRY_SECONDS)
            try:
                async with asyncio.timeout(RENEW_SECONDS / 2):
                    holder = await self.attempt()
            except CONNECTION_ERRORS as error:
                logger.warning("the Lease could not be renewed", extra={"error": str(error)})
                continue
            if holder != self._identity:
                logger.error("the Lease was taken", extra={"leader": holder})
                return
            renewed = time.monotonic()

    async def attempt(self) -> str:
        """Try once to hold or renew; the holder's identity, which may be ours."""
        lease = await self._cluster.get("Lease", self._namespace, self._name)
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        try:
            if lease is None:
                await self._cluster.create(self._body(now, acquired=now, transitions=0))
                return self._identity
            spec = lease.get("spec") or {}
            is_ours = spec.get("holderIdentity") == self._identity
            if not is_ours and not self._sighting.is_expired(lease, now=time.monotonic()):
                return str(spec["holderIdentity"])
            acquired = spec.get("acquireTime") or now if is_ours else now
            transitions = int(spec.get("leaseTransitions") or 0) + (not is_ours)
            body = self._body(now, acquired=acquired, transitions=transitions)
            body["metadata"]["resourceVersion"] = lease["metadata"]["resourceVersion"]
            await self._cluster.replace(body)
        except ConflictError:
            return "another candidate"
        return self._identity

    async def release(self) -> None:
        """Give the Lease back, so that the next one need not wait. Best effort: it expires anyway."""
        try:
            lease = await self._cluster.get("Lease", self._namespace, self._name)
            if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                lease["spec"]["leaseDurationSeconds"] = 1
                lease.update(apiVersion="coordination.k8s.io/v1", kind="Lease")
                await self._cluster.replace(lease)
        except CONNECTION_ERRORS as error:
            logger.warning("the Lease could not be given back", extra={"error": str(error)})

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
