"""Model runner: input tensors, KV cache tensors, and the forward pass from a batch to logits. No scheduling policy.

Start-up order: load_model_runner (loading.py) → profile → (the engine computes the blocks) → init_kv_cache.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from trimtab_kernels.latent_attention import warm_up_latent_attention
from trimtab_kernels.paged_attention import build_attention_metadata, max_decode_tokens, plan_cpu_reads
from trimtab_kernels.paged_batch import warm_up_attention
from trimtab_modelspec.attention_window import AttentionWindow
from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.kv_groups import KVGroup

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.experts import EplbConfig
from trimtab_engine.config.pooling import Tasks
from trimtab_engine.config.vision import VisionConfig
from trimtab_engine.device.address_range import AddressSpace
from trimtab_engine.device.allocations import Growth
from trimtab_engine.device.device import Device
from trimtab_engine.device.inference import in_inference_mode
from trimtab_engine.device.kv_cache import KVCache, KVLayers, KVTensors, copy_across
from trimtab_engine.device.swap_cache import SwapCache
from trimtab_engine.device.transfer import Mark, send
from trimtab_engine.layers.linear import padded_rows, row_sizes
from trimtab_engine.memory.encoder import EncoderLimits, kept_bytes
from trimtab_engine.memory.formula import Ledger
from trimtab_engine.memory.reserved import cpu_activation_bytes
from trimtab_engine.models.decoder import Decoder
from trimtab_engine.models.family import Model, VisionEncoder
from trimtab_engine.parallel.expert_balancer import ExpertBalancer
from trimtab_engine.parallel.groups import RankGroups
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.parallel.shard import ModelShard
from trimtab_engine.parallel.wave import Wave
from trimtab_engine.runner.adapters import AdapterSlots, LoadedAdapter
from trimtab_engine.runner.decode_step import DecodeLayout, DecodeStep
from trimtab_engine.runner.graphs.device_steps import AttentionShape, DeviceSteps, GraphCounts, StepLimits
from trimtab_engine.runner.graphs.plan import GraphPlan
from trimtab_engine.runner.graphs.recorder import Recorder
from trimtab_engine.runner.graphs.step_buffers import Feed
from trimtab_engine.runner.item_encoder import ItemEncoder
from trimtab_engine.runner.weights import WeightsUnavailable
from trimtab_engine.sampling.device_sampler import DeviceSampler
from trimtab_engine.sampling.logprobs import ScoresInFlight
from trimtab_engine.sampling.pooling import PooledInFlight, pool
from trimtab_engine.sampling.sampler import ROWS_AT_ONCE, sample
from trimtab_engine.scheduling.adapter import Adapter
from trimtab_engine.scheduling.batch import Batch, ScheduledSequence
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.scheduling.step_inputs import StepInputs, Unknown, flatten

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
logger = logging.getLogger("trimtab_engine.core")
KV_DTYPES = DTYPES | {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
ONE_RANK = Layout()
GREEDY = Sampling(temperature=0.0)
COSTLIEST_SAMPLING = Sampling(top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=0, logprobs=1)
PROBE_SEQS, PROBE_TOKENS = 2, 16  # of the small steps, which take a fiftieth of the profile's time
Progress = Callable[[str, float], None]
ReadModel = tuple[Model, VisionEncoder | None]
"""Model and vision encoder read from a checkpoint; the encoder only if this rank computes images and videos."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of the loaded model. Heads are this rank's."""

    vocab_size: int
    max_model_len: int
    """Maximum served length, at most the model's positions."""
    eos_token_ids: tuple[int, ...]
    num_attention_heads: int
    head_size: int
    kv_groups: tuple[KVGroup, ...]
    """KV layout of this rank: keys and values of one size in all groups, or latent vectors."""
    dtype: str
    kv_cache_dtype: str
    kv_dtype_bytes: int
    quantization: str | None
    """Format of the layers' projections. None if stored in dtype."""
    weights_bytes: int
    """Device memory taken by loading."""
    whole: ModelConfig
    """Configuration of the whole model."""
    tasks: Tasks
    """Supported tasks."""
    vision: VisionConfig | None = None
    """Configuration of the vision encoder. None if images and videos are not computed. Only ranks of the first stage
    have it.
    """


class ModelRunner:
    """One rank's model and KV cache."""

    kv_cache: KVCache
    _kv_tensors: KVTensors
    _draft_layers: KVLayers | None
    steps: DeviceSteps | None = None
    """Steps with inputs at fixed addresses and, optionally, graphs: on CUDA, once the KV cache has its addresses."""
    can_drop_weights = True
    drives_others = False
    kept_row_bytes = 0
    """Bytes kept per running request besides keys and values."""

    def __init__(
        self,
        loaded: ReadModel,
        rebuild: Callable[[], ReadModel],
        facts: ModelFacts,
        shard: ModelShard,
        groups: RankGroups,
        device: Device,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        eplb: EplbConfig | None,
        *,
        divides_items: bool = False,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """Create the runner of a loaded model.

        Args:
            divides_items: The ranks of the tensor-parallel group divide images and videos among them.
            adapters: Adapter slots of the model's projections; None if it serves no adapters.
        """
        self.facts = facts
        (self._model, self._tower), self._rebuild, self.shard, self.groups = loaded, rebuild, shard, groups
        self._items = ItemEncoder(device.torch, groups.tensor if divides_items else None)
        self._device, self._block_size, self._dtype = device, block_size, dtype
        self._decodes = DecodeLayout(block_size, self._attention_windows)
        self._kv_dtype = kv_dtype
        self._scores: ScoresInFlight | None = None
        self._pooled: PooledInFlight | None = None
        self._keeps_hidden, self._hidden = False, torch.empty(0)
        self._eplb = eplb
        self._adapters = adapters
        self.balancer = self._new_balancer()
        """Expert load balancer. None if experts do not move."""

    def _new_balancer(self) -> ExpertBalancer | None:
        """Return a balancer for experts in their loaded placement. None without balancing."""
        moe, group, mixtures = self.facts.whole.moe, self.groups.expert, self._model.mixtures
        if self._eplb is None or moe is None or group is None or not mixtures:
            return None
        return ExpertBalancer(self._eplb, mixtures, moe.num_experts, group)

    def drop_weights(self) -> None:
        """Release the weights' memory. Nothing runs until reload_weights()."""
        if self.steps is not None:
            self.steps.drop_model()
        self.balancer = None
        if self._adapters is not None:
            self._adapters.close()
        del self._model, self._tower
        self._device.after_weights()

    def reload_weights(self) -> None:
        """Read the weights again from the same source and use them.

        Raises:
            WeightsUnavailable: If the source cannot be read, or the device has no room; the weights are then absent.
        """
        self.read_weights()
        self.use_weights()

    def read_weights(self) -> None:
        """Read the weights again from the same source, without other ranks. use_weights() must follow.

        Raises:
            WeightsUnavailable: As reload_weights().
        """
        failure: WeightsUnavailable | None = None
        try:
            self._model, self._tower = self._rebuild()
        except Exception as error:  # files that are gone for a moment must not end the engine
            failure = WeightsUnavailable.because(error)
        if failure is not None:  # the error is released, and with its frames the tensors
            if self._adapters is not None:
                self._adapters.close()
            self._device.after_weights()
            raise failure

    def use_weights(self) -> None:
        """Prepare steps with the weights that were read, on all ranks of the engine together."""
        self.balancer = self._new_balancer()
        if self.steps is not None:
            self.steps.use_model(self._model)

    @property
    def adapters(self) -> list[LoadedAdapter]:
        """Loaded adapters in slot order."""
        return [] if self._adapters is None else self._adapters.loaded

    def load_adapter(self, slot: int, name: str, folder: str) -> bytes:
        """Read an adapter into an unused slot and return the digest of its files. No step is in flight.

        Raises:
            ConfigError: If the adapter is invalid. Nothing has changed.
        """
        assert self._adapters is not None  # else it was refused
        with torch.inference_mode():
            return self._adapters.load(slot, name, folder)

    def forget_adapter(self, slot: int) -> None:
        """Mark the slot as unused: its adapter is not read again with the weights."""
        assert self._adapters is not None
        self._adapters.forget(slot)

    @property
    def profile_compiles(self) -> bool:
        """True if profile() also compiles code for serving, so that it must run in every process."""
        return self._device.kind == "cuda" or self._model.pads_rows

    def probe(self) -> Growth:
        """Run small steps. Return their memory in bytes, without the allocator's reserve. On the CPU it is a cheap
        check that profile() would give the same result as in another process.
        """
        with self._device.measure() as growth:
            self._dummy_step([(0, 1)] * PROBE_SEQS, COSTLIEST_SAMPLING)
            self._dummy_step([(0, min(PROBE_TOKENS, self.facts.max_model_len))], GREEDY)
        return growth

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int, encoder: EncoderLimits | None = None) -> int:
        """Run the largest step of the envelope and every row size once. Return the memory of steps in bytes, including
        what stays: code that oneDNN compiles per row size, and the allocator's reserve.

        The largest steps run first, so that smaller ones fit into memory that the allocator already holds. On CUDA this
        includes images and videos within the limits of `encoder`, which also compiles the vision encoder's kernels.
        """
        sizes = row_sizes() if self._model.pads_rows else []
        max_len = self.facts.max_model_len
        longest_decode = min(max_len, max_decode_tokens(self._device.torch)) - 1
        with self._device.measure() as growth:
            if self._device.kind == "cuda" and self._tower is not None and encoder is not None:
                self._items.warm_up(self._tower, encoder.largest_item)
            self._dummy_step([(0, 1)] * max_num_seqs, COSTLIEST_SAMPLING)
            self._dummy_step(envelope_spans(max_num_batched_tokens, max_len), GREEDY)
            self._dummy_step([(longest_decode, 1)] * min(2, max_num_seqs), GREEDY)
            if self._adapters is not None and (adapter := self._adapters.profiling_adapter()) is not None:
                self._dummy_step([(0, 1)] * max_num_seqs, GREEDY, adapter)
                self._dummy_step(envelope_spans(max_num_batched_tokens, max_len), GREEDY, adapter)
            for rows in reversed(sizes):
                self._dummy_step([(0, 1)] * rows, GREEDY)
        return growth.peak if self._device.kind == "cuda" else cpu_activation_bytes(growth.peak, len(sizes))

    def items_bytes(self, limits: EncoderLimits, max_num_batched_tokens: int) -> int:
        """Return the maximum device bytes of images and videos on this rank. On CUDA profile() measures the vision
        encoder's part.
        """
        vision, dtype_bytes = self.facts.vision, self._dtype.itemsize
        if vision is None or self._tower is None:
            return 0
        if self._device.kind == "cpu":
            return limits.num_bytes(vision, dtype_bytes)
        summed = limits.step_budget if self._items.are_divided else 0  # by the ranks, before a step's are put together
        return kept_bytes(vision, limits.num_kept_tokens + max(summed, max_num_batched_tokens), dtype_bytes)

    def init_kv_cache(self, cap_blocks: int, draft: KVLayers | None = None) -> None:
        """Reserve the KV cache's address range, including a draft model's layers, and map block 0, which attention
        reads when it is compiled on CUDA. The engine maps further blocks.
        """
        self._draft_layers = draft
        self.kv_cache = self._new_kv_cache(cap_blocks, draft=draft)
        self.kv_cache.map_blocks(1)
        self._kv_tensors = self.kv_cache
        self._warm_up_attention()
        self._warm_up_copies(self.kv_cache)

    def use_draft_layers_of(self, kv_cache: KVCache) -> None:
        """Keep keys and values in the draft's part of the target's KV cache."""
        self.kv_cache = kv_cache
        self._kv_tensors = kv_cache.draft
        self._warm_up_attention()

    def _warm_up_attention(self) -> None:
        if self._device.kind == "cuda":
            num_heads, latent = self.facts.num_attention_heads, self.facts.whole.latent
            size = self.facts.head_size if latent is None else latent.kept_size
            query = torch.zeros((1, num_heads, size), dtype=self._dtype, device=self._device.torch)
            if latent is not None:
                warm_up_latent_attention(query, self._kv_tensors.keys[0], kv_rank=latent.kv_rank)
                return
            sinks = torch.zeros(num_heads, device=self._device.torch) if self.facts.whole.has_sinks else None
            for attention_window in {group.attention_window for group in self.facts.kv_groups if group.layers}:
                warm_up_attention(
                    query,
                    self._kv_tensors.keys[0],
                    self._kv_tensors.values[0],
                    window=None if attention_window.is_chunked else attention_window.window,
                    chunk_size=attention_window.window if attention_window.is_chunked else None,
                    sinks=sinks,
                )

    def _warm_up_copies(self, other: KVCache) -> None:
        """On CUDA, compile copies to and from the KV cache before the first block moves, and detect host memory that
        the device cannot reach. Block 0 is mapped and unused.
        """
        if self._device.kind == "cuda":
            copy_across(other, self.kv_cache, [(0, 0)])
            copy_across(self.kv_cache, other, [(0, 0)])

    def use_device_steps(self, config: EngineConfig, plan: GraphPlan, recorder: Recorder) -> DeviceSteps:
        """Switch to inputs at fixed addresses; steps replay the plan's graphs once captured."""
        whole, facts = self.facts.whole, self.facts
        limits = StepLimits(
            max_num_batched_tokens=config.max_num_batched_tokens_cap,
            max_num_seqs=config.max_num_seqs_cap,
            max_num_rows=config.max_num_sampled_rows,
            max_model_len=facts.max_model_len,
            block_size=self._block_size,
            num_axes=1 if facts.vision is None else facts.vision.num_axes,
            attention_windows=self._attention_windows,
            with_adapters=self._adapters is not None,
        )
        latent = whole.latent
        sizes = (facts.head_size, facts.head_size) if latent is None else (latent.kept_size, latent.kv_rank)
        shape = AttentionShape(facts.num_attention_heads, *sizes, whole.hidden_size, self._dtype)
        device = self._device.torch
        sampler = None
        if self.shard.is_last_stage and (self.groups.tensor is None or self.groups.tensor.index == 0):
            sampler = DeviceSampler(
                facts.vocab_size, facts.eos_token_ids, max_num_seqs=config.max_num_seqs_cap, device=device
            )
        self.steps = DeviceSteps(
            self._model,
            self._kv_tensors,
            plan,
            recorder,
            limits=limits,
            shape=shape,
            device=device,
            groups=self.groups,
            is_first_stage=self.shard.is_first_stage,
            sampler=sampler,
            adapter_rows=None if self._adapters is None else self._adapters.rows,
        )
        return self.steps

    @property
    def _attention_windows(self) -> tuple[AttentionWindow, ...]:
        """Attention window of each KV group."""
        return tuple(group.attention_window for group in self.facts.kv_groups)

    @property
    def kv_rounding_bytes(self) -> int:
        """Bytes that pages of KV cache memory may take beyond its blocks."""
        return self._device.kv_rounding_bytes(self.kv_layers.num_regions)

    @property
    def kv_layers(self) -> KVLayers:
        """KV cache layers of the model: blocks as large as the largest group's."""
        return KVLayers(max(self.facts.kv_groups, key=lambda group: group.num_layers), self._kv_dtype)

    def new_swap_cache(self, num_blocks: int) -> SwapCache:
        """Return host memory for that many blocks like the KV cache's."""
        host = self._new_kv_cache(num_blocks, memory=self._device.swap_memory, draft=self._draft_layers)
        host.map_blocks(num_blocks)
        self._warm_up_copies(host)
        return SwapCache(self.kv_cache, host)

    def limit_model_len(self, max_model_len: int) -> None:
        """Serve shorter requests than the model could; nothing that was measured grows by it."""
        self.facts = replace(self.facts, max_model_len=max_model_len)

    def execute(self, sequences: list[ScheduledSequence]) -> torch.Tensor:
        """Compute a batch. Returns logits [rows, vocab_size] of the sequences that sample, in their order,
        a row for each one's newest token, and one for each of its drafts.
        """
        inputs, _ = self.flatten(sequences)
        self.send(inputs)
        logits = self.run(inputs)
        assert logits is not None  # the engine holds a rank of the last stage
        return logits

    def take_scores(self) -> ScoresInFlight | None:
        """Return the scores of the prompt tokens that the last step was to judge, in the order of StepInputs.scored;
        None without any.
        """
        scores, self._scores = self._scores, None
        return scores

    def take_pooled(self) -> PooledInFlight | None:
        """Return the last step's pooled hidden states, in the order of StepInputs.pooled. None without any."""
        pooled, self._pooled = self._pooled, None
        return pooled

    @property
    def model(self) -> Model:
        """This rank's."""
        return self._model

    @property
    def weights_bytes(self) -> int:
        """Device memory taken by the weights."""
        return self.facts.weights_bytes

    @property
    def vocab_size(self) -> int:
        """Number of tokens with logits."""
        return self.facts.vocab_size

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self._block_size

    @property
    def kv_dtype(self) -> torch.dtype:
        """Data type of the KV cache."""
        return self._kv_dtype

    def keep_hidden(self) -> None:
        """Keep each step's hidden states until the next step, as inputs of draft heads."""
        self._keeps_hidden = True

    def take_hidden(self) -> torch.Tensor:
        """Return the last step's hidden states after the final norm, one row per token including padding."""
        hidden, self._hidden = self._hidden, torch.empty(0)
        return hidden

    def ledgers(self, own: Ledger) -> dict[int, Ledger]:
        """Return the ledgers of this rank and of every rank that it drives, by rank."""
        return {0: own}

    def take_wire_bytes(self) -> dict[str, int]:
        """Return the bytes sent by this rank since the last call, by kind of collective. Empty for a single rank."""
        return {}

    def take_graph_counts(self) -> GraphCounts:
        """Return the counts of graph replays and compilations since the last call."""
        return GraphCounts() if self.steps is None else self.steps.take_counts()

    def close(self) -> None:
        """Release the runner's resources."""
        if self.steps is not None:
            self.steps.drop_graphs()

    def lay_out(self, batch: Batch) -> tuple[StepInputs | DecodeStep, list[Unknown]]:
        """Lay out a batch as flatten() does, in column format if possible: on an asynchronous device with a single
        rank.
        """
        in_columns = batch.only_decodes and batch.sequences and self.steps is not None and not self.drives_others
        if in_columns and not (batch.displaced or batch.missing):
            return self._decodes.lay_out(batch), []
        return self.flatten(batch.sequences)

    def flatten(self, sequences: list[ScheduledSequence]) -> tuple[StepInputs, list[Unknown]]:
        """Return the batch as plain values, and its unknown tokens."""
        longest = max_decode_tokens(self._device.torch)
        num_groups = len(self.facts.kv_groups)
        return flatten(
            sequences,
            block_size=self._block_size,
            max_decode_tokens=longest,
            num_groups=num_groups,
            with_items=self.facts.vision is not None,
            with_adapters=self._adapters is not None,
        )

    wave: Wave | None = None
    """Lockstep of data-parallel cores. None if this core runs independently."""

    def padded_rows(self, inputs: StepInputs) -> int:
        """Return the number of rows that this rank would compute for these tokens."""
        num_tokens = inputs.num_tokens
        return padded_rows(num_tokens) if self._model.pads_rows and num_tokens else num_tokens

    def send(self, inputs: StepInputs | DecodeStep, feed: Feed = ()) -> None:
        """Start a step on the other ranks; run() computes this rank's part. Does nothing for a single rank."""

    def run(self, inputs: StepInputs | DecodeStep, feed: Feed = ()) -> torch.Tensor | None:
        """Compute a step. Return logits of the sampled tokens on the rank that samples, None on the others. `feed`:
        tokens known only on an asynchronous device; the host then waits for nothing.
        """
        if self.steps is not None:
            logits = self._run_beside_host(inputs, feed)
        else:
            assert not isinstance(inputs, DecodeStep)  # lay_out() makes none here
            logits = self._run(inputs, self._kv_tensors)
        self._end_step()
        return logits

    def _end_step(self) -> None:
        """Let experts move between two steps, at the same one on every rank that shares them."""
        if self.balancer is not None:
            self.balancer.on_step()

    @in_inference_mode
    def _run_beside_host(self, inputs: StepInputs | DecodeStep, feed: Feed) -> torch.Tensor | None:
        assert self.steps is not None
        placed = None
        if self._tower is not None and isinstance(inputs, StepInputs):  # a DecodeStep is text-only
            placed = self._items.place(inputs, self._tower)
        hidden, wanted = self.steps.run(inputs, feed, placed)
        return self._logits(hidden, wanted, inputs)

    @torch.inference_mode()
    def _run(self, inputs: StepInputs, kv_cache: KVTensors, num_layers: int | None = None) -> torch.Tensor | None:
        num_tokens, num_rows = len(inputs.token_ids), len(inputs.sampled)
        agreed_rows = 0 if inputs.agreed is None else inputs.agreed.num_tokens
        padding = [0] * (max(agreed_rows, self.padded_rows(inputs)) - num_tokens)
        device = self._device.torch
        is_native = self._model.is_compiled and kv_cache.keys[0].dtype == torch.float32 and not inputs.adapters
        metadata = [
            plan_cpu_reads(
                build_attention_metadata(
                    own.slots(self._block_size),
                    own.decodes,
                    own.chunks,
                    block_size=self._block_size,
                    device=device,
                    is_native=is_native,
                    window=None if group.each.is_chunked else group.each.window,
                    chunk_size=group.each.window if group.each.is_chunked else None,
                    gone=inputs.gone(own) if group.each.is_chunked else (),
                ),
                self.facts.num_attention_heads,
                kv_cache.keys[0],
            )
            for own, group in zip(inputs.groups, self.facts.kv_groups, strict=True)
        ]
        spans, num_computed = inputs.adapters, num_tokens + len(padding)
        with nullcontext() if self._adapters is None else self._adapters.rows.of_step(spans, num_computed):
            hidden = self._model.forward(
                torch.tensor(inputs.token_ids + padding, dtype=torch.int64, device=device),
                torch.tensor(
                    [axis + padding for axis in inputs.axes] or inputs.positions + padding,
                    dtype=torch.int64,
                    device=device,
                ),
                kv_cache,
                metadata,
                num_layers=num_layers,
                placed=None if self._tower is None else self._items.place(inputs, self._tower),
            )
        if self._keeps_hidden:
            assert isinstance(self._model, Decoder)  # else it was refused
            self._hidden = self._model.normalised(hidden)
        rows = padded_rows(num_rows) if self._model.pads_rows and num_rows else num_rows
        wanted = torch.tensor(inputs.sampled + [0] * (rows - num_rows), dtype=torch.int64, device=device)
        return self._logits(hidden, wanted, inputs)

    def _logits(
        self, hidden: torch.Tensor, wanted: torch.Tensor, inputs: StepInputs | DecodeStep
    ) -> torch.Tensor | None:
        """Logits of the rows that are sampled. `wanted` may go on with rows of padding."""
        if not self.shard.is_last_stage:
            return None
        if inputs.scored:
            self._scores = self._score(hidden, inputs.scored)
        if inputs.pooled and (self.groups.tensor is None or self.groups.tensor.index == 0):
            self._pooled = pool(hidden, inputs.pooled, self._model.normalised_rows)
        if not inputs.num_sampled:
            return torch.empty(0, self.facts.vocab_size, device=hidden.device)
        logits = self._model.logits(hidden, wanted)
        return None if logits is None else logits[: inputs.num_sampled]

    def _score(self, hidden: torch.Tensor, scored: list[tuple[int, int, int]]) -> ScoresInFlight:
        """Begin to judge the prompt's own next tokens, a few rows at a time, as the sampler takes them; nothing on a
        rank that has no logits.
        """
        scores = ScoresInFlight(Mark(hidden.device))
        for first in range(0, len(scored), ROWS_AT_ONCE):
            part = scored[first : first + ROWS_AT_ONCE]
            rows = padded_rows(len(part)) if self._model.pads_rows else len(part)
            indices, token_ids, wanted = (list(column) for column in zip(*part, strict=True))
            index = torch.tensor(indices + [0] * (rows - len(part)), dtype=torch.int64)
            logits = self._model.logits(hidden, send(index, hidden.device))
            if logits is not None:
                tokens = send(torch.tensor(token_ids, dtype=torch.int64), hidden.device)
                scores.add(logits[: len(part)].float().log_softmax(dim=-1), tokens, token_ids, wanted)
        return scores

    def _new_kv_cache(
        self,
        cap_blocks: int,
        *,
        layers: KVLayers | None = None,
        memory: AddressSpace | None = None,
        draft: KVLayers | None = None,
    ) -> KVCache:
        return KVCache(
            layers=layers or self.kv_layers,
            cap_blocks=cap_blocks,
            block_size=self._block_size,
            memory=memory or self._device.memory,
            draft=draft,
        )

    def _dummy_step(self, spans: list[tuple[int, int]], sampling: Sampling, adapter: Adapter | None = None) -> None:
        """Run a step of sequences (tokens before, tokens now) that share one KV block and an adapter. It runs only up
        to the first layer of each KV group: the others have the same shapes and reuse the same memory.
        """
        sequences = dummy_sequences(spans, sampling, self._block_size, num_groups=len(self.facts.kv_groups))
        for sequence in sequences:
            sequence.request.adapter = adapter
        firsts = [group.layers[0][0] for group in self.facts.kv_groups if group.layers]
        num_layers = 1 + max(firsts) - self.shard.layers[0]
        few = KVLayers(replace(self.facts.kv_groups[0], layers=((0, num_layers),)), self._kv_dtype)
        scratch = self._new_kv_cache(1, layers=few, memory=self._device.scratch)
        scratch.map_blocks(1)
        logits = self._run(self.flatten(sequences)[0], scratch, num_layers=num_layers)
        if logits is not None:
            sample(logits, [s.request for s in sequences])


def dummy_sequences(
    spans: list[tuple[int, int]], sampling: Sampling, block_size: int, *, num_groups: int = 1
) -> list[ScheduledSequence]:
    """Return sequences (tokens before, tokens now) that all share one KV block."""
    longest = max(before + now for before, now in spans)
    sequences = []
    for index, (before, now) in enumerate(spans):
        request = Request.of(f"profile-{index}", [0] * (before + now), sampling, arrival_time=0.0)
        request.block_tables = [[0] * -(-longest // block_size) for _ in range(num_groups)]
        request.num_out_of_window = [0] * num_groups
        sequences.append(ScheduledSequence(request, before, now, samples=True))
    return sequences


def envelope_spans(max_num_batched_tokens: int, max_len: int) -> list[tuple[int, int]]:
    """Return (tokens before, tokens now) of the largest step: whole prompts, and a rest at the end of a
    long context.
    """
    whole, rest = divmod(max_num_batched_tokens, max_len)
    return [(0, max_len)] * whole + ([(max_len - rest, rest)] if rest else [])
