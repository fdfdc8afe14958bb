"""A core's reports for the state stream: prefix keys, load, step times and dispatches."""

import math
from collections.abc import Callable, Sequence
from itertools import takewhile

from trimtab_router.protocol.messages import Load

from trimtab_engine.core.execution import InFlightStep, PreparedStep
from trimtab_engine.messages.requests import AddRequest, StepStats
from trimtab_engine.messages.state_stream import CoreReport, Dispatch
from trimtab_engine.scheduling.batch import Batch
from trimtab_engine.scheduling.request import Request, RequestStatus
from trimtab_engine.scheduling.scheduler import Scheduler
from trimtab_engine.state_stream.cache_ledger import CacheLedger
from trimtab_engine.state_stream.step_time_fit import StepTimeFit

FIT_SECONDS = 1.0
"""Interval of new coefficients."""
SHARE_SECONDS = 10.0
"""Time over which prefill_share averages."""
WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
LENGTH_REQUESTS = 100
"""Requests over which bytes_per_token averages."""


class StreamReporter:
    """Reports of one core, while a router listens. `adapter_names` returns the adapters in device slots."""

    def __init__(self, scheduler: Scheduler, adapter_names: Callable[[], list[str]]) -> None:
        self._scheduler, self._adapter_names = scheduler, adapter_names
        self._ledger = CacheLedger(scheduler.blocks)
        self._fit = StepTimeFit()
        self._fitted_at = 0.0
        self._dispatches: list[Dispatch] = []
        self._num_bytes = self._num_tokens = 0.0
        self._prefill_share, self._shared_at = 0.0, 0.0
        self._context_tokens = 0
        self._num_cached: dict[Request, int] = {}
        """Cached tokens of waiting requests, as of their arrival or preemption."""
        self._computes_prompts = False
        """True if the newest step computes prompts: some may be unfinished."""

    def close(self) -> None:
        """Stop recording."""
        self._ledger.close()

    def note_dispatch(self, dispatch: Dispatch) -> None:
        """Acknowledge a dispatch with the next report."""
        self._dispatches.append(dispatch)

    def added(self, message: AddRequest, request: Request) -> None:
        """Watch the prefix keys of a request that was queued."""
        cuts = message.cuts
        if cuts is None:
            return
        if cuts.num_bytes:
            decay = 1.0 - 1.0 / LENGTH_REQUESTS
            self._num_bytes = decay * self._num_bytes + cuts.num_bytes
            self._num_tokens = decay * self._num_tokens + request.num_prompt_tokens
        if self._scheduler.policy.enable_prefix_caching:
            num_cached = self._ledger.add(request, cuts.keys, cuts.ends)
            if num_cached:
                self._num_cached[request] = num_cached

    def scheduled(self, batch: Batch) -> None:
        """Note a step that was just scheduled."""
        blocks = self._scheduler.blocks
        for preempted in batch.preempted:
            if preempted.mode == "recompute":
                contents = blocks.lookup_keys(preempted.request, preempted.num_tokens // blocks.block_size)
                num_blocks = sum(1 for _ in takewhile(blocks.is_cached, contents))
                self._num_cached[preempted.request] = num_blocks * blocks.block_size
        if batch.sequences:
            self._computes_prompts = batch.computes_prompts
            self._ledger.scheduled(batch.step)

    def report(
        self, step: PreparedStep | None, stats: StepStats, in_flight: Sequence[InFlightStep], now: float
    ) -> CoreReport:
        """Return the state after a step, or without one (None). `in_flight` are the steps after it."""
        if step is not None and step.batch.sequences:
            self._ledger.completed(step.batch.step)
            self._learn(step, stats.step_seconds)
        self._note_share(step, stats.step_seconds, now)
        if not in_flight:
            self._ledger.settle()
        added, removed = self._ledger.take_news()
        dispatches, self._dispatches = self._dispatches, []
        coefficients = None
        if now - self._fitted_at >= FIT_SECONDS:
            self._fitted_at, coefficients = now, self._fit.coefficients()
        return CoreReport(self._load(stats, in_flight, now), added, removed, dispatches, coefficients)

    def _learn(self, step: PreparedStep, seconds: float) -> None:
        batch = step.batch
        self._context_tokens = step.num_context_tokens
        self._fit.add(
            tokens=batch.num_tokens,
            sequences=step.num_requests,
            context=step.num_context_tokens,
            seconds=seconds,
            computes_prompts=batch.computes_prompts,
        )

    def _note_share(self, step: PreparedStep | None, seconds: float, now: float) -> None:
        elapsed, self._shared_at = now - self._shared_at, now
        if elapsed > 0:
            prefill_seconds = seconds if step is not None and step.batch.computes_prompts else 0.0
            share = min(1.0, prefill_seconds / elapsed)
            self._prefill_share += -math.expm1(-elapsed / SHARE_SECONDS) * (share - self._prefill_share)

    def _load(self, stats: StepStats, in_flight: Sequence[InFlightStep], now: float) -> Load:
        blocks, policy = self._scheduler.blocks, self._scheduler.policy
        tokens_per_block = blocks.block_size / len(blocks.attention_windows)
        prefill_tokens = max(0, stats.num_waiting_tokens - self._num_cached_tokens())
        if self._computes_prompts:
            prefill_tokens += sum(
                request.num_prompt_tokens - request.num_computed_tokens
                for request in self._scheduler.running_requests()
                if request.num_computed_tokens < request.num_prompt_tokens
            )
        return Load(
            running=stats.num_running,
            waiting=stats.num_waiting + stats.num_deferred,
            late=stats.num_waiting_late,
            prefill_tokens=prefill_tokens,
            context_tokens=self._context_tokens if stats.num_running else 0,
            kv_used_tokens=int(blocks.num_used * tokens_per_block),
            kv_total_tokens=int(blocks.num_total * tokens_per_block),
            token_budget=policy.max_num_batched_tokens,
            slots=policy.max_num_seqs,
            prefill_share=self._prefill_share,
            step_seconds=self._seconds_left(in_flight, now),
            bytes_per_token=self._num_bytes / self._num_tokens if self._num_tokens else 0.0,
            adapters=self._adapter_names(),
        )

    def _num_cached_tokens(self) -> int:
        """Return the tokens of waiting requests that need not be computed."""
        for request in [request for request in self._num_cached if request.status not in WAITING]:
            del self._num_cached[request]
        return sum(self._num_cached.values())

    def _seconds_left(self, in_flight: Sequence[InFlightStep], now: float) -> float:
        """Return the predicted time until all steps in flight have completed."""
        seconds = 0.0
        for place, each in enumerate(in_flight):
            step = each.step
            predicted = self._fit.predict(
                tokens=step.batch.num_tokens, sequences=step.num_requests, context=step.num_context_tokens
            )
            seconds += predicted if place else max(0.0, predicted - (now - each.started))
        return seconds
