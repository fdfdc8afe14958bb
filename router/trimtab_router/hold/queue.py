"""The queue of held requests: strict priority bands, deficit round robin over tenants, an age guard and bounds.

Pure: no clock and no I/O. A tenant's requests stay in order. A request's cost, its uncached prompt tokens, is
known only when a replica is chosen, so it is charged afterwards: a tenant's deficit may become negative and is then
repaid.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile

QUANTUM_TOKENS = 2048
"""Credit of a tenant's turn: about one step's token budget, so that turns change at the rate of steps."""
MIN_COST_TOKENS = 256
"""Charge of a request whose prompt is cached: its answer still takes a share of every step."""
AGE_GUARD_SECONDS = 30.0
"""Age from which requests of a lower band are served too, so that no band starves."""
AGED_SHARE = 4
"""Every fourth request comes from the lowest band in which requests are older than AGE_GUARD_SECONDS."""


@dataclass(slots=True, eq=False)
class HeldRequest:
    """One request in the queue."""

    tenant: str
    priority: int
    """Band; lower bands are served first."""
    num_bytes: int
    """Memory that the request takes while it is held."""
    held_at: float
    """Monotonic seconds since which the request is held."""


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    requests: OrderedDict[int, HeldRequest] = field(default_factory=OrderedDict)
    """Requests by identity, oldest first."""
    num_bytes: int = 0
    deficit: float = 0.0


class _Band:
    """Requests of one priority."""

    __slots__ = ("num_requests", "tenants")

    def __init__(self) -> None:
        self.tenants: OrderedDict[str, _Tenant] = OrderedDict()
        """Tenants in the order of their turns; without requests only if their deficit is negative."""
        self.num_requests = 0

    def head(self) -> HeldRequest:
        """Return the next request; at least one must be held."""
        while True:
            for _ in range(len(self.tenants)):
                tenant = next(iter(self.tenants.values()))
                if tenant.deficit <= 0:
                    tenant.deficit += QUANTUM_TOKENS
                if tenant.deficit > 0 and tenant.requests:
                    return next(iter(tenant.requests.values()))
                if tenant.requests or tenant.deficit < 0:
                    self.tenants.move_to_end(tenant.name)
                else:
                    del self.tenants[tenant.name]
            self._skip_idle_rounds()

    def _skip_idle_rounds(self) -> None:
        """Add the quanta of the rounds in which no tenant could be served, which large debts would make many."""
        best = max(tenant.deficit for tenant in self.tenants.values() if tenant.requests)
        rounds = max(int(-best // QUANTUM_TOKENS), 0)
        for tenant in self.tenants.values():
            tenant.deficit += rounds * QUANTUM_TOKENS

    def oldest(self) -> float:
        """Return since when the oldest request has been held."""
        return min(next(iter(tenant.requests.values())).held_at for tenant in self.tenants.values() if tenant.requests)


class HoldQueue:
    """Held requests in the order of their service."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.max_requests, self.max_bytes = max_requests, max_bytes
        self.num_bytes = 0
        self._bands: dict[int, _Band] = {}
        """Bands that have requests, by priority."""
        self._num_requests = 0
        self._num_served = 0

    def __len__(self) -> int:
        return self._num_requests

    def __contains__(self, request: HeldRequest) -> bool:
        band = self._bands.get(request.priority)
        tenant = band.tenants.get(request.tenant) if band is not None else None
        return tenant is not None and id(request) in tenant.requests

    def __iter__(self) -> Iterator[HeldRequest]:
        """Iterate over all requests, band by band."""
        for priority in sorted(self._bands):
            for tenant in self._bands[priority].tenants.values():
                yield from tenant.requests.values()

    def push(self, request: HeldRequest) -> list[HeldRequest]:
        """Add a request at the end of its tenant's requests. Return the requests that exceed the bounds and must be
        rejected; it can be one of them.

        Beyond the bounds, the newest request of the lowest band's largest tenant is removed: one tenant cannot keep the
        others out.
        """
        self._insert(request, first=False)
        rejected = []
        while self._num_requests > self.max_requests or self.num_bytes > self.max_bytes:
            victim = self._victim()
            self.remove(victim)
            rejected.append(victim)
        return rejected

    def push_front(self, request: HeldRequest) -> None:
        """Add a request again, before the tenant's requests that arrived later. It was admitted before, so the bounds
        do not apply.
        """
        self._insert(request, first=True)

    def head(self, now: float) -> HeldRequest | None:
        """Return the next request without removing it; None if none is held."""
        if not self._bands:
            return None
        first = min(self._bands)
        if len(self._bands) > 1 and self._num_served % AGED_SHARE == AGED_SHARE - 1:
            for priority in sorted(self._bands, reverse=True):
                if priority != first and now - self._bands[priority].oldest() > AGE_GUARD_SECONDS:
                    return self._bands[priority].head()
        return self._bands[first].head()

    def serve(self, request: HeldRequest, uncached_tokens: float) -> None:
        """Remove the request that head() returned and charge its tenant."""
        band = self._bands[request.priority]
        tenant = band.tenants[request.tenant]
        tenant.deficit -= max(uncached_tokens, MIN_COST_TOKENS)
        if tenant.deficit <= 0:
            band.tenants.move_to_end(tenant.name)
        self._num_served += 1
        self.remove(request)

    def remove(self, request: HeldRequest) -> None:
        """Remove a request that will not be served: its client left, or it was rejected."""
        band = self._bands[request.priority]
        tenant = band.tenants[request.tenant]
        del tenant.requests[id(request)]
        tenant.num_bytes -= request.num_bytes
        band.num_requests -= 1
        self._num_requests -= 1
        self.num_bytes -= request.num_bytes
        if not band.num_requests:  # no contention is left, so no debt either
            del self._bands[request.priority]
        elif not tenant.requests and tenant.deficit >= 0:
            del band.tenants[tenant.name]

    def expired(self, held_before: float) -> list[HeldRequest]:
        """Return the requests that have been held since before a time, without removing them."""
        found: list[HeldRequest] = []
        for band in self._bands.values():
            for tenant in band.tenants.values():
                found += takewhile(lambda request: request.held_at < held_before, tenant.requests.values())
        return found

    def oldest(self) -> float | None:
        """Return since when the oldest request has been held; None if none is held."""
        return min((band.oldest() for band in self._bands.values()), default=None)

    def _insert(self, request: HeldRequest, *, first: bool) -> None:
        band = self._bands.get(request.priority)
        if band is None:
            band = self._bands[request.priority] = _Band()
        tenant = band.tenants.get(request.tenant)
        if tenant is None:
            tenant = band.tenants[request.tenant] = _Tenant(request.tenant)
        tenant.requests[id(request)] = request
        if first:
            tenant.requests.move_to_end(id(request), last=False)
            others = islice(tenant.requests.values(), 1, None)
            earlier = list(takewhile(lambda other: other.held_at < request.held_at, others))
            for other in reversed(earlier):
                tenant.requests.move_to_end(id(other), last=False)
        tenant.num_bytes += request.num_bytes
        band.num_requests += 1
        self._num_requests += 1
        self.num_bytes += request.num_bytes

    def _victim(self) -> HeldRequest:
        tenants = self._bands[max(self._bands)].tenants.values()
        if self._num_requests > self.max_requests:
            largest = max(tenants, key=lambda tenant: len(tenant.requests))
        else:
            largest = max(tenants, key=lambda tenant: tenant.num_bytes)
        return next(reversed(largest.requests.values()))
