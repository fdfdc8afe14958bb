"""Carrying out a batch: copy swapped blocks, run the model, sample. So that the caller can schedule the next step
meanwhile, in a worker thread on the CPU; on CUDA the device itself works on, and nobody waits before the result is
asked for.

A batch takes off with everything that it needs, as plain values: the scheduler may use its sequences again at once.
On CUDA it may take off before the one before it has landed: tokens that only the device knows are fed there. Where a
grammar must see the newest token first, the forward pass is queued so, and the choice behind it when masks are there.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from trimtab_engine.device.swap_cache import NOTHING_SWAPPED, Pairs, SwapCache, Swapped
from trimtab_engine.messages import SpeculationCounts
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
    """What a batch brought: for each request of batch.sampling its new token, or a list of them after drafts."""

    token_ids: list[int | list[int]] = field(default_factory=list)
    logprobs: list[TokenLogprobs | list[TokenLogprobs] | None] = field(default_factory=list)
    swapped: Swapped = NOTHING_SWAPPED
    """Copies that have ended, of this step or of one before."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """For each entry of step.scoring as many as it says."""
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    failed: dict[int, Failure] = field(default_factory=dict)
    """Requests that no token could be chosen for, by their place in batch.sampling. Their token_ids mean nothing."""
    pooled: Array | None = None
    """[entries of step.pooling, hidden_size] float32; None without any."""


@dataclass(frozen=True, slots=True)
class BesideTokens:
    """What a step brings besides tokens, perhaps still on its way."""

    scores: ScoresInFlight | None
    pooled: PooledInFlight | None

    @classmethod
    def of(cls, runner: ModelRunner) -> "BesideTokens":
        """Of the step that it has just run, or begun to run."""
        return cls(runner.take_scores(), runner.take_pooled())

    def put_into(self, result: StepResult) -> StepResult:
        """Wait for it, where there is any."""
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
    """(request, position, how many): prompt tokens whose successors are judged, from that position on."""
    pooling: list[TokensOfRequest]
    speculates: bool = False
    """Its drafts are made final as it begins, and its inputs from them."""

    def fill_in(self) -> None:
        """The step before has landed: put its tokens in. A request that ended in it computes something nobody reads."""
        if isinstance(self.inputs, DecodeStep):
            self.inputs.fill_in()
            return
        for index, request, position in self.unknown:
            tokens = request.token_ids
            self.inputs.token_ids[index] = tokens[position] if position < len(tokens) else 0


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of the tokens of some requests, all taken together."""

    sampling: list[Request]
    is_plain: bool
    takes_likeliest: bool
    has_grammar: bool

    @classmethod
    def of(cls, sampling: list[Request]) -> "Asked":
        likeliest = False not in [request.takes_likeliest for request in sampling]
        plain = likeliest or False not in [request.is_plain for request in sampling]
        has_grammar = not plain and any(request.grammar is not None for request in sampling)
        return cls(sampling, plain, likeliest, has_grammar)


@dataclass(slots=True)
class Flight:
    """A step that is being computed. Times are the engine's clock."""

    step: PreparedStep
    started: float
    result: Callable[[], StepResult]
    """Waits for it."""
    feeds: bool = False
    """Its tokens come to be on the device: once choose() was called the next step may begin, before this one lands."""
    late: "LateChoice | None" = None
    """How its tokens are chosen; None: that was queued with it."""

    def choose(self) -> None:
        """Have the choice of its tokens queued."""
        if self.late is not None:
            self.late.choose()


@dataclass(slots=True)
class LateChoice:
    """The choice of a step's tokens where grammars must see the newest ones first. The forward pass is queued, and the
    device computes while the masks are made; then this is queued behind it, once."""

    queue: Callable[[TokenMasks | None], TokensInFlight] | None
    """It holds the logits, and is gone once it was asked."""
    masks: Future[TokenMasks] | None = None
    """None: no request with a grammar goes on."""
    tokens: TokensInFlight | None = None

    def choose(self) -> TokensInFlight:
        """Wait for the masks, not for the device. What was chosen from is not kept."""
        if self.tokens is None:
            assert self.queue is not None
            self.tokens = self.queue(None if self.masks is None else self.masks.result())
            self.queue = None
        return self.tokens


class Execution:
    """Runs batches in order. `swap_cache` holds swapped-out blocks; None without swap space. `proposer` makes the
    drafts that batches verify.

    `on_stream`: the device works beside the host, so begin() only begins. With several pipeline stages as many steps
    can be in flight: one is sent to the first stage at once, and this rank, which is of the last stage, computes its
    part when the result is asked for.
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
        self._asked = Asked.of([])
        self._on_stream = on_stream
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="execution") if in_thread else None

    @property
    def overlaps(self) -> bool:
        """Whether a step works while the next one is scheduled."""
        return self._thread is not None or self._on_stream

    @property
    def begins_at_once(self) -> bool:
        """Whether begin() leaves the work to the device, whatever the step: all that it reads of requests is read, and
        no drafts are waited for."""
        return self._on_stream and (self._proposer is None or not self._proposer.waits_for_device)

    @property
    def untouched_swap_bytes(self) -> int:
        """Swap space that nobody has written yet, which the kernel does not count as used."""
        return 0 if self._swap_cache is None else self._swap_cache.untouched_bytes

    def prepare_idle(self) -> PreparedStep | None:
        """A step without a batch, where data-parallel cores in lockstep need this one's part; None: nobody does."""
        wave = self._runner.wave
        return self.prepare(Batch(0, [], 0, [])) if wave is not None and wave.is_on else None

    @property
    def is_needed(self) -> bool:
        """Whether others wait for this core's part of a step."""
        return self._runner.wave is not None and self._runner.wave.is_on

    def prepare(self, batch: Batch, *, depth: int = 0) -> PreparedStep:
        """The batch's inputs. Tokens that a step in flight samples are left open. `depth` is the live number of drafts
        per request; above 0 no step may be in flight."""
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

    def can_follow(self, step: PreparedStep, flight: Flight) -> bool:
        """Whether its forward pass may begin before the flight has landed: all that it needs of that is its tokens,
        which are on the device."""
        return flight.feeds and not step.speculates and self._samples_on_device(step.batch)

    def _samples_on_device(self, batch: Batch) -> bool:
        steps = self._runner.steps
        if steps is None or steps.sampler is None:
            return False
        return self._asked_by(batch).is_plain or steps.sampler.can_sample(batch.sampling)

    def _asked_by(self, batch: Batch) -> Asked:
        """Kept from step to step while the requests stay the same."""
        if self._asked.sampling != batch.sampling:
            self._asked = Asked.of(batch.sampling)
        return self._asked

    def _rows(self, step: PreparedStep, in_flight: Sequence[Request] = ()) -> "Rows":
        """Whose tokens are chosen on the device. `in_flight`: whose newest token a step samples that has not landed."""
        asked = self._asked_by(step.batch)
        if asked.takes_likeliest:
            return None
        if asked.is_plain:
            return PlainRows(step.batch.sampling, _ends(step.inputs))
        places = {request: row for row, request in enumerate(in_flight)}
        return [DeviceRow(request, places.get(request)) for request in step.batch.sampling]

    def begin_behind(self, step: PreparedStep, started: float, flight: Flight) -> Flight:
        """Start computing behind a flight that it can follow."""
        sampled = flight.step.batch.sampling
        feed: list[tuple[int, int]] = []
        if isinstance(step.inputs, DecodeStep):
            step.inputs.feed_from(sampled)
        else:
            places = {request: row for row, request in enumerate(sampled)}
            feed = [(index, places[request]) for index, request, _ in step.unknown]
        self._announce_swap(step.batch.swap_out, step.batch.swap_in)
        self._runner.send(step.inputs, feed)
        return self._launch(step, started, feed, sampled)

    def begin_masks(self, flight: Flight) -> None:
        """All steps before it have landed: find out what its grammars allow now."""
        if flight.late is not None:
            flight.late.masks = self._masks.begin(_masked_requests(flight.step.batch.sampling))

    def begin(self, step: PreparedStep, started: float) -> Flight:
        """Start computing; all steps before it have landed."""
        step.fill_in()
        self._announce_swap(step.batch.swap_out, step.batch.swap_in)
        if self._on_stream:
            return (
                Flight(step, started, self._speculate(step))
                if step.speculates
                else self._begin_on_stream(step, started)
            )
        if not step.speculates:  # else its inputs are made when the drafts are known
            self._runner.send(step.inputs)
        if self.num_stages > 1:
            return Flight(step, started, partial(self._compute_and_score, step))
        if self._thread is None:
            result = self._compute_and_score(step)
            return Flight(step, started, lambda: result)
        future: Future[StepResult] = self._thread.submit(self._compute_and_score, step)
        return Flight(step, started, future.result)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _begin_on_stream(self, step: PreparedStep, started: float) -> Flight:
        """Begin, and sample at once where that needs no host; else when the result is asked for."""
        batch = step.batch
        self._runner.send(step.inputs)
        if self._samples_on_device(batch):
            flight = self._launch(step, started)
            self.begin_masks(flight)
            return flight
        masks = self._masks.begin(_masked_requests(batch.sampling))
        self._copy_swapped(batch, step.inputs)
        logits = self._runner.run(step.inputs)
        beside = BesideTokens.of(self._runner)

        def land() -> StepResult:
            return beside.put_into(self._sample(batch, logits, masks))

        return Flight(step, started, land)

    def _launch(self, step: PreparedStep, started: float, feed: Feed = (), in_flight: Sequence[Request] = ()) -> Flight:
        """Queue a step on the device, and the choice of its tokens, unless that must wait for masks. `in_flight`: whose
        newest token a step samples that has not landed; a choice that waits knows them."""
        batch, steps = step.batch, self._runner.steps
        assert steps is not None
        self._copy_swapped(batch, step.inputs)
        late: LateChoice | None = None
        tokens: TokensInFlight | None = None
        with torch.inference_mode():
            logits = self._runner.run(step.inputs, feed)
            assert logits is not None  # the engine holds a rank of the last stage
            beside = BesideTokens.of(self._runner)
            if self._asked_by(batch).has_grammar:
                late = LateChoice(lambda masks: steps.sample(logits, self._rows(step), masks))
            elif batch.sampling:
                tokens = steps.sample(logits, self._rows(step, in_flight))

        def land() -> StepResult:
            chosen = tokens if late is None else late.choose()
            return beside.put_into(self._of(SampledTokens([], []) if chosen is None else chosen.result()))

        return Flight(step, started, land, feeds=True, late=late)

    def _compute_and_score(self, step: PreparedStep) -> StepResult:
        if step.speculates:
            return self._speculate(step)()
        result = self._compute(step.batch, step.inputs)
        return BesideTokens.of(self._runner).put_into(result)

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
        """Whether there may be drafts."""
        return self._proposer is not None

    def propose_next(self, requests: list[Request], depth: int) -> None:
        """A step has landed: give the requests that got a token and go on what the next step may verify."""
        if self._proposer is not None and (depth or self._depth):
            self._proposer.prepare(requests, depth)
            self._depth = depth

    def _speculate(self, step: PreparedStep) -> Callable[[], StepResult]:
        """Propose drafts and begin to compute them; a draft model reads what was swapped in. Returns what waits for the
        logits, verifies and brings the result."""
        assert self._proposer is not None
        batch = step.batch
        self._copy_swapped(batch, None)  # what a draft model writes is known to itself
        proposals = self._proposer.propose(batch)
        masks = self._masks.begin(_masked_rows([sequence for sequence in batch.sequences if sequence.samples]))
        inputs, _ = self._runner.flatten(batch.sequences)
        _add_items(inputs, batch)
        self._runner.send(inputs)
        logits = self._runner.run(inputs)
        assert logits is not None  # the engine holds a rank of the last stage
        beside = BesideTokens.of(self._runner)

        def land() -> StepResult:
            return beside.put_into(self._verify(batch, inputs, logits, proposals, masks))

        return land

    def _verify(
        self,
        batch: Batch,
        inputs: StepInputs,
        logits: torch.Tensor,
        proposals: Proposals,
        masks: Future[TokenMasks] | None,
    ) -> StepResult:
        """Judge a step's drafts, and let the proposer learn from what stands."""
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
        """This rank's part of it, before the step with these inputs (None: they are not known yet)."""
        assert self._swap_cache is not None or not batch.swap_out + batch.swap_in  # else the swap space has no blocks
        if self._swap_cache is not None:
            slots = None if inputs is None else inputs.written_slots(self._runner.kv_cache.block_size)
            self._swap_cache.copy(batch.swap_out, batch.swap_in, slots)

    def _take_swapped(self) -> Swapped:
        return NOTHING_SWAPPED if self._swap_cache is None else self._swap_cache.take_swapped()


Rows = Sequence[DeviceRow] | PlainRows | None
"""Whose tokens a step chooses on the device; None: nothing but the likeliest is asked for."""


def _add_items(inputs: StepInputs, batch: Batch) -> None:
    """What has to be dropped and computed of images and videos, before anything else."""
    if batch.displaced or batch.missing:
        inputs.displaced, inputs.missing = batch.displaced, batch.missing


def _ends(inputs: StepInputs | DecodeStep) -> Array:
    """At which position each sampled token will be."""
    if isinstance(inputs, DecodeStep):
        return inputs.ends
    return np.array([inputs.positions[index] + 1 for index in inputs.sampled], np.int64)


def _masked_requests(sampling: list[Request]) -> list[MaskedRows]:
    """The rows of logits of the requests that have a grammar and go on, where each has one row."""
    return [
        MaskedRows(row, request.grammar)
        for row, request in enumerate(sampling)
        if request.grammar is not None and not request.status.is_finished
    ]


def _masked_rows(sampling: list[ScheduledSequence]) -> list[MaskedRows]:
    """The rows of logits of the sequences that have a grammar."""
    masked, first = [], 0
    for sequence in sampling:
        if sequence.request.grammar is not None:
            masked.append(MaskedRows(first, sequence.request.grammar, sequence.draft_token_ids))
        first += 1 + len(sequence.draft_token_ids)
    return masked
