"""Choice of the replica for a request: the least predicted time to first token plus the cost to other requests.

    J = rest of the step + (Q + u) · e + u · e · (π + δ) + σ + τ + KV + adapter

`Q` is the uncached prompt tokens ahead, `u` the request's own ones, `e` the seconds per prompt token at the
replica's present batch. The other terms are costs to other requests, in seconds: `π = ρ / (1 − ρ)` to later ones, per
second of prefill at a prefill share of ρ; `σ` to the prompt ahead, which ends in the step that this one fills up; `τ`
to decoding ones; `δ` is the share of displaced cache content that will have to be computed again. `KV` is the wait for
blocks and a price of a full cache, `adapter` the load of an adapter. Without step times the rule is uncached tokens ×
batch size, without any state the fewest requests.
docs/concepts/routing.md explains each term.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol
from zlib import crc32

from trimtab_router.scoring.prefix_index import PrefixIndex
from trimtab_router.scoring.state import Candidate, Choice, ReplicaState, RoutedRequest, StepTime

TIE_SHARE = 0.02
"""Scores within this share of the best one are equal."""
MAX_PREFILL_SHARE = 0.95
"""Bound of ρ: beyond it the queue has no equilibrium, and the price no meaning."""
SHARE_SECONDS = 10.0
"""Time that the reported ρ is a mean of; the work that is waiting counts as that many seconds of ρ = 1."""
ITL_WEIGHT = 2.0
"""Seconds of time to first token that a second of inter-token latency is worth."""
KV_PRICE_SECONDS = 0.15
"""Seconds of score at a KV use of one half: preemptions and short batches follow from a full cache."""
MAX_KV_USE = 0.9
"""KV use from which on the price is constant: with a higher one a full cache would move sessions to other full caches,
which then lose their own sessions' prefixes.
"""
ASSUMED_OUTPUT_TOKENS = 256
"""Steps until a running request frees its KV, where nothing is known about answers."""
ADAPTER_LOAD_SECONDS = 0.5
"""Cost of a replica that must load the request's adapter first."""
DEFAULT_TOKEN_BUDGET = 2048

PREDICTED_TTFT = "predicted-ttft"
UNCACHED_WORK = "uncached-work"
LEAST_REQUEST = "least-request"


class RandomSource(Protocol):
    """Source of random numbers, such as `random.Random`."""

    def random(self) -> float:
        """Return a number from 0 to below 1."""


def choose(
    request: RoutedRequest,
    replicas: Sequence[ReplicaState],
    index: PrefixIndex,
    now: float,
    rng: RandomSource,
    exclude: Collection[str] = frozenset(),
    *,
    itl_target: float | None = None,
) -> Choice | None:
    """Return the replica that should get the request, and the next best one; None if none is left.

    Args:
        request: The request.
        replicas: Replicas that are ready; draining ones are skipped.
        index: Prefix keys by replica.
        now: Time on the clock of `ReplicaState.reported_at`, in seconds.
        rng: Source of the two candidates of a tie.
        exclude: Names of replicas that failed this request, or whose breaker is open.
        itl_target: Objective of the inter-token latency in seconds. Replicas whose predicted steps are longer are used
            only if all are.
    """
    has_room = True
    usable = [each for each in replicas if not each.draining and each.replica not in exclude]
    if not usable:
        return None
    cached = index.match(request.keys, now) if request.keys else {}
    # A new replica without measured steps runs the same model as the others.
    step_time = next((each.step_time for each in usable if each.step_time is not None), None)
    if step_time is not None:
        rule, scored = PREDICTED_TTFT, _predict(request, usable, cached, index.reuse_shares, now, step_time)
        has_room = any(each[3] <= each[5] for each in scored)
        if itl_target is not None:
            scored = [each for each in scored if each[4] <= itl_target] or scored
    elif any(each.reported_at is not None for each in usable):
        rule, scored = UNCACHED_WORK, [_uncached_work(request, each, cached) for each in usable]
    else:
        rule, scored = LEAST_REQUEST, [(float(_num_requests(each)), each, 0.0, 0.0, 0.0, 0.0) for each in usable]
    best, runner_up = _pick(request, scored, rng)
    return Choice(
        _candidate(request, best, cached),
        None if runner_up is None else _candidate(request, runner_up, cached),
        rule,
        has_room,
    )


def best_replica(
    prompt_tokens: int, replicas: Sequence[ReplicaState], now: float, cached_tokens: Mapping[int, int] | None = None
) -> int:
    """Return the position of the replica with the least J, for models of a fleet that know its caches themselves.

    Args:
        prompt_tokens: Length of the prompt.
        replicas: At least one replica, of which at least one has a step time.
        now: Time on the clock of `ReplicaState.step_ends_at`, in seconds.
        cached_tokens: Cached prompt tokens by `ReplicaState.index`; replicas that are absent have none.

    Raises:
        ValueError: If no replica has a step time.
    """
    default = next((each.step_time for each in replicas if each.step_time is not None), None)
    if default is None:
        raise ValueError("replicas: no step time is known (None for all); set ReplicaState.step_time")
    request = RoutedRequest(prompt_tokens, tokens_per_key=1.0)
    scores = [each[0] for each in _predict(request, replicas, cached_tokens or {}, {}, now, default)]
    return scores.index(min(scores))


Scored = tuple[float, ReplicaState, float, float, float, float]
"""(score, replica, predicted TTFT, queue seconds, seconds of the next step, of a step with a full budget)"""


def _predict(
    request: RoutedRequest,
    replicas: Sequence[ReplicaState],
    cached: Mapping[int, int],
    reuse_shares: Mapping[int, float],
    now: float,
    default: StepTime,
) -> list[Scored]:
    """Return the score J of each replica. This is the router's inner loop."""
    prompt, per_key, adapter = request.prompt_tokens, request.tokens_per_key, request.adapter
    scored = []
    for state in replicas:
        time = state.step_time or default
        budget = state.token_budget or DEFAULT_TOKEN_BUDGET
        uncached = prompt - cached.get(state.index, 0) * per_key
        if uncached < 1.0:  # the last token must be computed
            uncached = 1.0
        running = state.running + state.pending_requests
        context = state.context_tokens + state.pending_context_tokens
        fixed = time.base + time.per_sequence * running + time.per_context * context
        per_token = time.per_token
        per_prompt_token = per_token + fixed / budget
        ahead = state.prefill_tokens + state.pending_prefill_tokens
        wait = ahead * per_prompt_token
        ends_at = state.step_ends_at
        if ends_at is not None and ends_at > now:
            wait += ends_at - now
        # Its own inter-token latency, and the increase that it causes for each running request.
        longer = per_token + time.per_sequence + time.per_context * prompt
        price = ITL_WEIGHT * (fixed + running * longer)
        if ahead > 0.0:  # the last prompt ahead shares a step with this one, and waits for it
            room = budget - ahead % budget
            price += per_token * (uncached if uncached < room else room)
        total = state.kv_total_tokens
        if total:
            use = (state.kv_used_tokens + state.pending_context_tokens + uncached) / total
            if use > 1.0:  # blocks are freed as running requests end
                wait += (use - 1.0) * ASSUMED_OUTPUT_TOKENS * fixed
            price += KV_PRICE_SECONDS * use / (1.0 - (use if use < MAX_KV_USE else MAX_KV_USE))
        compute = uncached * per_prompt_token
        backlog = wait + compute
        share = (state.prefill_share * SHARE_SECONDS + backlog) / (SHARE_SECONDS + backlog)
        if share > MAX_PREFILL_SHARE:
            share = MAX_PREFILL_SHARE
        price += compute * (share / (1.0 - share) + reuse_shares.get(state.index, 0.0))
        ttft = wait + (compute if uncached > budget else fixed + uncached * per_token)
        if adapter is not None and adapter not in state.adapters:
            ttft += ADAPTER_LOAD_SECONDS
        scored.append((ttft + price, state, ttft, wait, fixed + per_token * running, budget * per_prompt_token))
    return scored


def _uncached_work(request: RoutedRequest, state: ReplicaState, cached: Mapping[int, int]) -> Scored:
    """Return uncached tokens × batch size, in tokens (LMetric, arXiv 2603.15202)."""
    ahead = state.prefill_tokens + state.pending_prefill_tokens
    work = ahead + request.prompt_tokens - _cached_tokens(request, cached.get(state.index, 0))
    return work * (1 + _num_requests(state)), state, 0.0, 0.0, 0.0, 0.0


def _num_requests(state: ReplicaState) -> int:
    return state.running + state.waiting + state.pending_requests


def _load(state: ReplicaState) -> tuple[float, int]:
    return state.prefill_tokens + state.pending_prefill_tokens, _num_requests(state)


def _pick(request: RoutedRequest, scored: list[Scored], rng: RandomSource) -> tuple[Scored, Scored | None]:
    """Return the best score, of equal ones that of the session or the less loaded of two random ones; and the next."""
    scores = [each[0] for each in scored]
    least = min(scores)
    limit = least + TIE_SHARE * least
    tied = [position for position, score in enumerate(scores) if score <= limit]
    if len(tied) == 1:
        best = tied[0]
    elif request.session is not None:
        session = request.session
        best = max(tied, key=lambda position: crc32(f"{session}\0{scored[position][1].replica}".encode()))
    else:
        first = int(rng.random() * len(tied))
        second = (first + 1 + int(rng.random() * (len(tied) - 1))) % len(tied)
        best = min(tied[first], tied[second], key=lambda position: _load(scored[position][1]))
    if len(scored) == 1:
        return scored[best], None
    scores[best] = math.inf
    return scored[best], scored[scores.index(min(scores))]


def _candidate(request: RoutedRequest, scored: Scored, cached: Mapping[int, int]) -> Candidate:
    score, state, ttft, queue, step, _ = scored
    return Candidate(state.replica, score, ttft, _cached_tokens(request, cached.get(state.index, 0)), queue, step)


def _cached_tokens(request: RoutedRequest, num_keys: int) -> int:
    """Return the tokens of the first keys; the prompt's last token must always be computed."""
    return min(request.prompt_tokens - 1, int(num_keys * request.tokens_per_key))
