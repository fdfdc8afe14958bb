"""Steps on an asynchronous device: inputs at fixed addresses, CUDA graphs, no host waits.

A step's sampled tokens stay on the device for the next step: `feed` maps tokens of a step to rows of `last_tokens`. A
step may therefore start before the host has seen the previous step's output. Ranks that share layers receive those rows
on the device from the first rank, which samples.

Several ranks replay graphs of one key, including their collectives. Transfers between pipeline stages stay outside of
graphs: they write the graph's input and read its output.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from trimtab_kernels.launch.jit import num_compilations
from trimtab_kernels.paged_attention import Attend, AttentionMetadata
from trimtab_kernels.paged_batch import PagedBatch
from trimtab_modelspec.attention_window import FULL_ATTENTION, AttentionWindow

from trimtab_engine.device.inference import in_inference_mode
from trimtab_engine.device.kv_cache import KVTensors
from trimtab_engine.device.transfer import Leading, Mark, copy_to_host, pinned_bytes
from trimtab_engine.layers.adapted import AdapterRows
from trimtab_engine.layers.vocabulary import Placed
from trimtab_engine.models.family import Model
from trimtab_engine.parallel.groups import SINGLE_RANK, RankGroups
from trimtab_engine.runner.decode_step import DecodeStep
from trimtab_engine.runner.graphs.device_block_tables import DeviceBlockTables
from trimtab_engine.runner.graphs.dispatcher import Dispatcher, Eager
from trimtab_engine.runner.graphs.plan import GraphKey, GraphPlan
from trimtab_engine.runner.graphs.recorder import Outside, Recorder, Replay
from trimtab_engine.runner.graphs.step_buffers import Capacity, Feed, StepBuffers
from trimtab_engine.sampling.choice_columns import PlainRows
from trimtab_engine.sampling.device_sampler import DeviceSampler, ReportsInFlight, likeliest
from trimtab_engine.sampling.failures import failures_of
from trimtab_engine.sampling.sampler import SampledTokens, TokenMasks, apply_masks
from trimtab_engine.sampling.token_table import DeviceRow
from trimtab_engine.scheduling.sampling import TokenLogprobs
from trimtab_engine.scheduling.step_inputs import NO_INPUTS, StepInputs

TOKEN_BYTES, LOGIT_BYTES = 8, 4
NUM_TOKEN_BUFFERS = 3  # steps whose tokens may be in transfer: completing, running, starting


@dataclass(slots=True)
class GraphCounts:
    """Graph replay and compilation counts since the last call."""

    steps: dict[str, int] = field(default_factory=dict)
    """Steps by kind of graph: full, piecewise."""
    eager: dict[str, int] = field(default_factory=dict)
    """Eager steps by reason (dispatcher.Eager)."""
    padding_tokens: int = 0
    """Rows that graphs computed for nothing."""
    captures: int = 0
    compilations: int = 0
    """Kernels that had to be compiled: after start-up none should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The envelope that the buffers are made for."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_rows: int
    """Rows of logits at most."""
    max_model_len: int
    block_size: int
    num_axes: int = 1
    """Position axes per token: 3 (time, height, width) if the RoPE separates them, else 1."""
    attention_windows: tuple[AttentionWindow, ...] = (FULL_ATTENTION,)
    """Attention window of each KV group."""
    with_adapters: bool = False

    def capacity(self, max_tokens: int) -> Capacity:
        """Return the buffer sizes for steps of up to `max_tokens` tokens."""
        return Capacity(
            max_tokens=max_tokens,
            max_seqs=min(self.max_num_seqs, max_tokens),
            max_rows=min(self.max_num_rows, max_tokens),
            max_blocks=tuple(self._max_blocks(attention_window) for attention_window in self.attention_windows),
            chunked=frozenset(
                group for group, attention_window in enumerate(self.attention_windows) if attention_window.is_chunked
            ),
            num_axes=self.num_axes,
            with_adapters=self.with_adapters,
        )

    def _max_blocks(self, attention_window: AttentionWindow) -> int:
        """Return the blocks of one table. A window frees a block only when the next one is allocated, so it may hold
        one more.
        """
        held = attention_window.num_blocks(self.max_model_len, self.block_size, self.max_num_batched_tokens)
        return min(held + 1, -(-self.max_model_len // self.block_size))


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shapes at the attention boundary of a piecewise graph: query [tokens, num_heads, query_size], attended size, and
    hidden size.
    """

    num_heads: int
    query_size: int
    attended_size: int
    """Output size of one head."""
    hidden_size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Arrival:
    """Pinned host buffers for a step's tokens: [max_num_rows], int64 and float32 (ChosenTokens)."""

    token_ids: Leading
    best: Leading
    arrived: Mark

    @classmethod
    def of(cls, max_num_rows: int, device: torch.device) -> "Arrival":
        pinned = pinned_bytes((TOKEN_BYTES + LOGIT_BYTES) * max_num_rows, device)
        token_ids, best = pinned[: TOKEN_BYTES * max_num_rows], pinned[TOKEN_BYTES * max_num_rows :]
        return cls(Leading(token_ids.view(torch.int64)), Leading(best.view(torch.float32)), Mark(device))


class TokensInFlight:
    """Sampled tokens being copied to the host, with log-probabilities if requested."""

    def __init__(self, arrival: "Arrival", count: int, reports: list[ReportsInFlight]) -> None:
        self._arrival, self._count, self._reports = arrival, count, reports

    def result(self) -> SampledTokens:
        """Wait for them."""
        self._arrival.arrived.wait()
        tokens: list[int] = self._arrival.token_ids.rows(self._count).tolist()
        logprobs: list[TokenLogprobs | None] = [None] * self._count
        for reports in self._reports:
            reports.put_into(logprobs, tokens)
        return SampledTokens(tokens, logprobs, failures_of(self._arrival.best.rows(self._count)))


class DeviceSteps:
    """Runs steps of one model over one KV cache, which never moves."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVTensors,
        plan: GraphPlan,
        recorder: Recorder,
        *,
        limits: StepLimits,
        shape: AttentionShape,
        device: torch.device,
        groups: RankGroups = SINGLE_RANK,
        is_first_stage: bool = True,
        sampler: DeviceSampler | None = None,
        adapter_rows: AdapterRows | None = None,
    ) -> None:
        """Allocate fixed inputs.

        Args:
            sampler: Set on the rank that samples.
            adapter_rows: Sets which rows use which adapter; None if no adapter is served.
        """
        self.sampler, self._adapter_rows = sampler, adapter_rows
        self._model, self._kv_cache, self._recorder = model, kv_cache, recorder
        self._tensor, self._meter = groups.tensor, groups.meter
        self._limits, self.plan = limits, plan
        self._dispatcher = Dispatcher(plan)
        self._graphs: dict[GraphKey, Replay] = {}
        self._counts = GraphCounts()
        largest = limits.capacity(limits.max_num_batched_tokens)
        self._seated = DeviceBlockTables(limits.max_num_seqs, largest.max_blocks, device)
        self._large = StepBuffers(largest, self._seated, device)
        most = plan.max_tokens
        self._small = StepBuffers(limits.capacity(most), self._seated, device) if most else self._large
        self._batches = self._small.uniform_batches(0, 1)
        """Batches of the current step per KV group, read by attention outside of graphs."""
        heads = (max(plan.piecewise, default=0), shape.num_heads)
        self._query = torch.zeros((*heads, shape.query_size), dtype=shape.dtype, device=device)
        self._attended = torch.zeros((*heads, shape.attended_size), dtype=shape.dtype, device=device)
        self._hidden = torch.zeros(most, shape.hidden_size, dtype=shape.dtype, device=device)
        self._before = None if is_first_stage else torch.zeros_like(self._hidden)
        """Hidden states of the stage before, for graphs."""
        self.last_tokens = torch.zeros(limits.max_num_rows, dtype=torch.int64, device=device)
        """Tokens of the step that was sampled last."""
        self._newest, self._computed = Leading(self.last_tokens), Leading(self._hidden)
        self._arrivals = [Arrival.of(limits.max_num_rows, device) for _ in range(NUM_TOKEN_BUFFERS)]
        self._turn = 0
        self._num_compilations = num_compilations()

    @property
    def num_bytes(self) -> int:
        """Bytes of the fixed buffers on the device; graphs are not included."""
        own = [self._query, self._attended, self._hidden, self.last_tokens, self._seated.whole]
        own += [] if self._before is None else [self._before]
        buffers = {id(b): b.num_bytes for b in (self._large, self._small)}
        sampling = 0 if self.sampler is None else self.sampler.num_bytes
        return sum(tensor.nbytes for tensor in own) + sum(buffers.values()) + sampling

    def take_counts(self) -> GraphCounts:
        counts, self._counts = self._counts, GraphCounts()
        compiled = num_compilations()
        counts.compilations, self._num_compilations = compiled - self._num_compilations, compiled
        return counts

    # --- graphs ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile kernels needed by steps of any size by running padding steps."""
        for rows in warm_up_sizes(self._limits.max_num_batched_tokens):
            for key in (GraphKey(rows), GraphKey(rows, with_adapters=True))[: 2 if self._adapter_rows else 1]:
                self._batches = self._large.fill(NO_INPUTS, (), key, self._limits.block_size)
                metadata = self._metadata(self._large, rows, self._batches, is_padded=True)
                self._forward(self._large, key, metadata)
        if self.sampler is not None:
            self.sampler.warm_up(self.last_tokens, self._hidden.dtype)

    def capture_all(self, progress: Callable[[int, int], None], most: int | None = None) -> None:
        """Record the plan's graphs, the largest first, or the first `most` of them. progress gets (done, of)."""
        keys = [key for key in self.plan.keys if key not in self._graphs]
        for done, key in enumerate(keys[:most], start=1):
            self.capture(key)
            progress(done, len(keys))

    @torch.inference_mode()
    def capture(self, key: GraphKey) -> None:
        """Record one graph, on inputs that are all padding: no block is written."""
        rows, buffers = key.num_tokens, self._small
        self._batches = buffers.fill(NO_INPUTS, (), key, self._limits.block_size)

        def run(outside: Outside) -> None:
            if key.tokens_per_sequence is None:
                metadata = self._metadata(buffers, rows, None, is_padded=True, outside=outside)
            else:
                batches = buffers.uniform_batches(rows, key.tokens_per_sequence)
                metadata = self._metadata(buffers, rows, batches, is_padded=True)
            before = None if self._before is None else self._before[:rows]
            with self._adapting(buffers, key):
                hidden = self._model.compute(*self._inputs(buffers, rows), self._kv_cache, metadata, before=before)
            self._hidden[:rows].copy_(hidden)

        run(lambda call: call())  # compiles, and lets libraries allocate: neither may happen while recording
        with self._meter.apart() as sent:
            replay = self._recorder.record(run)
        self._graphs[key] = self._counted(replay, sent)
        self._counts.captures += 1

    def _counted(self, replay: Replay, sent: dict[str, int]) -> Replay:
        """Wrap a replay to count the bytes that were sent when it was recorded, because replays do not report them."""
        if not sent:
            return replay

        def counted() -> None:
            with self._meter.apart():
                replay()
            self._meter.add_all(sent)

        return counted

    def drop_graphs(self) -> None:
        """Drop all graphs, which are captured again on demand. Call before the ranks disconnect: a graph holds its
        connections.
        """
        self._graphs.clear()
        self._recorder.forget()

    def drop_model(self) -> None:
        """Drop the model and all graphs, which read its weights."""
        self.drop_graphs()
        del self._model

    def use_model(self, model: Model) -> None:
        """Use a reloaded model at new addresses: graphs are captured again on demand."""
        self._model = model

    # --- steps ----------------------------------------------------------------------------------------------------

    @in_inference_mode
    def run(
        self, inputs: StepInputs | DecodeStep, feed: Feed = (), placed: Placed | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Start a step. Return hidden states [rows, hidden_size] and the indices of sampled rows. `placed`: embeddings
        of non-text tokens on the first stage; the step's shape tells whether there are any.
        """
        self._share(feed)
        shape = inputs.shape
        choice = self._dispatcher.dispatch(shape)
        num_tokens = inputs.num_tokens
        if isinstance(choice, Eager):
            self._counts.eager[choice.value] = self._counts.eager.get(choice.value, 0) + 1
            buffers, rows = self._large, shape.num_tokens
            key = GraphKey(rows, with_adapters=shape.has_adapters and self._adapter_rows is not None)
            batches = buffers.fill(inputs, feed, key, self._limits.block_size)
            metadata = self._metadata(buffers, rows, batches, is_padded=rows > num_tokens)
            hidden = self._forward(buffers, key, metadata, placed)
        else:
            assert placed is None  # a shape with items has no graph
            if choice not in self._graphs:
                self.capture(choice)
            buffers = self._small
            self._batches = buffers.fill(inputs, feed, choice, self._limits.block_size)
            if self._before is not None:
                self._model.receive(self._before[: choice.num_tokens])
            self._graphs[choice]()
            hidden = self._computed.rows(choice.num_tokens)
            self._model.send(hidden)
            self._counts.steps[choice.kind] = self._counts.steps.get(choice.kind, 0) + 1
            self._counts.padding_tokens += choice.num_tokens - num_tokens
        return hidden, buffers.sampled.rows(inputs.num_sampled)

    @in_inference_mode
    def sample(
        self, logits: torch.Tensor, rows: Sequence[DeviceRow] | PlainRows | None, masks: TokenMasks | None = None
    ) -> TokensInFlight:
        """Sample a step's tokens from logits [rows, vocab_size], keep them for the next step, and start their copy to
        the host. `rows` None means argmax of each. `masks`: tokens allowed by grammars.
        """
        assert self.sampler is not None  # this rank samples
        if masks is not None:
            apply_masks(logits, masks)
        chosen = likeliest(logits) if rows is None else self.sampler.sample(logits, rows, self.last_tokens)
        count = chosen.token_ids.shape[0]
        newest = self._newest.rows(count)
        newest.copy_(chosen.token_ids)
        self._turn = (self._turn + 1) % NUM_TOKEN_BUFFERS
        arrival = self._arrivals[self._turn]
        copy_to_host(arrival.token_ids.rows(count), newest)
        copy_to_host(arrival.best.rows(count), chosen.best)
        arrival.arrived.set()
        return TokensInFlight(arrival, count, chosen.reports)

    def _share(self, feed: Feed) -> None:
        """Let the ranks that share layers have the tokens that a step is fed with: the first of them has sampled."""
        if feed and self._tensor is not None:
            self._tensor.broadcast(self.last_tokens[: 1 + max(row for _, row in feed)])

    def _forward(
        self, buffers: StepBuffers, key: GraphKey, metadata: list[AttentionMetadata], placed: Placed | None = None
    ) -> torch.Tensor:
        with self._adapting(buffers, key):
            inputs = self._inputs(buffers, key.num_tokens)
            return self._model.forward(*inputs, self._kv_cache, metadata, placed=placed)

    def _adapting(self, buffers: StepBuffers, key: GraphKey) -> AbstractContextManager[None]:
        """Context in which projections apply the adapters of the step's rows."""
        if self._adapter_rows is None or not key.with_adapters:
            return nullcontext()
        return self._adapter_rows.of_slots(buffers.ints["adapters"][: key.num_tokens])

    def _inputs(self, buffers: StepBuffers, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids, some of which are known only on the device, and positions."""
        longs = buffers.longs
        sources = longs["sources"][:rows]
        fed = self.last_tokens.index_select(0, sources.clamp_min(0))
        return torch.where(sources < 0, longs["token_ids"][:rows], fed), buffers.positions(rows)

    def _metadata(
        self,
        buffers: StepBuffers,
        rows: int,
        batches: list[PagedBatch] | None,
        *,
        is_padded: bool = False,
        outside: Outside | None = None,
    ) -> list[AttentionMetadata]:
        """Return attention metadata per KV group. Without batches attention runs `outside`, on the current step's
        batches.
        """

        def of_group(group: int, attention_window: AttentionWindow) -> AttentionMetadata:
            def attend_outside(query: torch.Tensor, attend: Attend) -> torch.Tensor:
                assert outside is not None
                kept, attended = self._query[:rows], self._attended[:rows]
                kept.copy_(query)
                outside(lambda: _discard(attend(kept, self._batches[group], attended)))
                return attended

            return AttentionMetadata(
                rows,
                buffers.slots[group][:rows],
                (),
                (),
                None if batches is None else batches[group],
                is_padded=is_padded,
                outside=None if outside is None else attend_outside,
                window=None if attention_window.is_chunked else attention_window.window,
                chunk_size=attention_window.window if attention_window.is_chunked else None,
            )

        return [
            of_group(group, attention_window) for group, attention_window in enumerate(self._limits.attention_windows)
        ]


def warm_up_sizes(most: int) -> list[int]:
    """Return the sizes to warm up, largest first: it and all powers of two, and three times those, below it. Launch
    configurations change at such sizes.
    """
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return sorted({most, *(size for size in (*powers, *(3 * power for power in powers)) if size <= most)}, reverse=True)


def _discard(_: object) -> None:
    """Ignore the result, which is already in its output tensor."""
