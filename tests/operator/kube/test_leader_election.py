"""Leader by Lease: one holds it, others wait for its end by their own clock, and it can be given back."""

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
from trimtab_operator.kube.leader_election import ATTEMPT_SECONDS, LEASE_SECONDS, RENEW_SECONDS, LeaderLease, Sighting


def a_candidate(server: OneLease, identity: str, **options: Any) -> LeaderLease:
    return LeaderLease(cast("Cluster", server), namespace="n", name="l", identity=identity, **options)


async def test_the_first_one_leads_and_renews_and_the_second_stands_by() -> None:
    server = OneLease()
    first, second = a_candidate(server, "a"), a_candidate(server, "b")
    assert await first.attempt() == "a"
    assert await second.attempt() == "a"
    assert await first.attempt() == "a"
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 0


class Counting(OneLease):
    """Notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        self.asked.append("get")
        return await super().get(kind, namespace, name)

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.asked.append("put")
        return await super().replace(manifest)


async def test_who_leads_renews_by_one_request_and_reads_only_after_somebody_else_wrote() -> None:
    server = Counting()
    lease, other = a_candidate(server, "a"), a_candidate(server, "b")
    await lease.attempt()
    server.asked.clear()
    for _ in range(3):
        assert await lease.attempt() == "a"
    assert server.asked == ["put"] * 3
    assert server.lease is not None
    server._store(server.lease)  # somebody labels it
    assert await lease.attempt() == "a"
    assert server.asked[3:] == ["put", "get", "put"]
    server.lease["spec"]["holderIdentity"] = ""
    server._store(server.lease)
    assert await other.attempt() == "b"
    server.asked.clear()
    assert await lease.attempt() == "b"
    assert server.asked == ["put", "get"]


async def test_a_lease_that_somebody_deleted_is_made_again() -> None:
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
    await lease.attempt()
    server.lease = None
    assert await lease.attempt() == "a"
    assert server.lease is not None


async def test_a_lease_that_was_given_back_is_taken_at_once() -> None:
    server = OneLease()
    first, second = a_candidate(server, "a"), a_candidate(server, "b")
    await first.attempt()
    await first.release()
    assert await second.attempt() == "b"
    assert await first.attempt() == "b"
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 1


async def test_a_lease_that_a_late_renewal_changes_while_it_is_given_back_is_given_back() -> None:
    class Overtaken(OneLease):
        """A renewal that was given up is carried out after all, just before the next write."""

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
    await lease.attempt()
    server.is_late = True
    await lease.release()
    assert not lease.is_held
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == ""


def test_giving_a_lease_back_waits_for_no_api_server_that_says_nothing() -> None:
    async def silence() -> float:
        server = FaultyLease(random.Random(1), badness=0.0)
        lease = a_candidate(server, "a")
        await lease.attempt()
        server.is_gone = True
        since = asyncio.get_running_loop().time()
        await lease.release()
        return asyncio.get_running_loop().time() - since

    assert virtual_time.run(silence()) <= ATTEMPT_SECONDS


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


# --- faults of the API server, in virtual time ------------------------------------------------------------------------


class FaultyLease(OneLease):
    """An API server that is slow, hangs, or fails before or after it did what it was asked, by `chance`."""

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
    """Lead again and again, as pods that restart do; note from when to when."""
    now = asyncio.get_running_loop().time
    while now() < stop_at:
        await lease.acquire()
        since = now()
        await lease.keep()
        held.append((since, now()))
        await asyncio.sleep(1.0)


@pytest.mark.parametrize("seed", range(20))
def test_two_never_lead_at_once_whatever_the_api_server_does(seed: int) -> None:
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


def test_a_leader_that_hears_nothing_any_more_stops_before_others_may_start() -> None:
    async def silence() -> float:
        server = FaultyLease(random.Random(1), badness=0.0)
        lease = a_candidate(server, "a")
        await lease.acquire()
        keeping = asyncio.create_task(lease.keep())
        await asyncio.sleep(7.0)
        server.is_gone = True
        since = asyncio.get_running_loop().time()
        await keeping
        assert not lease.is_held
        return asyncio.get_running_loop().time() - since

    assert virtual_time.run(silence()) <= RENEW_SECONDS


def test_a_leader_that_may_not_renew_for_a_while_leads_on_and_one_that_may_not_any_more_is_followed() -> None:
    async def blocked() -> tuple[float, bool]:
        server, now = OneLease(), asyncio.get_running_loop().time
        may_renew = [True]
        first = a_candidate(server, "a", may_renew=lambda: may_renew[0])
        await first.acquire()
        keeping = asyncio.create_task(first.keep())
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


FAILOVER_SECONDS = 20.0  # from the leader's end to the first turn of another
START_SECONDS = 2.0  # of these, for the watches of the one that takes over


@pytest.mark.parametrize("seed", range(20))
def test_a_leader_that_is_killed_at_any_moment_is_followed_within_20_seconds(seed: int) -> None:
    """By an API server that takes up to half a second for each answer."""

    async def failover() -> float:
        chance = random.Random(seed)
        server = SlowLease(chance, longest=0.5)
        now = asyncio.get_running_loop().time
        first = a_candidate(server, "a")
        await first.acquire()
        keeping = asyncio.create_task(first.keep())
        await asyncio.sleep(chance.uniform(0.0, 3.0))
        second = asyncio.create_task(a_candidate(server, "b").acquire())
        await asyncio.sleep(chance.uniform(5.0, 30.0))
        keeping.cancel()
        killed = now()
        await second
        return now() - killed

    assert virtual_time.run(failover()) <= FAILOVER_SECONDS - START_SECONDS


class SlowLease(OneLease):
    """An API server that needs some time for every answer."""

    def __init__(self, chance: random.Random, *, longest: float) -> None:
        super().__init__()
        self.chance, self.longest = chance, longest

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        await asyncio.sleep(self.chance.uniform(0.0, self.longest))
        return await super().get(kind, namespace, name)

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(self.chance.uniform(0.0, self.longest))
        return await super().replace(manifest)


def test_a_leader_that_was_stopped_for_long_knows_at_once_that_it_leads_no_more() -> None:
    """SIGSTOP: its own clock went on, and whoever asks before a write is told."""

    async def frozen() -> None:
        lease = a_candidate(FaultyLease(random.Random(1), badness=0.0), "a")
        await lease.acquire()
        assert lease.is_held
        await asyncio.sleep(30.0)
        assert not lease.is_held

    virtual_time.run(frozen())
