"""Leader election by Lease: one holder, takeover by the local clock, and release."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import virtual_time
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic.exceptions import NotFoundError
from one_lease import OneLease, a_conflict
from trimtab_operator.kube.client import Cluster
from trimtab_operator.kube.leader_election import (
    ATTEMPT_TIMEOUT_SECONDS,
    LEASE_SECONDS,
    RENEW_SECONDS,
    LeaderLease,
    ObservedLease,
)


def a_candidate(server: OneLease, identity: str, **options: Any) -> LeaderLease:
    return LeaderLease(cast("Cluster", server), namespace="n", name="l", identity=identity, **options)


async def test_first_candidate_leads_second_waits() -> None:
    server = OneLease()
    first, second = a_candidate(server, "a"), a_candidate(server, "b")
    assert await first.try_acquire() == "a"
    assert await second.try_acquire() == "a"
    assert await first.try_acquire() == "a"
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 0


class Counting(OneLease):
    """API server that counts its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        self.asked.append("get")
        return await super().get(kind, namespace, name)

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.asked.append("put")
        return await super().replace(manifest)


async def test_renewal_is_one_request_without_conflict() -> None:
    server = Counting()
    lease, other = a_candidate(server, "a"), a_candidate(server, "b")
    await lease.try_acquire()
    server.asked.clear()
    for _ in range(3):
        assert await lease.try_acquire() == "a"
    assert server.asked == ["put"] * 3
    assert server.lease is not None
    server._store(server.lease)  # an external change of its labels
    assert await lease.try_acquire() == "a"
    assert server.asked[3:] == ["put", "get", "put"]
    server.lease["spec"]["holderIdentity"] = ""
    server._store(server.lease)
    assert await other.try_acquire() == "b"
    server.asked.clear()
    assert await lease.try_acquire() == "b"
    assert server.asked == ["put", "get"]


async def test_deleted_lease_is_recreated() -> None:
    class Gone(OneLease):
        async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
            if self.lease is None:
                response = ApiException(status=404, reason="Not Found")
                response.headers = {}
                make: Callable[[ApiException], Exception] = NotFoundError  # the client library is untyped
                raise make(response)
            return await super().replace(manifest)

    server = Gone()
    lease = a_candidate(server, "a")
    await lease.try_acquire()
    server.lease = None
    assert await lease.try_acquire() == "a"
    assert server.lease is not None


async def test_released_lease_is_acquired_at_once() -> None:
    server = OneLease()
    first, second = a_candidate(server, "a"), a_candidate(server, "b")
    await first.try_acquire()
    await first.release()
    assert await second.try_acquire() == "b"
    assert await first.try_acquire() == "b"
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 1


async def test_release_survives_late_renewal() -> None:
    class Overtaken(OneLease):
        """A cancelled renewal takes effect just before the next write."""

        is_late = False

        async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
            if self.is_late:
                assert self.lease is not None
                self.is_late = False
                self._store(self.lease)
                raise a_conflict()
            return await super().replace(manifest)

    server = Overtaken()
    lease = a_candidate(server, "a")
    await lease.try_acquire()
    server.is_late = True
    await lease.release()
    assert not lease.is_held
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == ""


def test_release_times_out() -> None:
    async def silence() -> float:
        server = FaultyLease(random.Random(1), badness=0.0)
        lease = a_candidate(server, "a")
        await lease.try_acquire()
        server.is_gone = True
        since = asyncio.get_running_loop().time()
        await lease.release()
        return asyncio.get_running_loop().time() - since

    assert virtual_time.run(silence()) <= ATTEMPT_TIMEOUT_SECONDS


def test_lease_expires_by_local_clock() -> None:
    lease: dict[str, Any] = {
        "metadata": {"resourceVersion": "1"},
        "spec": {"holderIdentity": "a", "leaseDurationSeconds": 15},
    }
    sighting = ObservedLease()
    assert not sighting.is_expired(lease, now=1000.0)
    assert not sighting.is_expired(lease, now=1000.0 + LEASE_SECONDS)
    assert sighting.is_expired(lease, now=1001.0 + LEASE_SECONDS)
    lease["metadata"]["resourceVersion"] = "2"
    assert not sighting.is_expired(lease, now=1001.0 + LEASE_SECONDS)


# --- faults of the API server, in virtual time ------------------------------------------------------------------------


class FaultyLease(OneLease):
    """API server that is slow, hangs, or fails before or after the operation, with probability `chance`."""

    def __init__(self, chance: random.Random, badness: float) -> None:
        super().__init__()
        self.chance, self.badness = chance, badness
        self.is_gone = False

    async def _trouble(self) -> None:
        if self.is_gone:
            await asyncio.sleep(1e6)
        if self.chance.random() < self.badness:
            await asyncio.sleep(self.chance.choice((0.5, 3.0, 8.0, 29.0)))
            if self.chance.random() < 0.5:
                raise OSError("no route")

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        await self._trouble()
        found = await super().get(kind, namespace, name)
        await self._trouble()
        return found

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        await self._trouble()
        if self.lease is not None:
            raise a_conflict()
        made = await super().create(manifest)
        await self._trouble()
        return made

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
        await self._trouble()
        made = await super().replace(manifest)
        await self._trouble()
        return made


async def leads(lease: LeaderLease, held: list[tuple[float, float]], stop_at: float) -> None:
    """Lead repeatedly, like restarting pods; record the intervals."""
    now = asyncio.get_running_loop().time
    while now() < stop_at:
        await lease.acquire()
        since = now()
        await lease.renew_until_lost()
        held.append((since, now()))
        await asyncio.sleep(1.0)


@pytest.mark.parametrize("seed", range(20))
def test_never_two_leaders_under_api_faults(seed: int) -> None:
    async def contest() -> list[tuple[float, float]]:
        chance = random.Random(seed)
        server = FaultyLease(chance, badness=chance.choice((0.05, 0.3, 0.6)))
        held: list[tuple[float, float]] = []
        candidates = [leads(a_candidate(server, name), held, 1800.0) for name in ("a", "b", "c")]
        tasks = [asyncio.create_task(candidate) for candidate in candidates]
        await asyncio.wait(tasks, timeout=1800.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return held

    held = sorted(virtual_time.run(contest()))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(held)), held


def test_partitioned_leader_stops_before_takeover() -> None:
    async def silence() -> float:
        server = FaultyLease(random.Random(1), badness=0.0)
        lease = a_candidate(server, "a")
        await lease.acquire()
        keeping = asyncio.create_task(lease.renew_until_lost())
        await asyncio.sleep(7.0)
        server.is_gone = True
        since = asyncio.get_running_loop().time()
        await keeping
        assert not lease.is_held
        return asyncio.get_running_loop().time() - since

    assert virtual_time.run(silence()) <= RENEW_SECONDS


def test_blocked_leader_is_replaced_after_expiry() -> None:
    async def blocked() -> tuple[float, bool]:
        server, now = OneLease(), asyncio.get_running_loop().time
        may_renew = [True]
        first = a_candidate(server, "a", may_renew=lambda: may_renew[0])
        await first.acquire()
        keeping = asyncio.create_task(first.renew_until_lost())
        for may_renew[0] in [False, True] * 20:
            await asyncio.sleep(RENEW_SECONDS / 2)
        was_held = first.is_held
        may_renew[0] = False
        since = now()
        second = asyncio.create_task(a_candidate(server, "b").acquire())
        await keeping
        assert now() - since <= RENEW_SECONDS
        assert not second.done(), "there are two leaders"
        await second
        return now() - since, was_held

    took, was_held = virtual_time.run(blocked())
    assert was_held
    assert took <= FAILOVER_SECONDS - START_SECONDS


FAILOVER_SECONDS = 20.0  # from the end of the leader to the first tick of the next
START_SECONDS = 2.0  # of these, for the watches of the one that takes over


@pytest.mark.parametrize("seed", range(20))
def test_killed_leader_is_replaced_within_20_seconds(seed: int) -> None:
    """The API server takes up to half a second per response."""

    async def failover() -> float:
        chance = random.Random(seed)
        server = SlowLease(chance, longest=0.5)
        now = asyncio.get_running_loop().time
        first = a_candidate(server, "a")
        await first.acquire()
        keeping = asyncio.create_task(first.renew_until_lost())
        await asyncio.sleep(chance.uniform(0.0, 3.0))
        second = asyncio.create_task(a_candidate(server, "b").acquire())
        await asyncio.sleep(chance.uniform(5.0, 30.0))
        keeping.cancel()
        killed = now()
        await second
        return now() - killed

    assert virtual_time.run(failover()) <= FAILOVER_SECONDS - START_SECONDS


class SlowLease(OneLease):
    """API server with slow responses."""

    def __init__(self, chance: random.Random, *, longest: float) -> None:
        super().__init__()
        self.chance, self.longest = chance, longest

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        await asyncio.sleep(self.chance.uniform(0.0, self.longest))
        return await super().get(kind, namespace, name)

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(self.chance.uniform(0.0, self.longest))
        return await super().replace(manifest)


def test_suspended_leader_notices_expiry_at_once() -> None:
    """SIGSTOP: the clock went on, so `is_held` is False before the next write."""

    async def frozen() -> None:
        lease = a_candidate(FaultyLease(random.Random(1), badness=0.0), "a")
        await lease.acquire()
        assert lease.is_held
        await asyncio.sleep(30.0)
        assert not lease.is_held

    virtual_time.run(frozen())
