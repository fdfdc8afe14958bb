"""Execution of batches: copies swapped blocks, runs the model and samples, so that the caller can schedule meanwhile.

On the CPU a worker thread computes; on CUDA the device computes asynchronously, and the host waits only for results. A
step is dispatched with all its inputs as plain values: the scheduler may reuse its sequences immediately. On CUDA a
step may be dispatched before the previous one has completed: tokens known only on the device are fed there. If a
grammar must see the newest token first, the forward pass is queued, and sampling is queued after it when the masks are
ready.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from trimtab_engine.device.swap_cache import NOTHING_SWAPPED, Pairs, SwapCache, Swapped
from trimtab_engine.messages.requests import SpeculationCounts
from trimtab_engine.runner.decode_step import DecodeStep
from trimtab_engine.runner.graphs.device_steps import TokensInFlight
from trimtab_engine.runner.graphs.step_buffers import Feed
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.sampling.choice_columns import Array, PlainRows
from trimtab_engine.sampling.failures import Failure
from trimtab_engine.sampling.logprobs import ScoresInFlight
from trimtab_engine.sampling.pooling import PooledInFlight, TokensOfRequest
from trimtab_engine.sampling.sampler import SampledTokens, TokenMasks, sample
from trimtab_engine.sampling.token_table import DeviceRow
from trimtab_engine.scheduling.batch import Batch, ScheduledSequence
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import TokenLogprobs
from trimtab_engine.scheduling.step_inputs import NO_INPUTS, StepInputs, Unknown, num_scored, pooled_tokens
from trimtab_engine.speculative.proposer import Proposals, Proposer
from trimtab_engine.speculative.rejection import verify
from trimtab_engine.structured.masks import MaskedRows, MaskMaker


@dataclass(slots=True)
class StepResult:
    """Result of a batch: for each request of batch.sampling its new token, or a list of tokens after drafts."""

    token_ids: list[int | list[int]] = field(default_factory=list)
    logprobs: list[TokenLogprobs | list[TokenLogprobs] | None] = field(default_factory=list)
    swapped: Swapped = NOTHING_SWAPPED
    """Copies that have ended, of this step or of one before."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """For each entry of step.scoring as many as it requests."""
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    failed: dict[int, Failure] = field(default_factory=dict)
    """Requests that no token could be chosen for, by their place in batch.sampling. Their token_ids mean nothing."""
    pooled: Array | None = None
    """[entries of step.pooling, hidden_size] float32; None without any."""


@dataclass(frozen=True, slots=True)
class ExtraOutputs:
    """Outputs of a step other than tokens, possibly still being copied."""

    scores: ScoresInFlight | None
    pooled: PooledInFlight | None

    @classmethod
    def of(cls, runner: ModelRunner) -> "ExtraOutputs":
        """Return the extra outputs of the step that the runner has just run or started."""
        return cls(runner.take_scores(), runner.take_pooled())

    def put_into(self, result: StepResult) -> StepResult:
        """Store the outputs in `result`, waiting for copies."""
        result.prompt_logprobs = [] if self.scores is None else self.scores.result()
        result.pooled = None if self.pooled is None else self.pooled.result()
        return result


@dataclass(slots=True)
class PreparedStep:
    """A batch as plain values. `unknown`: where in inputs.token_ids a token belongs that the step before samples."""

    batch: Batch
    kind: str
    num_requests: int
    num_context_tokens: int
    num_attended_tokens: int
    inputs: StepInputs | DecodeStep
    unknown: list[Unknown]
    scoring: list[tuple[Request, int, int]]
    """(request, position, count): prompt tokens whose successors are scored, from that position on."""
    pooling: list[TokensOfRequest]
    speculates: bool = False
    """True if its drafts, and so its inputs, are made when it starts."""

    def fill_in(self) -> None:
        """Insert the tokens of the previous, completed step. A request that ended in it computes an unused token."""
        if isinstance(self.inputs, DecodeStep):
            self.inputs.fill_in()
            return
        for index, request, position in self.unknown:
            tokens = request.token_ids
            self.inputs.token_ids[index] = tokens[position] if position < len(tokens) else 0


@dataclass(frozen=True, slots=True)
class SamplingFeatures:
    """Sampling features needed by some requests together."""

    sampling: list[Request]
    is_plain: bool
    is_greedy: bool
    has_grammar: bool

    @classmethod
    def of(cls, sampling: list[Request]) -> "SamplingFeatures":
        likeliest = False not in [request.is_greedy for request in sampling]
        plain = likeliest or False not in [request.is_plain for request in sampling]
        has_grammar = not plain and any(request.grammar is not None for request in sampling)
        return cls(sampling, plain, likeliest, has_grammar)


@dataclass(slots=True)
class InFlightStep:
    """A step that is being computed. Times are the engine's clock."""

    step: PreparedStep
    started: float
    result: Callable[[], StepResult]
    """Wait for the step and return its result."""
    feeds: bool = False
    """True if its tokens stay on the device: after choose() the next step may start before this one completes."""
    late: "DeferredSampling | None" = None
    """Deferred sampling. None if sampling was queued with the step."""

    def choose(self) -> None:
        """Queue the sampling of its tokens."""
        if self.late is not None:
            self.late.choose()


@dataclass(slots=True)
class DeferredSampling:
    """Sampling for a step whose grammars must see the newest tokens first. The forward pass is queued, and the device
    computes while the masks are built; then sampling is queued once.
    """

    queue: Callable[[TokenMasks | None], TokensInFlight] | None
    """Callback that holds the logits; cleared after its single call."""
    masks: Future[TokenMasks] | None = None
    """None if no unfinished request has a grammar."""
    tokens: TokensInFlight | None = None

    def choose(self) -> TokensInFlight:
        """Wait for the masks, not for the device, and queue sampling. The logits are released."""
        if self.tokens is None:
            assert self.queue is not None
            self.tokens = self.queue(None if self.masks is None else self.masks.result())
            self.queue = None
        return self.tokens


class Execution:
    """Runs batches in order. `swap_cache` holds swapped-out blocks; None without swap space. `proposer` makes the
    drafts that batches verify.

    `on_stream`: the device works asynchronously, so begin() only starts work. With several pipeline stages several
    steps can be in flight: each is sent to the first stage immediately, and this rank, of the last stage, computes its
    part when the result is read.
    """

    def __init__(
        self,
        runner: ModelRunner,
        swap_cache: SwapCache | None,
        *,
        in_thread: bool,
        num_stages: int = 1,
        proposer: Proposer | None = None,
        on_stream: bool = False,
    ) -> None:
        self._runner = runner
        self.num_stages = num_stages
        self._proposer = proposer
        self._depth = 0
        self._swap_cache = swap_cache
        self._masks = MaskMaker()
        self._features = SamplingFeatures.of([])
        self._on_stream = on_stream
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="execution") if in_thread else None

    @property
    def overlaps(self) -> bool:
        """True if a step runs while the next one is scheduled."""
        return self._thread is not None or self._on_stream

    @property
    def begins_asynchronously(self) -> bool:
        """True if begin() leaves any step to the device: all request state has been read and no drafts are awaited."""
        return self._on_stream and (self._proposer is None or not self._proposer.waits_for_device)

    @property
    def mask_seconds(self) -> float:
        """Duration of the last step's token masks."""
        return self._masks.seconds

    @property
    def untouched_swap_bytes(self) -> int:
        """Swap space that was never written, which the kernel does not count as used."""
        return 0 if self._swap_cache is None else self._swap_cache.untouched_bytes

    def prepare_idle(self) -> PreparedStep | None:
        """Return a step without a batch if data-parallel cores in lockstep need this core's part. None otherwise."""
        wave = self._runner.wave
        return self.prepare(Batch(0, [], 0, [])) if wave is not None and wave.is_on else None

    @property
    def is_needed(self) -> bool:
        """True if other cores wait for this core's part of a step."""
        return self._runner.wave is not None and self._runner.wave.is_on

    def prepare(self, batch: Batch, *, depth: int = 0) -> PreparedStep:
        """Return the batch's inputs. Tokens that a step in flight samples are left open. `depth` is the live number of
        drafts per request; above 0 no step may be in flight.
        """
        speculates = self._proposer is not None and depth > 0
        inputs, unknown = (NO_INPUTS, []) if speculates else self._runner.lay_out(batch)
        if isinstance(inputs, DecodeStep):
            context = inputs.num_context_tokens
            return PreparedStep(batch, "decode", len(batch.sequences), context, context, inputs, [], [], [])
        if not speculates:
            _add_items(inputs, batch)
        scoring = [
            (s.request, s.start, num_scored(s)) for s in batch.sequences if not s.request.is_plain and num_scored(s)
        ]
        pooling: list[TokensOfRequest] = []
        if batch.computes_prompts:
            found = [(s.request, pooled) for s in batch.sequences if (pooled := pooled_tokens(s)) is not None]
            pooling = [(request, position, count) for request, (position, count) in found]
        kind, context = batch.kind, batch.num_context_tokens
        # A decode step computes one token of a sequence, which attends to all of it: the two sums are one.
        attended = (
            context if kind == "decode" and batch.num_tokens == len(batch.sequences) else batch.num_attended_tokens
        )
        num_requests = len(batch.sequences)
        return PreparedStep(batch, kind, num_requests, context, attended, inputs, unknown, scoring, pooling, speculates)

    def can_follow(self, step: PreparedStep, in_flight_step: InFlightStep) -> bool:
        """Return True if its forward pass may start before the step in flight completes: it needs only that step's
        tokens, which are on the device.
        """
        return in_flight_step.feeds and not step.speculates and self._samples_on_device(step.batch)

    def _samples_on_device(self, batch: Batch) -> bool:
        steps = self._runner.steps
        if steps is None or steps.sampler is None:
            return False
        return self._sampling_features_of(batch).is_plain or steps.sampler.can_sample(batch.sampling)

    def _sampling_features_of(self, batch: Batch) -> SamplingFeatures:
        """Return the sampling features of these requests; cached while the requests stay the same."""
        if self._features.sampling != batch.sampling:
            self._features = SamplingFeatures.of(batch.sampling)
        return self._features

    def _rows(self, step: PreparedStep, in_flight: Sequence[Request] = ()) -> "Rows":
        """Return the rows sampled on the device. `in_flight`: requests whose newest token is sampled by an incomplete
        step.
        """
        asked = self._sampling_features_of(step.batch)
        if asked.is_greedy:
            return None
        if asked.is_plain:
            return PlainRows(step.batch.sampling, _ends(step.inputs))
        places = {request: row for row, request in enumerate(in_flight)}
        return [DeviceRow(request, places.get(request)) for request in step.batch.sampling]

    def begin_after(self, step: PreparedStep, started: float, in_flight_step: InFlightStep) -> InFlightStep:
        """Start a step after a step in flight that it can follow."""
        sampled = in_flight_step.step.batch.sampling
        feed: list[tuple[int, int]] = []
        if isinstance(step.inputs, DecodeStep):
            step.inputs.feed_from(sampled)
        else:
            places = {request: row for row, request in enumerate(sampled)}
            feed = [(index, places[request]) for index, request, _ in step.unknown]
        self._announce_swap(step.batch.swap_out, step.batch.swap_in)
        self._runner.send(step.inputs, feed)
        return self._launch(step, started, feed, sampled)

    def begin_masks(self, in_flight_step: InFlightStep) -> None:
        """Compute the allowed tokens of its grammars. All previous steps have completed."""
        if in_flight_step.late is not None:
            in_flight_step.late.masks = self._masks.begin(_masked_requests(in_flight_step.step.batch.sampling))

    def begin(self, step: PreparedStep, started: float) -> InFlightStep:
        """Start computing; all steps before it have landed."""
        step.fill_in()
        self._announce_swap(step.batch.swap_out, step.batch.swap_in)
        if self._on_stream:
            return (
                InFlightStep(step, started, self._speculate(step))
                if step.speculates
                else self._begin_on_stream(step, started)
            )
        if not step.speculates:  # else its inputs are made when the drafts are known
            self._runner.send(step.inputs)
        if self.num_stages > 1:
            return InFlightStep(step, started, partial(self._compute_and_score, step))
        if self._thread is None:
            result = self._compute_and_score(step)
            return InFlightStep(step, started, lambda: result)
        future: Future[StepResult] = self._thread.submit(self._compute_and_score, step)
        return InFlightStep(step, started, future.result)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _begin_on_stream(self, step: PreparedStep, started: float) -> InFlightStep:
        """Start the step. Sample immediately if that needs no host work, otherwise when the result is read."""
        batch = step.batch
        self._runner.send(step.inputs)
        if self._samples_on_device(batch):
            in_flight_step = self._launch(step, started)
            self.begin_masks(in_flight_step)
            return in_flight_step
        masks = self._masks.begin(_masked_requests(batch.sampling))
        self._copy_swapped(batch, step.inputs)
        logits = self._runner.run(step.inputs)
        beside = ExtraOutputs.of(self._runner)

        def wait_for_result() -> StepResult:
            return beside.put_into(self._sample(batch, logits, masks))

        return InFlightStep(step, started, wait_for_result)

    def _launch(
        self, step: PreparedStep, started: float, feed: Feed = (), in_flight: Sequence[Request] = ()
    ) -> InFlightStep:
        """Queue a step on the device, and its sampling unless that must wait for masks. `in_flight`: requests whose
        newest token is sampled by an incomplete step; deferred sampling knows those tokens.
        """
        batch, steps = step.batch, self._runner.steps
        assert steps is not None
        self._copy_swapped(batch, step.inputs)
        late: DeferredSampling | None = None
        tokens: TokensInFlight | None = None
        with torch.inference_mode():
            logits = self._runner.run(step.inputs, feed)
            assert logits is not None  # the engine holds a rank of the last stage
            beside = ExtraOutputs.of(self._runner)
            if self._sampling_features_of(batch).has_grammar:
                late = DeferredSampling(lambda masks: steps.sample(logits, self._rows(step), masks))
            elif batch.sampling:
                tokens = steps.sample(logits, self._rows(step, in_flight))

        def wait_for_result() -> StepResult:
            chosen = tokens if late is None else late.choose()
            return beside.put_into(self._of(SampledTokens([], []) if chosen is None else chosen.result()))

        return InFlightStep(step, started, wait_for_result, feeds=True, late=late)

    def _compute_and_score(self, step: PreparedStep) -> StepResult:
        if step.speculates:
            return self._speculate(step)()
        result = self._compute(step.batch, step.inputs)
        return ExtraOutputs.of(self._runner).put_into(result)

    def _compute(self, batch: Batch, inputs: StepInputs | DecodeStep) -> StepResult:
        masks = self._masks.begin(_masked_requests(batch.sampling))
        self._copy_swapped(batch, inputs)
        return self._sample(batch, self._runner.run(inputs), masks)

    def _sample(self, batch: Batch, logits: torch.Tensor | None, masks: "Future[TokenMasks] | None") -> StepResult:
        assert logits is not None  # the engine holds a rank of the last stage
        if not batch.sampling:
            return StepResult(swapped=self._take_swapped())
        tokens = sample(
            logits,
            batch.sampling,
            eos_token_ids=self._runner.facts.eos_token_ids,
            masks=None if masks is None else masks.result(),
        )
        return self._of(tokens)

    def _of(self, tokens: SampledTokens) -> StepResult:
        return StepResult([*tokens.token_ids], [*tokens.logprobs], self._take_swapped(), failed=tokens.failed)

    @property
    def proposes(self) -> bool:
        """True if there may be drafts."""
        return self._proposer is not None

    def propose_next(self, requests: list[Request], depth: int) -> None:
        """Propose drafts for the next step to continuing requests that got a token in the completed step."""
        if self._proposer is not None and (depth or self._depth):
            self._proposer.prepare(requests, depth)
            self._depth = depth

    def _speculate(self, step: PreparedStep) -> Callable[[], StepResult]:
        """Propose drafts and start computing them; a draft model reads swapped-in blocks. Return a callable that waits
        for the logits, verifies, and returns the result.
        """
        assert self._proposer is not None
        batch = step.batch
        self._copy_swapped(batch, None)  # the draft model tracks its own writes
        proposals = self._proposer.propose(batch)
        masks = self._masks.begin(_masked_rows([sequence for sequence in batch.sequences if sequence.samples]))
        inputs, _ = self._runner.flatten(batch.sequences)
        _add_items(inputs, batch)
        self._runner.send(inputs)
        logits = self._runner.run(inputs)
        assert logits is not None  # the engine holds a rank of the last stage
        beside = ExtraOutputs.of(self._runner)

        def wait_for_result() -> StepResult:
            return beside.put_into(self._verify(batch, inputs, logits, proposals, masks))

        return wait_for_result

    def _verify(
        self,
        batch: Batch,
        inputs: StepInputs,
        logits: torch.Tensor,
        proposals: Proposals,
        masks: Future[TokenMasks] | None,
    ) -> StepResult:
        """Verify a step's drafts and pass the accepted tokens to the proposer."""
        assert self._proposer is not None
        sampling = [sequence for sequence in batch.sequences if sequence.samples]
        if not sampling:
            self._proposer.learn(batch, inputs, {})
            return StepResult(swapped=self._take_swapped())
        verified = verify(
            logits,
            sampling,
            proposals,
            eos_token_ids=self._runner.facts.eos_token_ids,
            masks=None if masks is None else masks.result(),
        )
        new = {s.request: tokens.token_ids for s, tokens in zip(sampling, verified, strict=True)}
        self._proposer.learn(batch, inputs, new)
        result = StepResult([v.token_ids for v in verified], [v.logprobs for v in verified], self._take_swapped())
        result.failed = {i: v.failure for i, v in enumerate(verified) if v.failure is not None}
        for sequence, tokens in zip(sampling, verified, strict=True):
            if sequence.draft_token_ids:
                result.speculation.note(len(sequence.draft_token_ids), len(tokens.token_ids) - 1)
        return result

    def swap_out(self, pairs: Pairs) -> None:
        """Copy blocks out (device, host) between two steps, with none in flight, before any block is moved."""
        self._announce_swap(pairs, [])
        if self._swap_cache is not None:
            self._swap_cache.copy(pairs, [])

    def _announce_swap(self, swap_out: Pairs, swap_in: Pairs) -> None:
        if self._swap_cache is not None:
            self._swap_cache.announce(swap_out, swap_in)

    def _copy_swapped(self, batch: Batch, inputs: StepInputs | DecodeStep | None) -> None:
        """Run this rank's swap copies before the step with these inputs (None means not known yet)."""
        assert self._swap_cache is not None or not batch.swap_out + batch.swap_in  # else the swap space has no blocks
        if self._swap_cache is not None:
            slots = None if inputs is None else inputs.written_slots(self._runner.kv_cache.block_size)
            self._swap_cache.copy(batch.swap_out, batch.swap_in, slots)

    def _take_swapped(self) -> Swapped:
        return NOTHING_SWAPPED if self._swap_cache is None else self._swap_cache.take_swapped()


Rows = Sequence[DeviceRow] | PlainRows | None
"""Rows that a step samples on the device. None if all take the argmax."""


def _add_items(inputs: StepInputs, batch: Batch) -> None:
    """Set the images and videos to drop and compute before the step."""
    if batch.displaced or batch.missing:
        inputs.displaced, inputs.missing = batch.displaced, batch.missing


def _ends(inputs: StepInputs | DecodeStep) -> Array:
    """Return the position of each sampled token."""
    if isinstance(inputs, DecodeStep):
        return inputs.ends
    return np.array([inputs.positions[index] + 1 for index in inputs.sampled], np.int64)


def _masked_requests(sampling: list[Request]) -> list[MaskedRows]:
    """Return the rows of logits of the requests that have a grammar and go on, where each has one row."""
    return [
        MaskedRows(row, request.grammar)
        for row, request in enumerate(sampling)
        if request.grammar is not None and not request.status.is_finished
    ]


def _masked_rows(sampling: list[ScheduledSequence]) -> list[MaskedRows]:
    """Return the rows of logits of the sequences that have a grammar."""
    masked, first = [], 0
    for sequence in sampling:
        if sequence.request.grammar is not None:
            masked.append(MaskedRows(first, sequence.request.grammar, sequence.draft_token_ids))
        first += 1 + len(sequence.draft_token_ids)
    return masked
