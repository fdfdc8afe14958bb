"""The requests that wait, in the order in which they are admitted.

fcfs: by arrival at the scheduler, so that a preempted request comes back before everything that came after it.
priority: the lowest priority number first, then by arrival time.

What every step reports of it (tokens, oldest arrival) is kept as requests come and go, because thousands may wait.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from trimtab_engine.errors import IntegrityError
from trimtab_engine.scheduling.policy import QueueOrder
from trimtab_engine.scheduling.request import Request

Key = tuple[float, ...]


def _by_arrival(request: Request) -> Key:
    return (request.order,)


def _by_priority(request: Request) -> Key:
    return (request.priority, request.arrival_time, request.order)


KEYS: dict[QueueOrder, Callable[[Request], Key]] = {"fcfs": _by_arrival, "priority": _by_priority}


MAX_STALE_ARRIVALS = 64  # entries of requests that wait no longer, beyond as many as wait


class WaitingQueue:
    """A sorted list: removing its head moves pointers only, which is quick for any number of requests that waits."""

    def __init__(self, order: QueueOrder) -> None:
        self.key = KEYS[order]
        self._requests: list[Request] = []
        self.num_tokens = 0
        """Tokens of these requests that are still to be computed before they answer."""
        self._counted: dict[int, int] = {}
        """What each request adds to num_tokens, by its order, which no two share."""
        self._arrivals: list[tuple[float, int]] = []
        """A heap of (arrival, order), also of requests that wait no longer."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def head(self) -> Request:
        return self._requests[0]

    @property
    def oldest_arrival(self) -> float | None:
        """When the oldest of these requests arrived; None: there are none."""
        while self._arrivals and self._arrivals[0][1] not in self._counted:
            heappop(self._arrivals)
        return self._arrivals[0][0] if self._arrivals else None

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=self.key)
        self._count(request)
        heappush(self._arrivals, (request.arrival_time, request.order))
        if len(self._arrivals) > 2 * len(self._requests) + MAX_STALE_ARRIVALS:
            self._list_arrivals()

    def pop_head(self) -> Request:
        request = self._requests.pop(0)
        self.num_tokens -= self._counted.pop(request.order)
        return request

    def recount(self, request: Request) -> None:
        """Its tokens have changed, while it waits or not: a step in flight computed one when it was preempted."""
        before = self._counted.get(request.order)
        if before is not None:
            self.num_tokens -= before
            self._count(request)

    def drop_finished(self) -> None:
        self._requests = [request for request in self._requests if not request.status.is_finished]
        self.num_tokens, self._counted = 0, {}
        for request in self._requests:
            self._count(request)
        self._list_arrivals()

    def reorder(self, order: QueueOrder) -> None:
        """Sort by another order from now on."""
        self.key = KEYS[order]
        self._requests.sort(key=self.key)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless what is kept is what the requests say."""
        num_tokens = sum(request.num_tokens - request.num_computed_tokens for request in self._requests)
        oldest = min((request.arrival_time for request in self._requests), default=None)
        if (num_tokens, oldest) != (self.num_tokens, self.oldest_arrival):
            raise IntegrityError(
                f"the requests that wait have {num_tokens} tokens to go and came at {oldest} or later; the queue says "
                f"{self.num_tokens} and {self.oldest_arrival}"
            )

    def _count(self, request: Request) -> None:
        left = request.num_tokens - request.num_computed_tokens
        self._counted[request.order] = left
        self.num_tokens += left

    def _list_arrivals(self) -> None:
        self._arrivals = [(request.arrival_time, request.order) for request in self._requests]
        heapify(self._arrivals)
