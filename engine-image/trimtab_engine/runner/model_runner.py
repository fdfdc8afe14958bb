"""From a batch to logits: input tensors, the KV cache's tensors and their dtype, the forward pass. It knows no
scheduling policy.

Start-up order: ModelRunner.load → profile → (the engine computes the blocks) → init_kv_cache.
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
from trimtab_modelspec.quantization import Quantization, stored_quantization, wanted_quantization
from trimtab_modelspec.tensors import num_elements

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.experts import EplbConfig
from trimtab_engine.config.pooling import OfCheckpoint, Tasks, tasks_of
from trimtab_engine.config.vision import VisionConfig
from trimtab_engine.device.address_range import AddressSpace
from trimtab_engine.device.device import Device
from trimtab_engine.device.inference import inferring
from trimtab_engine.device.kv_cache import KVCache, KVLayers, KVTensors, copy_across
from trimtab_engine.device.swap_cache import SwapCache
from trimtab_engine.device.transfer import Mark, send
from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.layers.linear import padded_rows, row_sizes
from trimtab_engine.memory.encoder import EncoderLimits, kept_bytes
from trimtab_engine.memory.formula import Ledger
from trimtab_engine.memory.reserved import cpu_activation_bytes
from trimtab_engine.memory.sizing import Unmeasured, check_weights_fit, reserved_for_processes
from trimtab_engine.models.adapter_fit import bytes_of_adapters
from trimtab_engine.models.checkpoint import (
    KV_SCALE_SUFFIXES,
    check_tensors,
    check_tower,
    expected_shapes,
    expected_tensors,
)
from trimtab_engine.models.decoder import Decoder
from trimtab_engine.models.family import Model, Tower
from trimtab_engine.models.held_bytes import bytes_to_hold
from trimtab_engine.models.loading import Loader, packed_source
from trimtab_engine.models.pooler import pooling_of
from trimtab_engine.models.registry import (
    architecture_of,
    family_of,
    has_output_layer,
    kv_groups_of,
    open_model,
    open_tower,
    parse_model_config,
    parse_vision_config,
    tower_of,
)
from trimtab_engine.models.tower_share import TowerShare
from trimtab_engine.parallel.expert_balancer import ExpertBalancer
from trimtab_engine.parallel.groups import ALONE, RankGroups
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.parallel.shard import ModelShard, shard_model
from trimtab_engine.parallel.wave import Wave
from trimtab_engine.runner.adapters import AdapterSlots, LoadedAdapter, reads_slots
from trimtab_engine.runner.decode_step import DecodeLayout, DecodeStep
from trimtab_engine.runner.graphs.device_steps import AttentionShape, DeviceSteps, GraphCounts, StepLimits
from trimtab_engine.runner.graphs.plan import GraphPlan
from trimtab_engine.runner.graphs.recorder import Recorder
from trimtab_engine.runner.graphs.step_buffers import Feed
from trimtab_engine.runner.item_encoder import ItemEncoder
from trimtab_engine.sampling.device_sampler import DeviceSampler
from trimtab_engine.sampling.logprobs import ScoresInFlight
from trimtab_engine.sampling.pooling import PooledInFlight, pool
from trimtab_engine.sampling.sampler import ROWS_AT_ONCE, sample
from trimtab_engine.scheduling.adapter import Adapter
from trimtab_engine.scheduling.batch import Batch, ScheduledSequence
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.scheduling.step_inputs import StepInputs, Unknown, flatten
from trimtab_engine.weights.dummy import DummySource
from trimtab_engine.weights.four_bits import FourBitsSource
from trimtab_engine.weights.mxfp4 import Mxfp4Source
from trimtab_engine.weights.open import model_path
from trimtab_engine.weights.scaled import ScaledSource
from trimtab_engine.weights.source import WeightSource

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
logger = logging.getLogger("trimtab_engine.core")
KV_DTYPES = DTYPES | {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FLOAT8_E4M3_CAPABILITY = (8, 9)  # from which compute capability on Triton converts this format
ONE_RANK = Layout()
GREEDY = Sampling(temperature=0.0)
COSTLIEST_SAMPLING = Sampling(top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=0, logprobs=1)
Progress = Callable[[str, float], None]
ReadModel = tuple[Model, Tower | None]
"""What is read of a checkpoint: the tower only where this rank computes images and videos."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine needs to know of the loaded model. Heads are this rank's."""

    vocab_size: int
    max_model_len: int
    """What is served, up to what the model's positions allow."""
    eos_token_ids: tuple[int, ...]
    num_attention_heads: int
    head_size: int
    kv_groups: tuple[KVGroup, ...]
    """What this rank keeps of each token: keys and values of one size in all groups, or latent vectors."""
    dtype: str
    kv_cache_dtype: str
    kv_dtype_bytes: int
    quantization: str | None
    """How the layers' projections are stored; None: in dtype."""
    weights_bytes: int
    """What loading them took of the device."""
    whole: ModelConfig
    """The whole model's facts."""
    tasks: Tasks
    """What is done with prompts."""
    vision: VisionConfig | None = None
    """The tower's; None: images and videos are not computed. Only ranks of the first stage have it."""


class ModelRunner:
    """One rank's model and KV cache."""

    kv_cache: KVCache
    _kv_tensors: KVTensors
    _draft_layers: KVLayers | None
    steps: DeviceSteps | None = None
    """Steps with inputs at fixed places and, perhaps, graphs: on CUDA, once the KV cache has its addresses."""
    can_drop_weights = True
    drives_others = False
    kept_row_bytes = 0
    """What it keeps of each running request besides keys and values."""

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
        """`divides_items`: the ranks of the tensor-parallel group compute some of the images and videos each.
        `adapters`: those of the model's projections; None: it serves none."""
        self.facts = facts
        (self._model, self._tower), self._rebuild, self.shard, self.groups = loaded, rebuild, shard, groups
        self._items = ItemEncoder(device.torch, groups.tensor if divides_items else None)
        self._device, self._block_size, self._dtype = device, block_size, dtype
        self._decodes = DecodeLayout(block_size, self._sights)
        self._kv_dtype = kv_dtype
        self._scores: ScoresInFlight | None = None
        self._pooled: PooledInFlight | None = None
        self._keeps_hidden, self._hidden = False, torch.empty(0)
        self._eplb = eplb
        self._adapters = adapters
        self.balancer = self._new_balancer()
        """Balances the experts' load; None: they do not move."""

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        device: Device,
        progress: Progress,
        *,
        layout: Layout = ONE_RANK,
        rank: int = 0,
        groups: RankGroups = ALONE,
    ) -> "ModelRunner":
        """Read one rank's weights. progress gets ("weights", percent of them). Raises ModelError or ConfigError."""
        torch.manual_seed(config.seed)  # requests that bring no seed of their own draw from this generator
        source, model_config = _open(config)
        tasks = _tasks(config, source, model_config)
        vision = _vision(config, source, model_config)
        max_model_len = _max_model_len(config, model_config)
        shard = shard_model(
            model_config,
            layout,
            rank,
            placement=config.expert_placement_strategy,
            layer_partition=config.pipeline_layer_partition,
            num_redundant_experts=config.num_redundant_experts,
        )
        _check_device(model_config, device)
        kv_groups = _kv_groups(model_config, shard, layout)
        dtype = DTYPES[_dtype_name(config, model_config, device)]
        kv_dtype_name = _kv_dtype_name(config, dtype, device)
        kv_dtype = KV_DTYPES[kv_dtype_name]
        stored = stored_quantization(source.config, source.where)
        quantization = wanted_quantization(stored, config.quantization, has_weights=not isinstance(source, DummySource))
        tensors = expected_tensors(model_config)
        shares = layout.tensor if config.mm_encoder_tp_mode == "weights" else 1
        if vision is not None and shares > 1:
            TowerShare.of(vision, groups.tensor)  # what ranks cannot share is refused before any weight is read
        tower_bytes = _tower_bytes(vision, model_config, dtype) // shares if shard.is_first_stage else 0
        num_parameters = -(
            -num_elements(tensors.values()) // layout.ranks_per_engine
        )  # about: ranks are not quite equal
        adapters_bytes = 0
        if config.adapters is not None:
            are_of_one_rank = reads_slots(device.torch)
            adapters_bytes = bytes_of_adapters(
                config.adapters, tensors, dtype.itemsize, are_of_one_rank=are_of_one_rank
            )
        unmeasured = Unmeasured(
            device_bytes=device.total_bytes,
            other_bytes=(
                reserved_for_processes(config, model_config.vocab_size) if device.kind == "cpu" else device.used_bytes()
            ),
            limit_bytes=device.limit_bytes,
            weights_bytes=(
                bytes_to_hold(source, tensors, quantization, dtype, device.torch, config=model_config, shard=shard)
                + adapters_bytes
            )
            // layout.ranks_per_engine,
            tower_bytes=tower_bytes,
            kv_groups=kv_groups,
            kv_dtype_bytes=kv_dtype.itemsize,
            max_model_len=max_model_len,
        )
        check_weights_fit(config, unmeasured)
        adapters = None
        if config.adapters is not None:
            adapters = AdapterSlots(config.adapters, tensors, shard, dtype=dtype, device=device.torch)

        def build(source: WeightSource, report: Callable[[int], None]) -> ReadModel:
            device.before_weights()
            with torch.inference_mode():
                load = Loader(source, dtype, device.torch, report, quantization, adapters)
                model = family_of(model_config.architecture).build(model_config, load, shard, groups)
                if adapters is not None:
                    adapters.open(model_config.architecture)
                tower = _load_tower(config, model_config, vision, load, groups) if shard.is_first_stage else None
            device.after_weights()
            say_what_was_restored(load)
            return model, tower

        _say_how_it_is_held(source, quantization, dtype, device.torch)
        _say_what_kv_scales_are_for(source, kv_dtype)
        progress("weights", 0.0)
        source.map_files()  # before, so that what is measured is what the model keeps
        with device.measure() as growth:
            loaded = build(source, _percent("weights", num_parameters, progress))
        facts = ModelFacts(
            vocab_size=model_config.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=model_config.eos_token_ids,
            num_attention_heads=shard.num_heads,
            head_size=model_config.head_size,
            kv_groups=kv_groups,
            dtype=str(dtype).removeprefix("torch."),
            kv_cache_dtype=kv_dtype_name,
            kv_dtype_bytes=kv_dtype.itemsize,
            quantization=_quantization_name(source, quantization),
            weights_bytes=max(0, growth.kept),
            whole=model_config,
            tasks=tasks,
            vision=vision,
        )
        rebuild = lambda: build(_open(config)[0], lambda count: None)  # noqa: E731
        return cls(
            loaded,
            rebuild,
            facts,
            shard,
            groups,
            device,
            config.block_size,
            dtype,
            kv_dtype,
            config.eplb,
            divides_items=config.mm_encoder_tp_mode == "data",
            adapters=adapters,
        )

    def _new_balancer(self) -> ExpertBalancer | None:
        """A balancer of experts that are where they were loaded."""
        moe, group, mixtures = self.facts.whole.moe, self.groups.expert, self._model.mixtures
        if self._eplb is None or moe is None or group is None or not mixtures:
            return None
        return ExpertBalancer(self._eplb, mixtures, moe.num_experts, group)

    def drop_weights(self) -> None:
        """Give the weights' memory back. Nothing runs until reload_weights()."""
        if self.steps is not None:
            self.steps.drop_model()
        self.balancer = None
        if self._adapters is not None:
            self._adapters.close()
        del self._model, self._tower
        self._device.after_weights()

    def reload_weights(self) -> None:
        """Read them again, from where they were read. Raises ModelError; MemoryError, without weights, where the device
        has no room for them."""
        try:
            self._model, self._tower = self._rebuild()
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error).splitlines()[0]) from error
        self.balancer = self._new_balancer()
        if self.steps is not None:
            self.steps.use_model(self._model)

    @property
    def adapters(self) -> list[LoadedAdapter]:
        """What is loaded, in the order of its slots."""
        return [] if self._adapters is None else self._adapters.loaded

    def load_adapter(self, slot: int, name: str, folder: str) -> bytes:
        """Read an adapter into a slot that nobody uses; no step is in flight. Returns the digest of its files. Raises
        ConfigError, and then nothing has changed."""
        assert self._adapters is not None  # else it was refused
        with torch.inference_mode():
            return self._adapters.load(slot, name, folder)

    def forget_adapter(self, slot: int) -> None:
        """Nobody uses it any more: it is not read again with the weights."""
        assert self._adapters is not None
        self._adapters.forget(slot)

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int, encoder: EncoderLimits | None = None) -> int:
        """Run the largest step of the envelope and every row size once; returns what steps take, in bytes.

        It includes what stays: code that oneDNN compiles per row size, and the allocator's reserve. The largest come
        first, so that the smaller ones fit into memory that the allocator already has. On CUDA images and videos within
        the limits of `encoder` are among them, which also compiles what the tower launches.
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
            if self._adapters is not None and (adapter := self._adapters.rehearsed()) is not None:
                self._dummy_step([(0, 1)] * max_num_seqs, GREEDY, adapter)
                self._dummy_step(envelope_spans(max_num_batched_tokens, max_len), GREEDY, adapter)
            for rows in reversed(sizes):
                self._dummy_step([(0, 1)] * rows, GREEDY)
        return growth.peak if self._device.kind == "cuda" else cpu_activation_bytes(growth.peak, len(sizes))

    def items_bytes(self, limits: EncoderLimits, max_num_batched_tokens: int) -> int:
        """What images and videos take of this rank's device beside text, at most. On CUDA what the tower takes is
        measured by profile()."""
        vision, dtype_bytes = self.facts.vision, self._dtype.itemsize
        if vision is None or self._tower is None:
            return 0
        if self._device.kind == "cpu":
            return limits.num_bytes(vision, dtype_bytes)
        summed = limits.step_budget if self._items.are_divided else 0  # by the ranks, before a step's are put together
        return kept_bytes(vision, limits.num_kept_tokens + max(summed, max_num_batched_tokens), dtype_bytes)

    def init_kv_cache(self, cap_blocks: int, draft: KVLayers | None = None) -> None:
        """Reserve the KV cache's address range, with a draft model's layers in it, and map block 0: attention, which on
        CUDA is compiled here, reads it. Further blocks are the engine's to map."""
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
            for sight in {group.sight for group in self.facts.kv_groups if group.layers}:
                warm_up_attention(
                    query,
                    self._kv_tensors.keys[0],
                    self._kv_tensors.values[0],
                    window=None if sight.is_chunked else sight.window,
                    chunk_size=sight.window if sight.is_chunked else None,
                    sinks=sinks,
                )

    def _warm_up_copies(self, other: KVCache) -> None:
        """On CUDA copies to and from the KV cache are compiled here, not when the first block moves; and host memory
        that the device does not reach is found out. Block 0 is mapped, and nobody's yet."""
        if self._device.kind == "cuda":
            copy_across(other, self.kv_cache, [(0, 0)])
            copy_across(self.kv_cache, other, [(0, 0)])

    def use_device_steps(self, config: EngineConfig, plan: GraphPlan, recorder: Recorder) -> DeviceSteps:
        """From now on inputs lie at fixed places, and steps replay the plan's graphs once these are captured."""
        whole, facts = self.facts.whole, self.facts
        limits = StepLimits(
            max_num_batched_tokens=config.max_num_batched_tokens_cap,
            max_num_seqs=config.max_num_seqs_cap,
            max_num_rows=config.max_num_sampled_rows,
            max_model_len=facts.max_model_len,
            block_size=self._block_size,
            num_axes=1 if facts.vision is None else facts.vision.num_axes,
            sights=self._sights,
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
    def _sights(self) -> tuple[AttentionWindow, ...]:
        """How far the tokens of each KV group see."""
        return tuple(group.sight for group in self.facts.kv_groups)

    @property
    def kv_rounding_bytes(self) -> int:
        """What pages of the KV cache's memory may take beyond its blocks."""
        return self._device.kv_rounding_bytes(self.kv_layers.num_regions)

    @property
    def kv_layers(self) -> KVLayers:
        """What the model needs of a KV cache: blocks as large as the largest group's."""
        return KVLayers(max(self.facts.kv_groups, key=lambda group: group.num_layers), self._kv_dtype)

    def new_swap_cache(self, num_blocks: int) -> SwapCache:
        """Host memory for that many blocks like the KV cache's."""
        host = self._new_kv_cache(num_blocks, memory=self._device.swap_memory, draft=self._draft_layers)
        host.map_blocks(num_blocks)
        self._warm_up_copies(host)
        return SwapCache(self.kv_cache, host)

    def limit_model_len(self, max_model_len: int) -> None:
        """Serve shorter requests than the model could; nothing that was measured grows by it."""
        self.facts = replace(self.facts, max_model_len=max_model_len)

    def execute(self, sequences: list[ScheduledSequence]) -> torch.Tensor:
        """Compute a batch. Returns logits [rows, vocab_size] of the sequences that sample, in their order,
        a row for each one's newest token, and one for each of its drafts."""
        inputs, _ = self.flatten(sequences)
        self.send(inputs)
        logits = self.run(inputs)
        assert logits is not None  # the engine holds a rank of the last stage
        return logits

    def take_scores(self) -> ScoresInFlight | None:
        """The scores of the prompt tokens that the last step was to judge, in the order of StepInputs.scored; None
        without any."""
        scores, self._scores = self._scores, None
        return scores

    def take_pooled(self) -> PooledInFlight | None:
        """What the last step was to pool, in the order of StepInputs.pooled; None without any."""
        pooled, self._pooled = self._pooled, None
        return pooled

    @property
    def model(self) -> Model:
        """This rank's."""
        return self._model

    @property
    def weights_bytes(self) -> int:
        """What the weights took of the device."""
        return self.facts.weights_bytes

    @property
    def vocab_size(self) -> int:
        """How many tokens it has logits for."""
        return self.facts.vocab_size

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self._block_size

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of what the KV cache keeps."""
        return self._kv_dtype

    def keep_hidden(self) -> None:
        """From now on each step's hidden states are kept until the next one: heads that draft begin with them."""
        self._keeps_hidden = True

    def take_hidden(self) -> torch.Tensor:
        """The last step's hidden states behind the last norm, a row for each of its tokens, padding included."""
        hidden, self._hidden = self._hidden, torch.empty(0)
        return hidden

    def ledgers(self, own: Ledger) -> dict[int, Ledger]:
        """The ledgers of this rank and of every one that it drives, by rank: alone it has only its own."""
        return {0: own}

    def take_wire_bytes(self) -> dict[str, int]:
        """What went over this rank's wire since the last call, by kind of collective: alone it has none."""
        return {}

    def take_graph_counts(self) -> GraphCounts:
        """What steps replayed since the last call, and what was compiled for them."""
        return GraphCounts() if self.steps is None else self.steps.take_counts()

    def close(self) -> None:
        """End what belongs to this runner."""
        if self.steps is not None:
            self.steps.drop_graphs()

    def lay_out(self, batch: Batch) -> tuple[StepInputs | DecodeStep, list[Unknown]]:
        """As flatten(), in columns where that is enough: on a device beside the host, with no other rank to tell."""
        in_columns = batch.only_decodes and batch.sequences and self.steps is not None and not self.drives_others
        if in_columns and not (batch.displaced or batch.missing):
            return self._decodes.lay_out(batch), []
        return self.flatten(batch.sequences)

    def flatten(self, sequences: list[ScheduledSequence]) -> tuple[StepInputs, list[Unknown]]:
        """The batch as plain values, and which of its tokens are not known yet."""
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
    """The steps that data-parallel cores make together; None: this core is on its own."""

    def padded_rows(self, inputs: StepInputs) -> int:
        """Rows that this rank would compute for these tokens."""
        num_tokens = inputs.num_tokens
        return padded_rows(num_tokens) if self._model.pads_rows and num_tokens else num_tokens

    def send(self, inputs: StepInputs | DecodeStep, feed: Feed = ()) -> None:
        """Let the other ranks begin a step; run() computes this rank's part. One rank alone has nobody to tell."""

    def run(self, inputs: StepInputs | DecodeStep, feed: Feed = ()) -> torch.Tensor | None:
        """Compute a step. Logits of the sampled tokens on the rank that samples, None on the others. `feed`: tokens
        that the device alone knows, where it works beside the host, which then waits for nothing."""
        if self.steps is not None:
            logits = self._run_beside_host(inputs, feed)
        else:
            assert not isinstance(inputs, DecodeStep)  # lay_out() makes none here
            logits = self._run(inputs, self._kv_tensors)
        self._end_step()
        return logits

    def _end_step(self) -> None:
        """Between two steps experts may move: at the same one on every rank that shares them."""
        if self.balancer is not None:
            self.balancer.on_step()

    @inferring
    def _run_beside_host(self, inputs: StepInputs | DecodeStep, feed: Feed) -> torch.Tensor | None:
        assert self.steps is not None
        placed = None
        if self._tower is not None and isinstance(inputs, StepInputs):  # a DecodeStep has text alone
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
        rank that has no logits."""
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
        """One step of sequences (tokens before, tokens now) that all share one KV block, and an adapter.

        Up to the first layer of each KV group only: the others have the same shapes and reuse the same memory.
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
    """Sequences (tokens before, tokens now) that all share one KV block."""
    longest = max(before + now for before, now in spans)
    sequences = []
    for index, (before, now) in enumerate(spans):
        request = Request.of(f"profile-{index}", [0] * (before + now), sampling, arrival_time=0.0)
        request.block_tables = [[0] * -(-longest // block_size) for _ in range(num_groups)]
        request.num_gone = [0] * num_groups
        sequences.append(ScheduledSequence(request, before, now, samples=True))
    return sequences


def envelope_spans(max_num_batched_tokens: int, max_len: int) -> list[tuple[int, int]]:
    """(tokens before, tokens now) of the largest step: whole prompts, and a rest at the end of a long context."""
    whole, rest = divmod(max_num_batched_tokens, max_len)
    return [(0, max_len)] * whole + ([(max_len - rest, rest)] if rest else [])


def _open(config: EngineConfig) -> tuple[WeightSource, ModelConfig]:
    """The checkpoint, found complete. Raises ModelError."""
    source = open_model(config.model, config.load_format, seed=config.seed)
    model_config = parse_model_config(source.config, source.generation_config, source.where)
    if isinstance(source, DummySource):
        source.device = config.device
        source.expect(expected_shapes(model_config))
    check_tensors(model_config, source)
    return source, model_config


def _tasks(config: EngineConfig, source: WeightSource, model: ModelConfig) -> Tasks:
    """What is done with prompts. Raises ModelError, ConfigError, and NotSupportedError for what follows the model in a
    checkpoint that pools."""
    said = OfCheckpoint()
    if config.runner != "generate":
        said = pooling_of(model_path(config.model), source, config.pooler.pooling_type)
    return tasks_of(config.runner, config.pooler, said, model.hidden_size, has_output_layer=has_output_layer(source))


def _vision(config: EngineConfig, source: WeightSource, model: ModelConfig) -> VisionConfig | None:
    """The tower that is to compute images and videos; None: there is none, or none is wanted. Raises ModelError, and
    NotSupportedError where it is not supported."""
    kind = tower_of(model)
    if kind is None or not config.modalities or "vision_config" not in source.config:
        return None
    if config.device == "cuda" and kind.not_on_cuda:
        name = architecture_of(source.config, source.where)
        raise NotSupportedError(
            f"images and videos are not supported on CUDA for {name}: {kind.not_on_cuda}; serve its text "
            f"""alone, with --limit-mm-per-prompt '{{"image": 0, "video": 0}}', or use --device cpu"""
        )
    return parse_vision_config(source, model)


def _tower_bytes(vision: VisionConfig | None, model: ModelConfig, dtype: torch.dtype) -> int:
    """What a whole tower takes."""
    kind = tower_of(model)
    return 0 if kind is None or vision is None else num_elements(kind.tensors(vision).values()) * dtype.itemsize


def _load_tower(
    config: EngineConfig, model: ModelConfig, vision: VisionConfig | None, text: Loader, groups: RankGroups
) -> Tower | None:
    """The tower, or this rank's share of it, in the dtype of the text half and never quantised."""
    kind = tower_of(model)
    if kind is None or vision is None:
        return None
    source = open_tower(config.model, config.load_format, seed=config.seed)
    shapes = {name: tensor.shape for name, tensor in kind.tensors(vision).items()}
    if isinstance(source, DummySource):
        source.device = config.device
        source.expect(shapes)
    if not kind.renames_tensors:
        check_tower(shapes, source)
    group = groups.tensor if config.mm_encoder_tp_mode == "weights" else None
    return kind.build(vision, Loader(source, text.dtype, text.device, lambda count: None), group)


def _check_device(model: ModelConfig, device: Device) -> None:
    """Raise NotSupportedError for a family whose layers this device's kernels do not have."""
    if device.kind == "cuda" and (lacking := family_of(model.architecture).not_on_cuda):
        raise NotSupportedError(f"{model.architecture} is not supported on CUDA: {lacking}; use --device cpu")


def _kv_groups(model: ModelConfig, shard: ModelShard, layout: Layout) -> tuple[KVGroup, ...]:
    """What this rank keeps of each token. Raises NotSupportedError for another geometry than those that attention
    and the KV cache have: keys and values of one size in all groups, or latent vectors that are both."""
    groups = kv_groups_of(model)
    said = ", ".join(map(_in_words, groups))
    if len({replace(group.each, window=None, is_chunked=False) for group in groups}) > 1 or any(
        group.each.value_size not in (group.each.key_size, 0) for group in groups
    ):
        raise NotSupportedError(
            f"the KV cache of {model.architecture} is not supported: {said}; supported are keys and values of one "
            f"size, or "
            f"latent vectors"
        )
    return tuple(group.on_rank(shard.layers, layout.tensor) for group in groups)


def _in_words(group: KVGroup) -> str:
    each = group.each
    sight = "that see all"
    if each.window is not None:
        sight = f"of {'chunks' if each.is_chunked else 'a window'} of {each.window}"
    return f"{group.num_layers} layers {sight}, keys of {each.key_size} and values of {each.value_size}"


def _quantization_name(source: WeightSource, quantization: Quantization | None) -> str | None:
    """How the weights are quantised, in people's words."""
    if quantization is not None:
        return quantization.name
    return source.form.name if isinstance(source, FourBitsSource | ScaledSource | Mxfp4Source) else None


def _say_how_it_is_held(
    source: WeightSource, quantization: Quantization | None, dtype: torch.dtype, device: torch.device
) -> None:
    """What is computed of weights that are stored smaller, in the log."""
    if not isinstance(source, FourBitsSource | ScaledSource | Mxfp4Source):
        return
    if packed_source(source, dtype, device, quantization) is None:
        how = f"restored to {str(dtype).removeprefix('torch.')} as they load"
    else:
        how = "multiplied as they are stored; what cannot be is restored as it loads, and named then"
    logger.info("weights: %s, %s, %s", source.form.name, source.form.words, how)


def _say_what_kv_scales_are_for(source: WeightSource, kv_dtype: torch.dtype) -> None:
    """In the log, where a checkpoint has scales of keys and values that are of no use."""
    if kv_dtype.itemsize > 1 and any(name.endswith(KV_SCALE_SUFFIXES) for name in source.shapes()):
        logger.info("KV cache: the checkpoint's scales of keys and values are for --kv-cache-dtype fp8 alone")


def say_what_was_restored(load: Loader) -> None:
    """What is held larger than it is stored, in the log."""
    if load.restored:
        dtype = str(load.dtype).removeprefix("torch.")
        logger.info("weights: restored to %s as they loaded: %s", dtype, ", ".join(load.restored))


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The longest request, before what fits is known. Raises ConfigError, before any weight is read."""
    if config.max_model_len == "auto":  # cut to what fits once that is known (startup.py)
        return model.max_model_len
    longest = model.max_model_len if config.max_model_len is None else config.max_model_len
    if not 1 <= longest <= model.max_model_len:
        raise ConfigError(f"--max-model-len is {longest}; the model's positions allow 1 to {model.max_model_len}")
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < longest:
        raise ConfigError(
            f"--no-enable-chunked-prefill admits whole prompts only, but --max-num-batched-tokens "
            f"{config.max_num_batched_tokens} is below max_model_len {longest}; raise it to {longest} or more, or "
            f"lower --max-model-len"
        )
    return longest


def _kv_dtype_name(config: EngineConfig, dtype: torch.dtype, device: Device) -> str:
    """The KV cache's dtype by its name on the command line: auto is the model's, fp8 is fp8_e4m3."""
    name: str = config.kv_cache_dtype
    if name == "auto":
        return str(dtype).removeprefix("torch.")
    name = "fp8_e4m3" if name == "fp8" else name
    if name == "fp8_e4m3" and device.kind == "cuda":
        capability = torch.cuda.get_device_capability(device.torch)
        if capability < FLOAT8_E4M3_CAPABILITY:
            raise ConfigError(
                f"--kv-cache-dtype {config.kv_cache_dtype} needs a GPU of compute capability 8.9 or later, this one "
                f"has {capability[0]}.{capability[1]}; use fp8_e5m2, or auto"
            )
    return name


def _dtype_name(config: EngineConfig, model: ModelConfig, device: Device) -> str:
    """auto: float32 on the CPU, which multiplies it fastest; the checkpoint's on CUDA."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device.kind == "cpu" else model.dtype


def _percent(stage: str, total: int, progress: Progress) -> Callable[[int], None]:
    """Turns counts of elements into percent of a stage, reported when a further whole percent is reached."""
    done, reported = 0, 0

    def add(count: int) -> None:
        nonlocal done, reported
        done += count
        percent = min(100, 100 * done // total)
        if percent > reported:
            reported = percent
            progress(stage, float(percent))

    return add
