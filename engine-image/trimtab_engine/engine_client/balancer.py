"""Load balancing of requests over engine cores: chooses the least loaded core, by local knowledge. Pure.

The choice only determines the first candidate: a core that cannot run the request immediately rejects it, and the next
one is tried (client.py). If all reject it, the request queues on the least loaded core.
"""

from collections.abc import Collection
from dataclasses import dataclass

WAITING_WEIGHT = 6.0  # vLLM's: weight of a waiting request on a core with a full KV cache
USAGE_FLOOR = 0.5  # below this much KV cache in use, waiting requests wait for something else


@dataclass(slots=True)
class CoreLoad:
    """Known load of one core: requests sent by this client, and the core's last report."""

    num_sent: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0

    def score(self, num_clients: int) -> float:
        """Return the load as a number of requests. A report may be older than sent requests, and other clients send
        about as much.
        """
        known = max(num_clients * self.num_sent, self.num_running + self.num_waiting)
        return known + self.num_waiting * WAITING_WEIGHT * max(0.0, self.kv_usage - USAGE_FLOOR)


class CoreBalancer:
    """Chooses among cores by their loads; equal ones take turns."""

    def __init__(self, num_cores: int, num_clients: int = 1) -> None:
        self._loads = [CoreLoad() for _ in range(num_cores)]
        self._num_clients = num_clients
        self._turn = 0

    def choose(self, without: frozenset[int] = frozenset(), among: Collection[int] | None = None) -> int:
        """Return the least loaded core not in `without`, or of all cores if every core is in it. `among`: the available
        cores, at least one; None means all.
        """
        num_cores = len(self._loads)
        order = [(self._turn + offset) % num_cores for offset in range(num_cores)]
        if among is not None:
            order = [core for core in order if core in among]
        candidates = [core for core in order if core not in without] or order
        chosen = min(candidates, key=lambda core: self._loads[core].score(self._num_clients))
        self._turn = (chosen + 1) % num_cores
        return chosen

    def sent(self, core: int) -> None:
        self._loads[core].num_sent += 1

    def ended(self, core: int) -> None:
        self._loads[core].num_sent -= 1

    def forget(self, core: int) -> None:
        """Reset the load reported by a replaced process."""
        self._loads[core] = CoreLoad(num_sent=self._loads[core].num_sent)

    def report(self, core: int, *, num_running: int, num_waiting: int, kv_usage: float) -> None:
        load = self._loads[core]
        load.num_running, load.num_waiting, load.kv_usage = num_running, num_waiting, kv_usage
