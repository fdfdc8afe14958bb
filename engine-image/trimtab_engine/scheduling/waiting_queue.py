"""Queue of waiting requests in admission order.

fcfs: by arrival at the scheduler, so a preempted request is readmitted before all later arrivals.
priority: lowest priority number first, then by arrival time.
deadline: an on-time line and a late line, each by arrival. A request at the head that can no longer meet its TTFT
target moves to the late line. One of LATE_SHARE admissions is taken from the late line, so late requests do not starve.
An admitted request is no longer late: if preempted, it is readmitted before all later arrivals.

Reported values (tokens, oldest arrival) are updated incrementally, because thousands of requests may wait.
"""

from bisect import bisect_left, insort
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


def _by_line(request: Request) -> Key:
    return (request.is_late, request.order)


KEYS: dict[QueueOrder, Callable[[Request], Key]] = {
    "fcfs": _by_arrival,
    "priority": _by_priority,
    "deadline": _by_line,
}
RANKS: dict[QueueOrder, Callable[[Request], float]] = {
    "fcfs": lambda _: 0,
    "priority": lambda request: request.priority,
    "deadline": lambda _: 0,  # running requests are never late
}
"""Preemption rank. Among requests of equal rank the scheduler may choose any victim."""
LATE_SHARE = 10  # every n-th admission is a late request, while some wait
MAX_STALE_ARRIVALS = 64  # entries of requests that wait no longer, beyond as many as wait


class WaitingQueue:
    """A sorted list: removing its head moves pointers only, which is quick for any number of requests that waits. The
    late line is the end of the list.
    """

    def __init__(self, order: QueueOrder) -> None:
        self.order = order
        self.key = KEYS[order]
        self.num_late = 0
        """Number of late requests."""
        self._num_overtaking = 0
        """Consecutive admissions from the on-time line while late requests waited."""
        self._requests: list[Request] = []
        self.num_tokens = 0
        """Tokens of these requests that are still to be computed before they answer."""
        self._counted: dict[int, int] = {}
        """The contribution of each request to num_tokens, by its unique order."""
        self._arrivals: list[tuple[float, int]] = []
        """A heap of (arrival, order), also of requests that wait no longer."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def head(self) -> Request:
        """The request that is admitted next."""
        return self._requests[self._head_place]

    @property
    def _head_place(self) -> int:
        is_turn_of_late = self.num_late and self._num_overtaking >= LATE_SHARE - 1
        return len(self._requests) - self.num_late if is_turn_of_late else 0

    @property
    def oldest_arrival(self) -> float | None:
        """Arrival time of the oldest waiting request. None if the queue is empty."""
        while self._arrivals and self._arrivals[0][1] not in self._counted:
            heappop(self._arrivals)
        return self._arrivals[0][0] if self._arrivals else None

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=self.key)
        self.num_late += request.is_late
        self._count(request)
        heappush(self._arrivals, (request.arrival_time, request.order))
        if len(self._arrivals) > 2 * len(self._requests) + MAX_STALE_ARRIVALS:
            self._list_arrivals()

    def pop_head(self) -> Request:
        """Remove and return the head. It is no longer late."""
        request = self._requests.pop(self._head_place)
        self.num_tokens -= self._counted.pop(request.order)
        if request.is_late:
            request.is_late = False
            self.num_late -= 1
            self._num_overtaking = 0
        elif self.num_late:
            self._num_overtaking += 1
        return request

    def take(self, request: Request) -> None:
        """Remove an admitted request: the head, or one that passes it. It is no longer late."""
        if request is self.head:
            self.pop_head()
        else:
            self.remove(request)
            request.is_late = False

    def move_late_from_head(self, is_too_late: Callable[[Request], bool]) -> int:
        """Move requests that are too late from the head of the on-time line to the late line. Requests after the first
        on-time one are checked when they reach the head. Return how many became late for the first time.
        """
        in_time, count, num_new = len(self._requests) - self.num_late, 0, 0
        while count < in_time and is_too_late(request := self._requests[count]):
            num_new += not request.was_late
            request.is_late = request.was_late = True
            count += 1
        if count == 1:
            insort(self._requests, self._requests.pop(0), key=self.key)
        elif count:
            self._requests.sort(key=self.key)  # three sorted runs, so about linear for any number
        self.num_late += count
        return num_new

    def update_token_count(self, request: Request) -> None:
        """Update the count after the request's tokens changed. Does nothing if it is not queued: a step in flight may
        have computed a token when it was preempted.
        """
        before = self._counted.get(request.order)
        if before is not None:
            self.num_tokens -= before
            self._count(request)

    def remove(self, request: Request) -> None:
        """Remove a queued request at any position by binary search."""
        place = bisect_left(self._requests, self.key(request), key=self.key)
        assert self._requests[place] is request  # no two have one key
        del self._requests[place]
        self.num_late -= request.is_late
        self.num_tokens -= self._counted.pop(request.order)

    def reorder(self, order: QueueOrder) -> None:
        """Sort by another order from now on."""
        self.order, self.key = order, KEYS[order]
        self._num_overtaking = 0
        self.reset_late()

    def reset_late(self) -> None:
        """Return all late requests to the single line; they are checked again at the head. The admission count is kept,
        so frequent policy changes do not starve late requests.
        """
        for request in self._requests[len(self._requests) - self.num_late :]:
            request.is_late = False
        self.num_late = 0
        self._requests.sort(key=self.key)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the incremental values match the requests."""
        num_tokens = sum(request.num_tokens - request.num_computed_tokens for request in self._requests)
        oldest = min((request.arrival_time for request in self._requests), default=None)
        if (num_tokens, oldest) != (self.num_tokens, self.oldest_arrival):
            raise IntegrityError(
                f"waiting requests have {num_tokens} tokens left and oldest arrival {oldest}; the queue reports "
                f"{self.num_tokens} and {self.oldest_arrival}"
            )
        if self._requests != sorted(self._requests, key=self.key):
            raise IntegrityError("the requests that wait are not in the order of the queue")
        num_late = sum(request.is_late for request in self._requests)
        if num_late != self.num_late:
            raise IntegrityError(f"{num_late} waiting requests are late; the queue reports {self.num_late}")

    def _count(self, request: Request) -> None:
        left = request.num_tokens - request.num_computed_tokens
        self._counted[request.order] = left
        self.num_tokens += left

    def _list_arrivals(self) -> None:
        self._arrivals = [(request.arrival_time, request.order) for request in self._requests]
        heapify(self._arrivals)
