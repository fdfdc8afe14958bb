"""One step of serving, and what may change between two of them: schedule, run, sample, update; add, abort, re-trim.

The engine owns the scheduler, the model runner and the KV cache and knows neither sockets nor HTTP; the clock is
handed in. How it comes to be is startup.py's, who talks to it is core_process.py's.
"""

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trimtab_engine.batch import Batch
from trimtab_engine.device import Device
from trimtab_engine.errors import IntegrityError, InvalidRequest
from trimtab_engine.kv_cache import KVCache
from trimtab_engine.live_config import LiveConfig
from trimtab_engine.memory import Ledger, MemoryFormula
from trimtab_engine.messages import AddRequest, RequestOutput, StepOutputs, StepStats, TokenLogprobs
from trimtab_engine.model_runner import ModelRunner
from trimtab_engine.request import Request, RequestStatus
from trimtab_engine.sampler import sample
from trimtab_engine.scheduler import Sampled, Scheduler
from trimtab_engine.structured.compiler import GrammarCompiler
from trimtab_engine.structured.masks import MaskedRows, MaskMaker

REPORT_SECONDS = 1.0  # how often the ledger and the live values are sent when nothing changed
RATE_WEIGHT = 0.1  # of the newest step in the running mean of tokens per second that drain's ETA is made of

LayoutReport = dict[str, Any]

logger = logging.getLogger("trimtab_engine.core")


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What start-up built and measured. `layout` is the body of GET /admin/v1/layout."""

    device: Device
    runner: ModelRunner
    kv_cache: KVCache
    scheduler: Scheduler
    formula: MemoryFormula
    live: LiveConfig
    layout: LayoutReport
    grammars: GrammarCompiler


class Engine:
    """Serves requests step by step. Not thread-safe: one loop calls it.

    `clock` gives CLOCK_MONOTONIC seconds, as the API server's arrival times are.
    """

    def __init__(self, parts: EngineParts, clock: Callable[[], float]) -> None:
        self._device = parts.device
        self._runner = parts.runner
        self._kv_cache = parts.kv_cache
        self._scheduler = parts.scheduler
        self._formula = parts.formula
        self._live = parts.live
        self._layout = parts.layout
        self._grammars = parts.grammars
        self._masks = MaskMaker()
        self._clock = clock
        self._rejected: list[RequestOutput] = []
        self._announced: set[str] = set()
        self._last_report = -REPORT_SECONDS
        self._drain_deadline: float | None = None
        self._tokens_per_second = 0.0

    # --- requests -------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._rejected) or not self._scheduler.is_idle

    @property
    def is_building(self) -> bool:
        """Requests wait for their grammar: look again soon."""
        return self._grammars.num_waiting > 0

    def add(self, message: AddRequest) -> None:
        """Queue a request; one that can never run ends at the next step with finish_reason error, alone."""
        request = Request.of(
            message.request_id,
            message.prompt_token_ids,
            message.sampling,
            arrival_time=message.arrival_time,
            priority=message.priority,
        )
        if message.sampling.grammar is None or self._grammars.start(request):
            self._queue(request)

    def _queue(self, request: Request) -> None:
        try:
            if request.sampling.grammar is not None and (request.grammar is None or request.grammar.error is not None):
                raise InvalidRequest("its grammar cannot be built")
            self._scheduler.add(request)
        except InvalidRequest:
            self._rejected.append(RequestOutput(request.request_id, [], RequestStatus.FINISHED_ERROR.value))

    def abort(self, request_ids: list[str]) -> None:
        """Free these requests' blocks now. The one who aborts knows: no output is sent."""
        self._grammars.forget(request_ids)
        self._scheduler.abort(request_ids)
        self._announced.difference_update(request_ids)

    # --- one step -------------------------------------------------------------------------------------------------

    def step(self) -> StepOutputs:
        """Run one step and report it. An engine without work reports only its state."""
        started = self._clock()
        for request in self._grammars.take_ready():
            self._queue(request)
        outputs, self._rejected = self._rejected, []
        outputs += self._abort_past_drain_deadline(started)
        batch = self._scheduler.schedule(started)
        if batch.sequences:
            outputs += self._run(batch)
        ended = self._clock()
        stats = self._stats(batch, started, ended)
        self._note_rate(stats)
        return StepOutputs(outputs, stats)

    def _run(self, batch: Batch) -> list[RequestOutput]:
        sampling = [sequence.request for sequence in batch.sequences if sequence.samples]
        masks = self._masks.begin(
            [MaskedRows(row, request.grammar) for row, request in enumerate(sampling) if request.grammar is not None]
        )
        logits = self._runner.execute(batch.sequences)
        if not sampling:
            return []
        tokens = sample(
            logits,
            sampling,
            eos_token_ids=self._runner.facts.eos_token_ids,
            masks=None if masks is None else masks.result(),
        )
        sampled = self._scheduler.update(batch, tokens.token_ids, self._clock())
        if masks is not None:
            sampled = [self._follow_grammar(entry) for entry in sampled]
        logprobs = tokens.logprobs or [None] * len(sampled)
        return [self._output(entry, positions) for entry, positions in zip(sampled, logprobs, strict=True)]

    def _follow_grammar(self, sampled: Sampled) -> Sampled:
        """Move a request's grammar on by its new token. Its end ends the request, also before min_tokens; an error too,
        with finish_reason error."""
        request, token_id, finished = sampled
        grammar = request.grammar
        if grammar is None or finished is RequestStatus.FINISHED_ABORTED:
            return sampled
        grammar.accept([token_id])
        if grammar.error is not None:
            logger.warning("request %s ends: its grammar cannot go on: %s", request.request_id, grammar.error)
            ended = RequestStatus.FINISHED_ERROR
        elif grammar.is_complete:
            ended = RequestStatus.FINISHED_STOPPED
        else:
            return sampled
        if finished is None:
            self._scheduler.abort([request.request_id], ended)
        return request, token_id, ended

    def _output(self, sampled: Sampled, logprobs: TokenLogprobs | None) -> RequestOutput:
        request, token_id, finished = sampled
        output = RequestOutput(request.request_id, [token_id], logprobs=None if logprobs is None else [logprobs])
        if request.request_id not in self._announced:
            self._announced.add(request.request_id)
            output.first_scheduled_time = request.first_scheduled_time
        if finished is not None:
            self._announced.discard(request.request_id)
            output.finish_reason = finished.value
            output.stop_token_id = request.stop_token_id
            output.ends_with_text = (
                finished is RequestStatus.FINISHED_STOPPED
                and request.grammar is not None
                and token_id not in request.end_token_ids
                and token_id not in self._runner.facts.eos_token_ids
            )
            output.num_preemptions = request.num_preemptions
        return output

    def _abort_past_drain_deadline(self, now: float) -> list[RequestOutput]:
        if self._drain_deadline is None or now < self._drain_deadline:
            return []
        unbuilt = self._grammars.forget(self._grammars.waiting_request_ids())
        aborted = self._scheduler.abort(self._scheduler.unfinished_request_ids())
        self._announced.clear()
        return [RequestOutput(r.request_id, [], RequestStatus.FINISHED_ABORTED.value) for r in unbuilt] + [
            RequestOutput(request.request_id, [], request.status.value, num_preemptions=request.num_preemptions)
            for request in aborted
        ]

    # --- live configuration ---------------------------------------------------------------------------------------

    def patch_config(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Judge and apply one PATCH between two steps. Returns HTTP status and body (docs/contract.md section 2)."""
        before = self._live
        after, status, answer = before.patch(
            body.get("values"),
            if_match=body.get("if_match"),
            dry_run=bool(body.get("dry_run")),
            change_id=f"cfg-{uuid.uuid4().hex[:12]}",
            applied_at_step=self._scheduler.next_step,
        )
        if after is not before:
            self._live = after
            self._apply(before)
            self._last_report = -REPORT_SECONDS
        return status, answer

    def _apply(self, before: LiveConfig) -> None:
        values = self._live.values
        self._scheduler.set_limits(
            max_num_seqs=values.max_num_seqs, max_num_batched_tokens=values.max_num_batched_tokens
        )
        if values.gpu_memory_utilization != before.values.gpu_memory_utilization:
            formula = self._formula.at(values.gpu_memory_utilization)
            self._resize_kv(min(formula.num_blocks, self._live.envelope.num_blocks_cap))
            self._formula = formula

    def _resize_kv(self, num_blocks: int) -> None:
        """Map before blocks are handed out; copy, then unmap, after they are taken back."""
        if num_blocks > self._kv_cache.num_blocks:
            self._kv_cache.map_blocks(num_blocks)
        resized = self._scheduler.resize_kv(num_blocks, self._clock())
        self._kv_cache.copy_blocks(list(resized.moves))
        if num_blocks < self._kv_cache.num_blocks:
            self._kv_cache.unmap_above(num_blocks)

    def close(self) -> None:
        """End the engine's other ranks, if it has any."""
        self._runner.close()

    def config(self) -> dict[str, Any]:
        """The body of GET /admin/v1/config."""
        return self._live.describe()

    def layout(self) -> LayoutReport:
        return self._layout

    def drain(self, deadline_seconds: float) -> dict[str, Any]:
        """Let what runs finish until the deadline, counted from now; abort the rest then. Reports what remains."""
        self._drain_deadline = self._clock() + deadline_seconds
        remaining = self._scheduler.remaining_tokens()
        rate = self._tokens_per_second
        return {
            "remaining_requests": self._scheduler.num_unfinished,
            "remaining_tokens": remaining,
            "eta_seconds": 0.0
            if remaining == 0
            else min(deadline_seconds, remaining / rate if rate else deadline_seconds),
        }

    # --- what it tells --------------------------------------------------------------------------------------------

    def ledger(self) -> Ledger:
        """Who owns the device's bytes now, beside what the driver counts."""
        formula, kv_cache = self._formula, self._kv_cache
        return Ledger(
            device_bytes=formula.device_bytes,
            driver_used_bytes=self._device.used_bytes(),
            kinds={
                "other": formula.other_bytes,
                "weights": formula.weights_bytes,
                "kv_mapped": kv_cache.mapped_bytes,
                "activations_peak": formula.activations_peak_bytes,
                "workspace": formula.workspace_bytes,
                "graphs": formula.graphs_bytes,
                "communicator": formula.communicator_bytes,
            },
            untouched_bytes=max(0, kv_cache.mapped_bytes - kv_cache.resident_bytes()),
            block_size=formula.block_size,
            bytes_per_block=formula.bytes_per_block,
            blocks_total=kv_cache.num_blocks,
            blocks_used=self._scheduler.num_blocks_used,
            blocks_cap=kv_cache.cap_blocks,
        )

    def _stats(self, batch: Batch, started: float, ended: float) -> StepStats:
        scheduler, counts = self._scheduler, self._scheduler.take_stats()
        stats = StepStats(
            step=batch.step,
            time=ended,
            step_seconds=ended - started,
            kind=batch.kind,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_blocks_used=scheduler.num_blocks_used,
            kv_blocks_total=self._kv_cache.num_blocks,
            kv_blocks_cap=self._kv_cache.cap_blocks,
            num_scheduled_tokens=batch.num_tokens,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_generation_tokens=counts.num_generation_tokens,
            num_batch_requests=len(batch.sequences),
            preempted=counts.preempted,
            recomputed_tokens=counts.recomputed_tokens,
            preempt_stall_seconds=counts.preempt_stall_seconds,
            blocked_seconds=counts.blocked_seconds,
            config_generation=self._live.generation,
        )
        if ended - self._last_report >= REPORT_SECONDS:
            self._last_report = ended
            stats.memory_bytes = self.ledger().by_kind()
            stats.config_values = {name: float(value) for name, value in self._live.numbers().items()}
        return stats

    def _note_rate(self, stats: StepStats) -> None:
        if stats.step_seconds > 0 and stats.num_generation_tokens:
            rate = stats.num_generation_tokens / stats.step_seconds
            old = self._tokens_per_second or rate
            self._tokens_per_second = old + RATE_WEIGHT * (rate - old)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless scheduler, block tables and KV cache agree."""
        self._scheduler.check_integrity()
        if self._scheduler.num_blocks_total != self._kv_cache.num_blocks:
            raise IntegrityError(
                f"the scheduler hands out {self._scheduler.num_blocks_total} blocks, but {self._kv_cache.num_blocks} "
                f"are mapped"
            )
