"""Choice of the requests whose token masks are computed in a step: beyond a budget of time, requests with a grammar
take turns, so that expensive grammars do not delay the tokens of other requests. Pure.
"""

from collections.abc import Sequence

from trimtab_engine.scheduling.request import Request

MASK_BUDGET_SECONDS = 0.02  # per step; masks of usual grammars take 0.1 ms each


class MaskBudget:
    """Turns of the requests with a grammar. The time of a request's next mask is estimated by its last one."""

    def __init__(self, seconds: float = MASK_BUDGET_SECONDS) -> None:
        self._seconds = seconds
        self._last: Request | None = None
        """The last request that had a turn in a step in which others had to wait."""

    def deferred(self, requests: Sequence[Request]) -> frozenset[Request]:
        """Return the requests that wait for the next step, of the running ones with a grammar in a stable order. At
        least one is computed.
        """
        costs = [0.0 if request.grammar is None else request.grammar.mask_seconds for request in requests]
        if sum(costs) <= self._seconds:
            self._last = None
            return frozenset()
        first = requests.index(self._last) + 1 if self._last in requests else 0
        left, computed = self._seconds, set[Request]()
        for place in [*range(first, len(requests)), *range(first)]:
            if computed and costs[place] > left:
                break
            left -= costs[place]
            computed.add(requests[place])
            self._last = requests[place]
        return frozenset(requests) - computed
