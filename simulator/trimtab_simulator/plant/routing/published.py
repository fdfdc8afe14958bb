"""Published rules of other routers, with the constants of their defaults, on exact state without delay.

Each rule gets more than its original does: exact caches instead of approximate ones, and no scrape interval.
"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab_operator.tuner.engine_model import Sequence as Request

from trimtab_simulator.plant.replica import Replica
from trimtab_simulator.plant.routing.knowledge import Knowledge

FORGET_INTERVAL = 1024
"""Requests after which finished ones are dropped from the books."""

SGLANG_CACHE_THRESHOLD = 0.5
SGLANG_BALANCE_ABSOLUTE = 32
SGLANG_BALANCE_RELATIVE = 1.1

LLM_D_MATCH = 0.8
"""Share of the prompt that a replica must have cached to keep the request."""
LLM_D_PREFILL_TOKENS_PER_SECOND = 15_928
"""`peakPrefillThroughput` of llm-d's guides; a replica of the simulation computes 16,000 tokens/s."""
LLM_D_MAX_PENALTY_SECONDS = 18.0
"""Queue, in seconds of prefill beyond the least loaded replica, from which on the match is ignored."""


class _Informed:
    """A rule on the exact caches and queues of the replicas."""

    def __init__(self) -> None:
        self.known = Knowledge()
        self._num_sent = 0

    def choose(self, request: Request, ready: Sequence[Replica], now: float) -> Replica:
        """Return the replica of the rule."""
        self.known.update(ready, now)
        replica = self.pick(request, ready, now)
        self.known.record(request, replica)
        self._num_sent += 1
        if self._num_sent % FORGET_INTERVAL == 0:
            self.known.forget_started()
        return replica

    def pick(self, request: Request, ready: Sequence[Replica], now: float) -> Replica:
        """Return the replica of the rule, for replicas that are up to date."""
        raise NotImplementedError


class Sglang(_Informed):
    """SGLang's router and SMG, policy `cache_aware`.

    If the most and least loaded replicas differ by more than 32 requests and by more than a factor of 1.1, the least
    loaded one. Otherwise the one with the longest match if that is more than half of the prompt, else the least loaded.
    """

    def pick(self, request: Request, ready: Sequence[Replica], now: float) -> Replica:
        """Return the replica of the rule."""
        loads = [replica.engine.in_flight(now) for replica in ready]
        least, most = min(loads), max(loads)
        if most - least <= SGLANG_BALANCE_ABSOLUTE or most <= SGLANG_BALANCE_RELATIVE * least:
            cached = self.known.cached_tokens(request)
            best = max(ready, key=lambda replica: cached.get(replica.number, 0))
            if cached.get(best.number, 0) > SGLANG_CACHE_THRESHOLD * request.num_prompt:
                return best
        return min(zip(loads, range(len(ready)), ready, strict=True), key=lambda each: (each[0], each[2].num_sent))[2]


class Lmetric(_Informed):
    """LMetric (arXiv 2603.15202): uncached tokens that the replica would have to compute × its batch size."""

    def pick(self, request: Request, ready: Sequence[Replica], now: float) -> Replica:
        """Return the replica of the rule."""
        cached = self.known.cached_tokens(request)

        def score(replica: Replica) -> tuple[float, int]:
            uncached = self.known.prefill_tokens(replica) + request.num_prompt - cached.get(replica.number, 0)
            return uncached * (1 + replica.engine.in_flight(now)), replica.num_sent

        return min(ready, key=score)


class LlmD(_Informed):
    """The default of llm-d's guides: affinity unless saturated, then the fewest uncached tokens in flight.

    Replicas that have cached at least 0.8 of the prompt keep it unless their queue exceeds that of the least loaded
    replica by 18 s of prefill. Of the remaining ones the one with the fewest uncached tokens in flight.
    """

    def pick(self, request: Request, ready: Sequence[Replica], now: float) -> Replica:
        """Return the replica of the rule."""
        cached = self.known.cached_tokens(request)
        queues = {replica.number: self.known.prefill_tokens(replica) for replica in ready}
        least = min(queues.values())
        affine = [
            replica
            for replica in ready
            if cached.get(replica.number, 0) >= LLM_D_MATCH * request.num_prompt
            and (queues[replica.number] - least) / LLM_D_PREFILL_TOKENS_PER_SECOND <= LLM_D_MAX_PENALTY_SECONDS
        ]

        def tokens(replica: Replica) -> tuple[float, int]:
            uncached = request.num_prompt - cached.get(replica.number, 0)
            return queues[replica.number] + uncached, replica.num_sent

        return min(affine or ready, key=tokens)
