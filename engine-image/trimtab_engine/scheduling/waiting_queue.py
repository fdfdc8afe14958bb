"""The requests that wait, in the order in which they are admitted.

fcfs: by arrival at the scheduler, so that a preempted request comes back before everything that came after it.
priority: the lowest priority number first, then by arrival time.
deadline: two lines, each by arrival at the scheduler. Who cannot have its first token in time any more when it stands
at the head goes over to the late line, and of LATE_SHARE admissions one is from there: nobody waits for ever. Who has
had its turn is late no more: preempted, it comes back before everything that came after it.

What every step reports of it (tokens, oldest arrival) is kept as requests come and go, because thousands may wait.
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
    "deadline": lambda _: 0,  # nobody that runs is late
}
"""Among those of one rank the scheduler may choose who gives up its blocks."""
LATE_SHARE = 10  # one of so many admissions is a late request's, while some wait
MAX_STALE_ARRIVALS = 64  # entries of requests that wait no longer, beyond as many as wait


class WaitingQueue:
    """A sorted list: removing its head moves pointers only, which is quick for any number of requests that waits. The
    late line is the end of the list."""

    def __init__(self, order: QueueOrder) -> None:
        self.order = order
        self.key = KEYS[order]
        self.num_late = 0
        """How many of these requests are late."""
        self._num_overtaking = 0
        """Admissions in a row from the line in time while somebody late waited."""
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
        """The request that is admitted next."""
        return self._requests[self._head_place]

    @property
    def _head_place(self) -> int:
        is_turn_of_late = self.num_late and self._num_overtaking >= LATE_SHARE - 1
        return len(self._requests) - self.num_late if is_turn_of_late else 0

    @property
    def oldest_arrival(self) -> float | None:
        """When the oldest of these requests arrived; None: there are none."""
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
        """Take the head out: it has its turn, and is late no more."""
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
        """Take one out that has its turn: the head, or one that passes it."""
        if request is self.head:
            self.pop_head()
        else:
            self.remove(request)
            request.is_late = False

    def part_late(self, is_too_late: Callable[[Request], bool]) -> int:
        """Move who is too late from the head of the line in time to the late line: those behind are looked at when they
        stand there. Returns how many were it for the first time."""
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

    def recount(self, request: Request) -> None:
        """Its tokens have changed, while it waits or not: a step in flight computed one when it was preempted."""
        before = self._counted.get(request.order)
        if before is not None:
            self.num_tokens -= before
            self._count(request)

    def remove(self, request: Request) -> None:
        """Take one out that waits, wherever it stands: others are not looked at."""
        place = bisect_left(self._requests, self.key(request), key=self.key)
        assert self._requests[place] is request  # no two have one key
        del self._requests[place]
        self.num_late -= request.is_late
        self.num_tokens -= self._counted.pop(request.order)

    def reorder(self, order: QueueOrder) -> None:
        """Sort by another order from now on."""
        self.order, self.key = order, KEYS[order]
        self._num_overtaking = 0
        self.pardon()

    def pardon(self) -> None:
        """Have nobody late: all stand in the one line again, and are judged anew when they are looked at. The count of
        admissions goes on, so that changes, however often they come, do not keep late ones waiting for ever."""
        for request in self._requests[len(self._requests) - self.num_late :]:
            request.is_late = False
        self.num_late = 0
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
        if self._requests != sorted(self._requests, key=self.key):
            raise IntegrityError("the requests that wait are not in the order of the queue")
        num_late = sum(request.is_late for request in self._requests)
        if num_late != self.num_late:
            raise IntegrityError(f"of the requests that wait {num_late} are late; the queue says {self.num_late}")

    def _count(self, request: Request) -> None:
        left = request.num_tokens - request.num_computed_tokens
        self._counted[request.order] = left
        self.num_tokens += left

    def _list_arrivals(self) -> None:
        self._arrivals = [(request.arrival_time, request.order) for request in self._requests]
        heapify(self._arrivals)
