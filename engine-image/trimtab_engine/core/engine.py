"""The engine: runs one step at a time (schedule, run, sample, update) and applies changes between steps.

The engine owns the scheduler, the model runner and the KV cache. It uses no sockets and no HTTP; the clock is a
parameter. startup.py builds it, process.py connects it to clients.
"""

import logging
import math
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar, cast

from trimtab_modelspec.memory_formula import MemoryFormula

from trimtab_engine.config.adapters import AdapterConfig
from trimtab_engine.config.engine import set_log_level
from trimtab_engine.config.live.patch import LiveConfig
from trimtab_engine.config.live.reading import FieldError
from trimtab_engine.core.adapters import AdapterRegistry
from trimtab_engine.core.execution import Execution, InFlightStep, PreparedStep, StepResult
from trimtab_engine.core.lifecycle import Lifecycle, LifecycleRejected, RemainingWork
from trimtab_engine.core.preemption_monitor import PreemptionMonitor
from trimtab_engine.core.request_checks import check_items, check_task, check_token_ids, rope_of
from trimtab_engine.core.step_stats import note_graphs, step_stats
from trimtab_engine.core.stream_reporter import StreamReporter
from trimtab_engine.device.device import Device
from trimtab_engine.device.kv_cache import KVCache
from trimtab_engine.errors import ConfigError, EngineDead, IntegrityError, InvalidRequest
from trimtab_engine.memory.formula import Ledger, total_of
from trimtab_engine.memory.plan import PlanBase, plan_memory
from trimtab_engine.messages.admin import (
    EngineState,
    LifecycleCall,
    LoadLora,
    PatchConfig,
    Pause,
    PreparePatch,
    Resume,
    Sleep,
    UnloadLora,
    WakeUp,
)
from trimtab_engine.messages.requests import (
    AdaptersInUse,
    AddRequest,
    PlainTokens,
    SequenceOutput,
    StepOutputs,
    StepStats,
)
from trimtab_engine.messages.state_stream import Dispatch
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.runner.rank_ledger import rank_ledger
from trimtab_engine.runner.weights import Weights
from trimtab_engine.sampling.failures import Failure
from trimtab_engine.sampling.pooling import add_up, finished, is_finite
from trimtab_engine.scheduling.adapter import Adapter
from trimtab_engine.scheduling.request import Grammar, Request, RequestStatus
from trimtab_engine.scheduling.sampling import Sampling, TokenLogprobs
from trimtab_engine.scheduling.scheduler import Sampled, Scheduler, adapters_of
from trimtab_engine.structured.compiler import GrammarCompiler
from trimtab_engine.structured.mask_budget import MASK_BUDGET_SECONDS, MaskBudget

REPORT_SECONDS = 1.0  # interval of ledger and live values without changes
NAN_ERROR = "the model's logits are not numbers (NaN) for this request"
NAN_POOLED_ERROR = "the model's hidden states are not numbers (NaN, or beyond its dtype) for this request"
NOTHING_LEFT_ERROR = (
    "no token is left to choose: allowed_token_ids, bad_words, min_tokens and the grammar together forbid all of them"
)
RATE_WEIGHT = 0.1  # of the newest step in the running mean of tokens per second

LayoutReport = dict[str, Any]
Item = TypeVar("Item")

logger = logging.getLogger("trimtab_engine.core")


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Components built and measured by start-up. `layout` is the body of GET /admin/v1/layout."""

    device: Device
    runner: ModelRunner
    weights: Weights
    kv_cache: KVCache
    scheduler: Scheduler
    execution: Execution
    formula: MemoryFormula
    live: LiveConfig
    plan: PlanBase
    layout: LayoutReport
    grammars: GrammarCompiler
    adapters: AdapterConfig | None = None


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
        self._block_bytes = parts.formula.block_bytes_of_all_ranks  # independent of the utilization
        self._live = parts.live
        self._plan = parts.plan
        self._layout = parts.layout
        self._grammars = parts.grammars
        self._adapters = AdapterRegistry(parts.adapters, parts.runner, self._adapters_in_use)
        self._execution = parts.execution
        self._clock = clock
        self._in_flight: deque[InFlightStep] = deque()
        """Dispatched steps in order of completion. More than one only with pipeline stages."""
        self._ready: list[SequenceOutput] = []
        """Outputs that the next step() reports."""
        self._plain: PlainTokens | None = None
        """The others that it reports: of the one step that has landed since the last report."""
        self._plain_before: tuple[list[Request], list[str]] = ([], [])
        """Requests of a step that were all plain, and their ids."""
        self._num_processed_steps = 0
        """Steps since the last report."""
        self._preemption = PreemptionMonitor(parts.scheduler)
        self._stream: StreamReporter | None = None
        """None while no router listens to the state stream."""
        self._mask_budget = MaskBudget()
        self._deferred: frozenset[Request] = frozenset()
        """Requests with a grammar that wait for a later step, because the masks of others take its time."""
        self._announced: set[str] = set()
        self._failed: dict[str, int] = {}
        """Requests that no token could be chosen for since the last report, by Failure."""
        self._last_report = -REPORT_SECONDS
        self._drain_deadline: float | None = None
        self._is_prepared = False
        """True while blocks may be mapped for a PATCH over several cores that was validated and not yet applied."""
        self._tokens_per_second = 0.0
        self._longest_step = 0.0
        """Longest step so far, in whole seconds."""
        self._lifecycle = Lifecycle(
            scheduler=self._scheduler,
            kv_cache=self._kv_cache,
            weights=parts.weights,
            is_idle=lambda: self._scheduler.is_idle and not self.is_building,
            abort_all=self._abort_everything,
            drain_in_flight=self._drain_in_flight,
            clock=self._clock,
        )

    # --- requests -------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        can_run = not self._scheduler.is_idle and not self._lifecycle.is_frozen
        return (
            bool(self._ready)
            or self._plain is not None
            or bool(self._in_flight)
            or can_run
            or self._execution.is_needed
        )

    @property
    def is_building(self) -> bool:
        """True while requests wait for their grammar: poll again soon."""
        return self._grammars.num_waiting > 0

    @property
    def is_empty(self) -> bool:
        """True if no request is present in any state and no output is left to report."""
        return self._scheduler.is_idle and not self.has_work and not self.is_building

    def has_room_for(self, message: AddRequest) -> bool:
        """Return True if the next step would run the request: nothing waits, and a sequence slot and
        blocks are free.
        """
        try:
            adapter = self._adapters.of(message.adapter)
        except InvalidRequest:
            return True  # it is refused by name
        return self._scheduler.has_room_for(len(message.prompt_token_ids), adapter)

    def add(self, message: AddRequest) -> None:
        """Queue a request. A request that can never run ends at the next step with finish_reason error."""
        if self._stream is not None and message.dispatch is not None:
            self._stream.note_dispatch(message.dispatch)
        if not self._lifecycle.accepts:  # its server does not know of the pause yet
            self._ready.append(SequenceOutput(message.request_id, [], RequestStatus.FINISHED_ABORTED.value))
            return
        try:
            check_token_ids(message, self._runner.facts.vocab_size)
            check_items(message, self._runner.facts.vision)
            check_task(message, self._runner.facts.tasks)
            adapter = self._adapters.of(message.adapter)
        except InvalidRequest as error:
            self._refuse(message.request_id, error)
            return
        request = Request.of(
            message.request_id,
            message.prompt_token_ids,
            message.sampling,
            arrival_time=message.arrival_time,
            priority=message.priority,
            cache_salt=message.cache_salt,
            spans=message.spans,
            rope=rope_of(message, self._runner.facts.vision),
            pooling=message.pooling,
            adapter=adapter,
        )
        if self._stream is not None:
            self._stream.added(message, request)
        if message.sampling.grammar is None or self._grammars.start(request):
            self._queue(request)

    def _queue(self, request: Request) -> None:
        try:
            if request.sampling.grammar is not None and (request.grammar is None or request.grammar.error is not None):
                reason = "its tokenizer cannot be read" if request.grammar is None else request.grammar.error
                raise InvalidRequest(f"the grammar cannot be built: {reason}")
            self._scheduler.add(request)
        except InvalidRequest as error:
            self._refuse(request.request_id, error)

    def _refuse(self, request_id: str, error: InvalidRequest) -> None:
        """Report the request as ended with this error in the next report."""
        self._ready.append(SequenceOutput(request_id, [], RequestStatus.FINISHED_ERROR.value, error=str(error)))

    def abort(self, request_ids: list[str]) -> None:
        """Free these requests' blocks now. No output is sent for them."""
        self._grammars.forget(request_ids)
        self._scheduler.abort(request_ids)
        self._announced.difference_update(request_ids)

    def report_state(self, *, enabled: bool) -> None:
        """Report prefix keys, load and dispatches with every step from now on, or stop."""
        if self._stream is not None and not enabled:
            self._stream.close()
            self._stream = None
        elif self._stream is None and enabled:
            self._stream = StreamReporter(self._scheduler, lambda: [card.name for card in self._adapters.cards])

    def note_dispatch(self, dispatch: Dispatch) -> None:
        """Acknowledge a dispatch whose request was rejected before it reached the core."""
        if self._stream is not None:
            self._stream.note_dispatch(dispatch)

    # --- one step -------------------------------------------------------------------------------------------------

    def step(self, take_in: Callable[[], None] = lambda: None) -> StepOutputs:
        """Run one step and report it. An engine without work reports only its state.

        With overlapping steps, it returns with the next step in flight. If that step is scheduled after this one's
        output, `take_in` is called first: it may add and abort requests, so that new ones do not wait for one more
        step.
        """
        started = self._clock()
        for request in self._grammars.take_ready():
            self._queue(request)
        self._abort_past_drain_deadline(started)
        self._fill_pipeline(started)
        if not self._in_flight:
            return self.report()
        in_flight = self._in_flight.popleft()
        ahead = self._prepare(self._clock()) if self._schedules_ahead else None
        in_flight.choose()
        follower = self._dispatch_follower(ahead, in_flight)
        result = in_flight.result()
        self._process_output(in_flight, result)
        step, seconds = in_flight.step, self._clock() - in_flight.started
        del in_flight  # and the logits that it was computed from: the next step needs their room
        if self._schedules_after_output:
            take_in()
            ahead = self._prepare(self._clock())
        if follower is None:
            self._dispatch(ahead)
        else:
            self._execution.begin_masks(follower)
            follower.started = self._clock()  # until now the device was busy with the step before
        return self._report(step, result, seconds)

    def _fill_pipeline(self, now: float) -> None:
        """Dispatch steps until one per pipeline stage is in flight, while there is work."""
        while len(self._in_flight) < self._execution.num_stages:
            step = self._prepare(now) or self._execution.prepare_idle()
            if step is None:
                return
            self._dispatch(step)

    @property
    def _schedules_ahead(self) -> bool:
        """Drafts continue the newest token: with speculation a step is scheduled when the one before has landed."""
        return self._execution.overlaps and not self._scheduler.policy.num_speculative_tokens

    @property
    def _schedules_after_output(self) -> bool:
        """True with speculation on an asynchronous device: it computes while the host reports, sends and receives."""
        return self._execution.begins_asynchronously and self._scheduler.policy.num_speculative_tokens > 0

    def _prepare(self, now: float) -> PreparedStep | None:
        """Return the next step's batch. None if nothing can run."""
        if self._lifecycle.is_frozen:
            return None
        if self._deferred or self._execution.mask_seconds > MASK_BUDGET_SECONDS / 2:
            self._deferred = self._mask_budget.deferred(self._scheduler.running_with_grammar())
        batch = self._scheduler.schedule(now, self._deferred)
        if self._stream is not None:
            self._stream.scheduled(batch)
        if batch.preempted:
            self._preemption.warn(batch.preempted, now)
        if not batch.sequences:
            return None
        return self._execution.prepare(batch, depth=self._scheduler.policy.num_speculative_tokens)

    def _dispatch_follower(self, step: PreparedStep | None, in_flight: InFlightStep) -> InFlightStep | None:
        """Queue a step after the one that is being computed, if possible, so that the device never idles."""
        if step is None or not self._execution.can_follow(step, in_flight):
            return None
        follower = self._execution.begin_after(step, self._clock(), in_flight)
        self._in_flight.append(follower)
        return follower

    def _dispatch(self, step: PreparedStep | None) -> None:
        if step is not None:
            self._in_flight.append(self._execution.begin(step, self._clock()))

    def _process_output(self, in_flight: InFlightStep, result: StepResult) -> None:
        """Deliver a completed step's tokens to its requests."""
        batch, now = in_flight.step.batch, self._clock()
        scores = iter(result.prompt_logprobs)
        for request, position, count in in_flight.step.scoring:
            request.note_prompt_logprobs(position, list(islice(scores, count)))
        if in_flight.step.speculates:
            for request, tokens in zip(batch.sampling, result.token_ids, strict=True):
                if request.grammar is not None and isinstance(tokens, list):
                    _end_with_grammar(request.grammar, tokens)
        failed = {batch.sampling[place]: failure for place, failure in result.failed.items()}
        self._end_failed(failed | self._accumulate_pooled(in_flight.step, result))
        pooled = [request for request in batch.pooling if not request.status.is_finished]
        notable = self._scheduler.process_output(batch, result.token_ids, now)
        self._preemption.measure(in_flight, result, now)
        self._report_tokens(batch.sampling, result, notable)
        self._ready += map(_pooled_output, pooled)
        if self._execution.proposes:
            self._execution.propose_next(
                [request for request in batch.sampling if not request.status.is_finished],
                self._scheduler.policy.num_speculative_tokens,
            )

    def _accumulate_pooled(self, step: PreparedStep, result: StepResult) -> dict[Request, Failure]:
        """Add the step's hidden states to pooling requests. Return requests whose result is not a number."""
        if result.pooled is None:
            return {}
        failed: dict[Request, Failure] = {}
        for tokens, row in zip(step.pooling, result.pooled, strict=True):
            if is_finite(row):
                add_up(tokens, row)
            else:
                failed[tokens[0]] = Failure.NAN
        return failed

    def _report_tokens(self, sampling: list[Request], result: StepResult, notable: Mapping[int, Sampled]) -> None:
        """Report the new tokens of these requests. Nearly all have one more token and nothing else: those go in
        columns, unless another step completed since the last report, because its outputs must come first.
        """
        self._num_processed_steps += 1
        if self._num_processed_steps > 1:
            self._flush_plain_tokens()
        before, ids = self._plain_before
        if sampling and self._num_processed_steps == 1 and not notable and before == sampling:
            self._plain = PlainTokens(_single(result.token_ids), ids)
            return
        ids, places, announced = [], [], self._announced
        for place, (request, new) in enumerate(zip(sampling, result.token_ids, strict=True)):
            entry = notable.get(place)
            if (
                entry is None
                and request.is_plain
                and request.request_id in announced
                and self._num_processed_steps == 1
            ):
                ids.append(request.request_id)
                places.append(place)
                continue
            entry = entry or (request, new, None)
            if entry[1] != []:  # else it ended while the step was in flight
                self._ready.append(self._output(self._follow_grammar(entry), result.logprobs[place]))
        self._plain_before = (sampling, ids) if len(ids) == len(sampling) else ([], [])
        if ids:
            self._plain = PlainTokens(_single([result.token_ids[place] for place in places]), ids)

    def _end_failed(self, failed: Mapping[Request, Failure]) -> None:
        """End requests for which no token could be chosen, and remove their blocks from the prefix cache."""
        if failed:
            self._flush_plain_tokens()
        for request, failure in failed.items():
            if request.status.is_finished:
                continue
            is_ours = failure is Failure.NAN
            request.error = NAN_ERROR if is_ours else NOTHING_LEFT_ERROR
            request.error = request.error if request.pooling is None else NAN_POOLED_ERROR
            logger.log(logging.ERROR if is_ours else logging.INFO, "request %s: %s", request.request_id, request.error)
            if is_ours:
                self._scheduler.invalidate_blocks(request)
            self._scheduler.abort([request.request_id], RequestStatus.FINISHED_ERROR)
            self._announced.discard(request.request_id)
            self._failed[failure.value] = self._failed.get(failure.value, 0) + 1
            self._ready.append(
                SequenceOutput(
                    request.request_id,
                    [],
                    RequestStatus.FINISHED_ERROR.value,
                    first_scheduled_time=request.first_scheduled_time,
                    num_preemptions=request.num_preemptions,
                    error=request.error,
                    is_engines_fault=is_ours,
                )
            )

    def _flush_plain_tokens(self) -> None:
        """Convert plain tokens to single outputs before further outputs of the same requests, to keep their order."""
        if self._plain is not None:
            self._ready += self._plain.as_outputs()
            self._plain = None

    def _drain_in_flight(self) -> None:
        """Complete all steps in flight: moving blocks or weights needs an idle device."""
        while self._in_flight:
            in_flight = self._in_flight.popleft()
            self._process_output(in_flight, in_flight.result())

    def report(self) -> StepOutputs:
        """Return the current state and all unreported outputs, without a step."""
        return self._report(None, StepResult(), 0.0)

    def _report(self, step: PreparedStep | None, result: StepResult, seconds: float) -> StepOutputs:
        """Report completed outputs of a step and its duration, measured until its output was processed because the next
        step may have started since.
        """
        self._lifecycle.on_step_end()
        request_outputs, self._ready = self._ready, []
        plain, self._plain, self._num_processed_steps = self._plain, None, 0
        now = self._clock()
        stats = step_stats(step, result, self._scheduler, self._kv_cache, self._block_bytes)
        stats.time, stats.step_seconds = now, seconds
        self._longest_step = max(self._longest_step, math.ceil(stats.step_seconds))
        stats.num_deferred = self._grammars.num_waiting
        stats.failed_requests, self._failed = self._failed, {}
        stats.config_generation = self._live.generation
        stats.wire_bytes = self._runner.take_wire_bytes()
        note_graphs(stats, self._runner.take_graph_counts())
        stats.expert_balance = None if self._runner.balancer is None else self._runner.balancer.take_report()
        if now - self._last_report >= REPORT_SECONDS:
            self._last_report = now
            stats.memory_bytes = self.ledger().by_kind()
            stats.config_values = self._live.numbers()
            if self._adapters.max_loras is not None:
                stats.adapters = AdaptersInUse(self._adapters.max_loras, *self._scheduler.adapter_names())
        self._note_rate(stats)
        state = None if self._stream is None else self._stream.report(step, stats, self._in_flight, now)
        return StepOutputs(request_outputs, stats, plain, state)

    def _follow_grammar(self, sampled: Sampled) -> Sampled:
        """Move a request's grammar on by its new token. Its end ends the request, also before min_tokens; an error too,
        with finish_reason error.
        """
        request, token_ids, finished = sampled
        grammar = request.grammar
        if grammar is None:
            return sampled
        grammar.accept(as_list(token_ids))
        if grammar.error is not None:
            request.error = _grammar_error_message(request.sampling, grammar.error)
            logger.warning("request %s ends: %s", request.request_id, request.error)
            ended = RequestStatus.FINISHED_ERROR
        elif grammar.is_complete:
            ended = RequestStatus.FINISHED_STOPPED
        else:
            return sampled
        if finished is None:
            self._scheduler.abort([request.request_id], ended)
        return request, token_ids, ended

    def _output(self, sampled: Sampled, logprobs: TokenLogprobs | list[TokenLogprobs] | None) -> SequenceOutput:
        request, new, finished = sampled
        token_ids = as_list(new)
        positions = None if logprobs is None else as_list(logprobs)[: len(token_ids)]
        output = SequenceOutput(request.request_id, token_ids, logprobs=positions)
        if request.request_id not in self._announced:
            self._announced.add(request.request_id)
            output.first_scheduled_time = request.first_scheduled_time
            output.num_cached_tokens = request.num_cached_tokens
            output.num_host_cached_tokens = request.num_host_cached_tokens
            output.prompt_logprobs = request.take_prompt_logprobs()
        if finished is not None:
            self._announced.discard(request.request_id)
            output.finish_reason = finished.value
            output.stop_token_id = request.stop_token_id
            output.ends_with_text = (
                finished is RequestStatus.FINISHED_STOPPED
                and request.grammar is not None
                and token_ids[-1] not in request.end_token_ids
                and token_ids[-1] not in self._runner.facts.eos_token_ids
            )
            output.num_preemptions = request.num_preemptions
            output.error = request.error
        return output

    def _abort_past_drain_deadline(self, now: float) -> None:
        if self._drain_deadline is not None and now >= self._drain_deadline:
            self._abort_everything()

    def _abort_everything(self) -> None:
        """End all requests; the next report contains their outputs."""
        self._flush_plain_tokens()
        unbuilt = self._grammars.forget(self._grammars.waiting_request_ids())
        aborted = self._scheduler.abort(self._scheduler.unfinished_request_ids())
        self._announced.clear()
        self._ready += [SequenceOutput(r.request_id, [], RequestStatus.FINISHED_ABORTED.value) for r in unbuilt]
        self._ready += [
            SequenceOutput(request.request_id, [], request.status.value, num_preemptions=request.num_preemptions)
            for request in aborted
        ]

    # --- live configuration ---------------------------------------------------------------------------------------

    def patch_config(self, call: PatchConfig) -> tuple[int, dict[str, Any]]:
        """Validate and apply one PATCH between two steps. Return HTTP status and body (docs/reference/contract.md
        section 2).
        """
        before = self._live
        after, status, answer = before.patch(
            call.values,
            if_match=call.if_match,
            dry_run=call.dry_run,
            change_id=f"cfg-{uuid.uuid4().hex[:12]}",
            applied_at_step=self._scheduler.next_step,
        )
        if after is not before:
            refusal = self._map_additional_blocks(after)
            if refusal is not None:
                return 422, refusal.to_json()
            self._live = after
            self._apply(before)
            self._is_prepared = False
            self._last_report = -REPORT_SECONDS
        return status, answer

    def prepare_patch(self, call: PreparePatch) -> tuple[int, dict[str, Any]]:
        """Validate a PATCH and map the memory that it needs, so that it can no longer fail. Return HTTP status and body
        as for a PATCH.
        """
        after, status, answer = self._live.patch(
            call.values, if_match=call.if_match, dry_run=False, change_id="", applied_at_step=0
        )
        refusal = self._map_additional_blocks(after) if after is not self._live else None
        if refusal is not None:
            return 422, refusal.to_json()
        self._is_prepared = status == 200
        return status, answer

    def abandon_patch(self) -> None:
        """Unmap the memory of a prepared PATCH that is not applied."""
        self._is_prepared = False
        if self._lifecycle.has_kv_cache and self._kv_cache.num_blocks > self._scheduler.num_blocks_total:
            self._drain_in_flight()
            self._kv_cache.unmap_above(self._scheduler.num_blocks_total)

    def adopt_config(self, values: dict[str, Any], generation: int) -> tuple[int, dict[str, Any]]:
        """Apply the configuration of the other cores. Return HTTP status and body as for a PATCH."""
        status, body = self.patch_config(PatchConfig(values))
        if status == 200:
            self._live = replace(self._live, generation=generation)
        return status, body

    def _apply(self, before: LiveConfig) -> None:
        values = self._live.values
        set_log_level(values.log_level)
        self._scheduler.set_policy(values.policy())
        if values.swap_space_bytes != before.values.swap_space_bytes:
            self.set_swap_space(values.swap_space_bytes)
        if values.kv_offload_bytes != before.values.kv_offload_bytes:
            self._scheduler.resize_host_cache(values.kv_offload_bytes // self._formula.widest_block_bytes)
        if values.gpu_memory_utilization != before.values.gpu_memory_utilization:
            formula = self._formula.at(values.gpu_memory_utilization)
            self._resize_kv(min(formula.num_blocks, self._live.envelope.num_blocks_cap))
            self._formula = formula

    def _map_additional_blocks(self, after: LiveConfig) -> FieldError | None:
        """Map the additional blocks of this configuration on every rank or on none. Only this part can fail, so it runs
        first. No step is in flight afterwards.
        """
        self._drain_in_flight()
        wanted = min(self._formula.at(after.values.gpu_memory_utilization).num_blocks, after.envelope.num_blocks_cap)
        fixed = after.envelope.kv_fixed_by is not None
        if not self._lifecycle.has_kv_cache or fixed or wanted <= self._kv_cache.num_blocks:
            return None
        try:
            self._kv_cache.map_blocks(wanted)
        except MemoryError as error:
            name, message = "gpu_memory_utilization", f"not enough device memory ({error}); nothing changed"
            return FieldError(name, after.numbers()[name], message, nearest=self._live.numbers()[name])
        return None

    def _resize_kv(self, num_blocks: int) -> None:
        """Map before blocks are handed out; copy, then unmap, after they are taken back. Asleep nothing is mapped, and
        the wake-up maps as many as there are then.
        """
        if not self._lifecycle.has_kv_cache:
            self._scheduler.resize_kv(num_blocks, self._clock())
            return
        if num_blocks > self._kv_cache.num_blocks:
            self._kv_cache.map_blocks(num_blocks)
        resized = self._scheduler.resize_kv(num_blocks, self._clock())
        self._execution.swap_out(resized.swap_out)
        self._kv_cache.copy_blocks(list(resized.moves))
        if num_blocks < self._kv_cache.num_blocks:
            self._kv_cache.unmap_above(num_blocks)

    def close(self) -> None:
        """End the engine's other ranks, if it has any."""
        self._runner.close()

    def set_swap_space(self, num_bytes: int) -> None:
        """Set how much of the reserved swap space is used. The caller has drained steps in flight."""
        self._scheduler.resize_swap_space(num_bytes // self._formula.widest_block_bytes)

    def lifecycle(self, call: LifecycleCall) -> tuple[int, dict[str, Any]]:
        """Pause, resume, sleep, wake up, or report the state. Return HTTP status and body."""
        lifecycle = self._lifecycle
        self._adapters.sweep()
        try:
            match call:
                case Pause(mode):
                    lifecycle.pause(mode)
                case Resume():
                    lifecycle.resume()
                case Sleep(level, mode):
                    lifecycle.sleep(level, mode)
                case WakeUp(tags):
                    lifecycle.wake_up(tags)
                    self._end_without_adapter()
        except LifecycleRejected as refusal:
            return 409, {"message": str(refusal)}
        self._last_report = -REPORT_SECONDS
        return 200, lifecycle.to_json()

    def _end_without_adapter(self) -> None:
        """End the requests whose adapter could not be read again with the weights."""
        if not self._lifecycle.has_weights:
            return
        lost = set(self._adapters.drop_lost())
        for request in [*self._scheduler.unfinished(), *self._grammars.waiting_requests()] if lost else ():
            if request.adapter in lost:
                self._grammars.forget([request.request_id])
                self._scheduler.abort([request.request_id])
                self._announced.discard(request.request_id)
                error = f"the adapter {request.adapter.name} could not be read when the engine woke up; load it again"
                reason = RequestStatus.FINISHED_ERROR.value
                self._ready.append(SequenceOutput(request.request_id, [], reason, error=error, is_engines_fault=True))

    def load_adapter(self, call: LoadLora) -> tuple[int, dict[str, Any]]:
        """Serve another adapter, on every rank or on none. Return HTTP status and body. An adapter is a client's input:
        no error of reading it ends the engine.
        """
        if not self._lifecycle.has_weights:
            return 409, {"message": "the engine sleeps and has no weights: wake it up first"}
        self._drain_in_flight()
        try:
            self._adapters.load(call.name, call.folder)
        except ConfigError as error:
            return 400, {"message": str(error)}
        except EngineDead:
            raise
        except Exception as error:
            logger.exception("adapter %s: not loaded", call.name)
            return 500, {"message": f"adapter {call.name}: not loaded: {type(error).__name__}: {error}"}
        return 200, {}

    def unload_adapter(self, call: UnloadLora) -> tuple[int, dict[str, Any]]:
        """Serve an adapter to no new request. HTTP status and body."""
        try:
            self._adapters.unload(call.name)
        except ConfigError as error:
            return 404, {"message": str(error)}
        return 200, {}

    def _adapters_in_use(self) -> set[Adapter]:
        """Return the adapters of all unfinished requests."""
        return adapters_of([*self._scheduler.unfinished(), *self._grammars.waiting_requests()])

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> tuple[int, dict[str, Any]]:
        """Forget all cached blocks. While blocks are in use, this requires `reset_running_requests`, which preempts.
        Return HTTP status and body.
        """
        self._drain_in_flight()
        if reset_running_requests:
            self._scheduler.preempt_all(self._clock())
        in_use = self._scheduler.num_blocks_used
        if in_use:
            message = f"{in_use} KV blocks are in use; set reset_running_requests to preempt running requests, or wait"
            return 409, {"message": message, "reset": False}
        self._scheduler.reset_prefix_cache()
        return 200, {"reset": True}

    def follow_waves(self, announce: Callable[[int], None]) -> None:
        """Set the callback that announces a wave that this core begins to the other data-parallel cores
        (parallel/wave.py).
        """
        if self._runner.wave is not None:
            self._runner.wave.announce = announce

    def finish_wave(self) -> None:
        """Abort all requests and take part in the current wave until it is over for all cores, before
        this core ends.
        """
        if self._execution.is_needed:
            self._scheduler.abort(self._scheduler.unfinished_request_ids())
        while self._execution.is_needed:
            self.step()

    def join_wave(self, number: int) -> None:
        """Join a wave that another core has begun."""
        if self._runner.wave is not None:
            self._runner.wave.join(number)

    def config(self) -> dict[str, Any]:
        """Return the body of GET /admin/v1/config."""
        return self._live.describe()

    def layout(self) -> LayoutReport:
        return self._layout

    def unfinished(self) -> dict[str, Any]:
        """Return waiting and running requests as numbers: age in seconds, prompt, cached and output tokens of each
        generating request.
        """
        now = self._clock()
        return {
            "unfinished": [
                [now - r.arrival_time, r.num_prompt_tokens, r.num_cached_tokens, r.num_output_tokens]
                for r in self._scheduler.unfinished()
                if r.pooling is None
            ]
        }

    def drain(self, deadline_seconds: float) -> dict[str, Any]:
        """Let running requests finish until the deadline, counted from now, then abort the rest. Return the remaining
        work. Later calls report progress; they may shorten the deadline but not extend it.
        """
        now, scheduler = self._clock(), self._scheduler
        self._drain_deadline = min(now + deadline_seconds, self._drain_deadline or math.inf)
        left = self._drain_deadline - now
        work = RemainingWork(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + self._grammars.num_waiting,
            output_tokens=scheduler.remaining_tokens(),
            longest_output=scheduler.longest_remaining(),
            prompt_tokens=scheduler.num_waiting_tokens,
        )
        eta = work.eta_seconds(self._tokens_per_second, scheduler.costs.recompute_seconds_per_token)
        return {
            "remaining_requests": work.num_running + work.num_waiting,
            "running_requests": work.num_running,
            "waiting_requests": work.num_waiting,
            "remaining_tokens": work.output_tokens,
            "remaining_prompt_tokens": work.prompt_tokens,
            "eta_seconds": max(0.0, left if eta is None else min(left, eta)),
            "deadline_seconds": max(0.0, left),
        }

    def state(self) -> EngineState:
        """Return the engine state that API servers follow."""
        values = self._live.values
        return EngineState(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_waiting_late=self._scheduler.num_waiting_late,
            max_num_seqs=values.max_num_seqs,
            max_num_queued_reqs=values.max_num_queued_reqs,
            max_num_queued_tokens=values.max_num_queued_tokens,
            disable_log_stats=values.disable_log_stats,
            stats_interval_seconds=values.stats_interval_seconds,
            log_level=values.log_level,
            longest_step_seconds=self._longest_step,
            adapters=self._adapters.cards,
            pause_mode=self._lifecycle.pause_mode,
            sleep_level=self._lifecycle.sleep_level,
            reports_state=self._stream is not None,
        )

    # --- reports --------------------------------------------------------------------------------------------------

    def ledger(self) -> Ledger:
        """Return the device memory by owner and the driver's count."""
        return rank_ledger(
            self._formula,
            self._device,
            self._kv_cache,
            blocks_used=self._scheduler.num_blocks_used,
            has_weights=self._lifecycle.has_weights,
            # Only on the CPU is it in device memory; checking its pages takes milliseconds.
            untouched_swap_bytes=self._execution.untouched_swap_bytes if self._device.kind == "cpu" else 0,
        )

    def memory(self) -> dict[str, Any]:
        """Return the body of GET /admin/v1/memory: the core's own rank, and all of them."""
        own = self.ledger()
        if self._runner.drives_others:
            self._drain_in_flight()  # they answer after finishing earlier messages
        ledgers = self._runner.ledgers(own)
        return own.to_json() | {
            "total": total_of(list(ledgers.values())),
            "ranks": [{"rank": rank, **ledger.to_json()} for rank, ledger in sorted(ledgers.items())],
        }

    def memory_plan(self, body: Any) -> tuple[int, dict[str, Any]]:
        """Return HTTP status and body with the memory plan of another configuration."""
        return plan_memory(replace(self._plan, formula=self._formula), body)

    def _note_rate(self, stats: StepStats) -> None:
        if stats.step_seconds > 0 and stats.num_generation_tokens:
            rate = stats.num_generation_tokens / stats.step_seconds
            old = self._tokens_per_second or rate
            self._tokens_per_second = old + RATE_WEIGHT * (rate - old)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless scheduler, block tables and KV cache agree."""
        self._scheduler.check_integrity()
        mapped = self._scheduler.num_blocks_total if self._lifecycle.has_kv_cache else 0
        is_more = self._is_prepared and self._kv_cache.num_blocks > mapped
        if mapped != self._kv_cache.num_blocks and not is_more:
            raise IntegrityError(
                f"the scheduler hands out {self._scheduler.num_blocks_total} blocks, but {self._kv_cache.num_blocks} "
                f"are mapped"
            )


def _pooled_output(request: Request) -> SequenceOutput:
    """Return the only output of a pooling request, which has ended."""
    assert request.pooling is not None
    return SequenceOutput(
        request.request_id,
        [],
        request.status.value,
        first_scheduled_time=request.first_scheduled_time,
        num_preemptions=request.num_preemptions,
        num_cached_tokens=request.num_cached_tokens,
        num_host_cached_tokens=request.num_host_cached_tokens,
        pooled=finished(request.hidden_sum, request.num_summed_tokens, request.pooling),
    )


def as_list(value: Item | list[Item]) -> list[Item]:
    return value if isinstance(value, list) else [value]


def _grammar_error_message(sampling: Sampling, error: str) -> str:
    """Return the error for a stuck grammar. If other restrictions exclude all tokens that the grammar allows, the
    message names them, because the client can change them.
    """
    others = {
        "allowed_token_ids": sampling.allowed_tokens,
        "bad_words": sampling.bad_words,
        "logit_bias": sampling.logit_bias,
    }
    given = [name for name, value in others.items() if value]
    hint = f"; {' and '.join(given)} may leave no token that the grammar allows" if given else ""
    return f"the output cannot go on as its grammar demands: {error}{hint}"


def _single(token_ids: Sequence[int | list[int]]) -> list[int]:
    """Return the tokens of a step without drafts."""
    return cast("list[int]", token_ids)


def _end_with_grammar(grammar: Grammar, token_ids: list[int]) -> None:
    """Remove tokens sampled after a draft that completed the grammar: without drafts the request ends there."""
    if len(token_ids) > 1:
        ahead = grammar.copy()
        ahead.accept(token_ids[:-1])
        if ahead.is_complete:
            token_ids.pop()
