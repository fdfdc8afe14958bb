"""Leader by Lease: one holds it, others wait for its end by their own clock, and it can be given back."""

from __future__ import annotations

import copy
from typing import Any, cast

from trimtab_operator.edge.cluster import Cluster
from trimtab_operator.edge.lease import LEASE_SECONDS, LeaderLease, Sighting


class OneLease:
    """An API server that keeps one Lease and counts its versions."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0

    async def get(self, _kind: str, _namespace: str, _name: str) -> dict[str, Any] | None:
        return copy.deepcopy(self.lease)

    async def create(self, manifest: dict[str, Any]) -> None:
        assert self.lease is None
        self._store(manifest)

    async def replace(self, manifest: dict[str, Any]) -> None:
        assert manifest["metadata"]["resourceVersion"] == str(self.version)
        self._store(manifest)

    def _store(self, manifest: dict[str, Any]) -> None:
        self.version += 1
        self.lease = copy.deepcopy(manifest)
        self.lease["metadata"]["resourceVersion"] = str(self.version)


def a_candidate(server: OneLease, identity: str) -> LeaderLease:
    return LeaderLease(cast("Cluster", server), namespace="n", name="l", identity=identity)


async def test_the_first_one_leads_and_renews_and_the_second_stands_by() -> None:
    server = OneLease()
    first, second = a_candidate(server, "a"), a_candidate(server, "b")
    assert await first.attempt() == "a"
    assert await second.attempt() == "a"
    assert await first.attempt() == "a"
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 0


async def test_a_lease_that_was_given_back_is_taken_at_once() -> None:
    server = OneLease()
    first, second = a_candidate(server, "a"), a_candidate(server, "b")
    await first.attempt()
    await first.release()
    assert await second.attempt() == "b"
    assert await first.attempt() == "b"
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 1


def test_a_lease_expires_by_our_own_clock_after_it_was_last_seen_to_change() -> None:
    lease: dict[str, Any] = {
        "metadata": {"resourceVersion": "1"},
        "spec": {"holderIdentity": "a", "leaseDurationSeconds": 15},
    }
    sighting = Sighting()
    assert not sighting.is_expired(lease, now=1000.0)
    assert not sighting.is_expired(lease, now=1000.0 + LEASE_SECONDS)
    assert sighting.is_expired(lease, now=1001.0 + LEASE_SECONDS)
    lease["metadata"]["resourceVersion"] = "2"
    assert not sighting.is_expired(lease, now=1001.0 + LEASE_SECONDS)
