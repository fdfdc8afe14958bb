"""The requests that wait, in the order in which they are admitted.

fcfs: by arrival at the scheduler, so that a preempted request comes back before everything that came after it.
priority: the lowest priority number first, then by arrival time.
"""

from bisect import insort
from collections.abc import Callable, Iterator

from trimtab_engine.request import Request
from trimtab_engine.scheduling_policy import QueueOrder

Key = tuple[float, ...]


def _by_arrival(request: Request) -> Key:
    return (request.order,)


def _by_priority(request: Request) -> Key:
    return (request.priority, request.arrival_time, request.order)


KEYS: dict[QueueOrder, Callable[[Request], Key]] = {"fcfs": _by_arrival, "priority": _by_priority}


class WaitingQueue:
    """A sorted list: removing its head moves pointers only, which is quick for any number of requests that waits."""

    def __init__(self, order: QueueOrder) -> None:
        self.key = KEYS[order]
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def head(self) -> Request:
        return self._requests[0]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=self.key)

    def pop_head(self) -> Request:
        return self._requests.pop(0)

    def drop_finished(self) -> None:
        self._requests = [request for request in self._requests if not request.status.is_finished]

    def reorder(self, order: QueueOrder) -> None:
        """Sort by another order from now on."""
        self.key = KEYS[order]
        self._requests.sort(key=self.key)
