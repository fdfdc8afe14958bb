"""Embedding execution: all inputs of one HTTP request run concurrently, each as its own core request, and are returned
in order.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from trimtab_engine.api.http.dispatches import PendingDispatch
from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.api.metrics.observations import FinishedSequence, Observer
from trimtab_engine.api.metrics.tracing import Tracer
from trimtab_engine.api.openai.admission import Ticket
from trimtab_engine.api.openai.generation import error_of
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.engine_client.output_queue import PlainRun
from trimtab_engine.messages.requests import AddRequest, SequenceOutput
from trimtab_engine.scheduling.pooling import Pooling
from trimtab_engine.scheduling.sampling import Sampling

NO_SAMPLING = Sampling()
RETRY_SECONDS = 5  # for Retry-After of requests ended by the engine; about the time until a drain propagates


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """A validated request. Times are CLOCK_MONOTONIC seconds."""

    request_id: str
    prompts: Sequence[list[int]]
    """Token IDs of each input."""
    pooling: Pooling
    arrival_time: float
    cache_salt: str = ""
    priority: int = 0
    data_parallel_rank: int | None = None
    """Data-parallel core to run on, or None for any."""
    adapter: str = ""
    """Adapter name, or empty for the base model."""
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    """Trace headers of the request."""
    ticket: Ticket | None = None
    """Admission ticket, notified of each vector."""
    dispatch: PendingDispatch | None = None
    """Dispatch that the last input acknowledges. None if the request did not come from a router."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """One input's serialized vector and its number of cached prompt tokens."""

    written: bytes
    num_cached_tokens: int
    num_host_cached_tokens: int


class Embedder:
    """Runs EmbeddingPlans on the core."""

    def __init__(self, client: CoreClient, observer: Observer, tracer: Tracer | None = None) -> None:
        self.observer = observer
        self._client, self._tracer = client, tracer

    async def run(self, plan: EmbeddingPlan, write: Callable[[bytes], bytes]) -> list[EmbeddingResult]:
        """Return all vectors in input order, each serialized on arrival to spread the work over time.

        Cancellation or the first error aborts the remaining inputs.
        """
        tasks = [asyncio.create_task(self._embed(plan, index, write)) for index in range(len(plan.prompts))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _embed(self, plan: EmbeddingPlan, index: int, write: Callable[[bytes], bytes]) -> EmbeddingResult:
        request = AddRequest(
            f"{plan.request_id}-{index}-{uuid.uuid4().hex[:8]}",
            plan.prompts[index],
            NO_SAMPLING,
            plan.arrival_time,
            priority=plan.priority,
            data_parallel_rank=plan.data_parallel_rank,
            cache_salt=plan.cache_salt,
            pooling=plan.pooling,
            adapter=plan.adapter,
        )
        if plan.dispatch is not None and index == len(plan.prompts) - 1:
            request.dispatch = plan.dispatch.take()
        last: SequenceOutput | None = None
        try:
            async with aclosing(self._client.generate(request)) as outputs:
                async for output in outputs:
                    assert not isinstance(output, PlainRun)  # pooling requests have no tokens
                    last = output
        finally:
            self._count(plan, index, last)
        assert last is not None  # the last output has the finish reason
        if last.finish_reason == "error":
            raise error_of(last)
        if last.pooled is None:
            raise ApiError(503, "the engine aborted the request; retry it", retry_after=RETRY_SECONDS)
        if plan.ticket is not None:
            plan.ticket.started(index)
        return EmbeddingResult(write(last.pooled), last.num_cached_tokens, last.num_host_cached_tokens)

    def _count(self, plan: EmbeddingPlan, index: int, last: SequenceOutput | None) -> None:
        """Report the result to the metrics; `last` is None if the request was cancelled or the engine failed."""
        is_told = last is not None and last.finish_reason is not None
        life = FinishedSequence(
            reason=last.finish_reason if last is not None and last.finish_reason is not None else "abort",
            arrival=plan.arrival_time,
            scheduled=None if last is None else last.first_scheduled_time,
            first_token=None,
            last_token=None,
            end=last.time if is_told and last is not None and last.time is not None else time.monotonic(),
            num_prompt_tokens=len(plan.prompts[index]),
            num_generation_tokens=0,
            max_tokens=0,
            num_preemptions=0 if last is None else last.num_preemptions,
            num_cached_tokens=0 if last is None else last.num_cached_tokens,
            engine=self._client.first_rank if last is None else last.engine_index,
            is_pooled=True,
        )
        self.observer.finished(life)
        if self._tracer is not None:
            name = plan.request_id if len(plan.prompts) == 1 else f"{plan.request_id}-{index}"
            self._tracer.record(name, life, None, 1, plan.trace_headers)
