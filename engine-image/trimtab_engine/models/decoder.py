"""Decoder shared by most families: embeddings, layers of attention and MLP or MoE, a norm, the output layer. The
configuration selects the differences between families (biases, norms of q and k, experts).

A step takes token ids and positions of all scheduled tokens and returns their hidden states; logits are computed for
the requested rows only. q, k, v are one matmul, gate and up another. The MLP runs in slices of rows, so that its wide
intermediate stays in the cache and the activations' peak does not depend on it.

A rank computes its shard: some layers, and of each some heads and some columns of the MLP; the groups sum the
partial results, twice per layer, and pass hidden states from stage to stage.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from trimtab_kernels.moe.sigmoid_routing import SigmoidRouting
from trimtab_kernels.native.decoder import DecoderShape, LayerWeights
from trimtab_kernels.native.quantised import QuantisedBlocks
from trimtab_kernels.paged_attention import AttentionMetadata
from trimtab_kernels.rms_norm import add_rms_norm, gather_rms_norm, rms_norm
from trimtab_kernels.rope_and_cache import Norms
from trimtab_kernels.rotary_embedding import interleave_pairs
from trimtab_kernels.skinny_gemm import MAX_ROWS as MAX_FEW_ROWS
from trimtab_modelspec.config import ModelConfig, MoeConfig
from trimtab_modelspec.families.decoder import decoder_kv
from trimtab_modelspec.kv_groups import KVLayerIndex, LayerKV, groups_of, kv_layer_indices

from trimtab_engine.device.kv_cache import KVTensors
from trimtab_engine.layers.adapted import AdaptedLinear
from trimtab_engine.layers.attention import Attention, KVScales
from trimtab_engine.layers.gated_mlp import ClampedMlp, GatedMlp, GeluMlp
from trimtab_engine.layers.latent_attention import LatentAttention
from trimtab_engine.layers.linear import MAX_ROWS, Linear, pads_rows
from trimtab_engine.layers.moe import Experts, MixtureOfExperts, StackedExperts
from trimtab_engine.layers.quantized import stacked
from trimtab_engine.layers.rotary import RotaryAngles, Rotation, identity_rotation
from trimtab_engine.layers.vocabulary import LmHead, Placed, VocabularyEmbedding
from trimtab_engine.models.compiled_layers import compile_layers, is_library_missing, why_not
from trimtab_engine.models.loading import Loader
from trimtab_engine.parallel.expert_slots import ExpertSlots
from trimtab_engine.parallel.experts import expert_map
from trimtab_engine.parallel.groups import SINGLE_RANK, RankGroups
from trimtab_engine.parallel.shard import ModelShard
from trimtab_engine.weights.source import Span

logger = logging.getLogger("trimtab_engine.core")


def load_norm(config: ModelConfig, name: str, load: Loader) -> torch.Tensor:
    """A norm's weight, as it is multiplied with."""
    weight = load.copy(name)
    return weight + config.norm_offset if config.norm_offset else weight


def load_mlp(config: ModelConfig, prefix: str, shard: ModelShard, groups: RankGroups, load: Loader) -> GatedMlp:
    """This rank's columns of the gated MLP."""
    down = load.summed(prefix + "down_proj", shard.mlp, groups.tensor, has_bias=config.mlp_bias)
    if config.is_gelu:
        parts = {"gate_proj": shard.mlp, "up_proj": shard.mlp}
        return GeluMlp(load.joined(prefix, parts, has_bias=config.mlp_bias), down)
    return GatedMlp(load.gated(prefix, "gate_proj", "up_proj", shard.mlp, has_bias=config.mlp_bias), down)


def load_attention(config: ModelConfig, prefix: str, shard: ModelShard, groups: RankGroups, load: Loader) -> Attention:
    """This rank's heads."""
    size = config.head_size
    heads, kv_heads = head_rows(shard.heads, size), head_rows(shard.kv_heads, size)
    parts = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    norms = None
    if config.qk_norm:
        weights = (load_norm(config, f"{prefix}{name}.weight", load) for name in ("q_norm", "k_norm"))
        query, key = (interleave_pairs(weight, size) for weight in weights)
        norms = Norms(query, key, config.rms_norm_eps)
    return Attention(
        load.joined(prefix, parts, has_bias=config.qkv_bias, pairs=size),
        load.summed(prefix + "o_proj", heads, groups.tensor, has_bias=config.output_bias),
        scale=attention_scale(config),
        norms=norms,
        sinks=load(prefix + "sinks", rows=shard.heads).float() if config.has_sinks else None,
        kv_scales=KVScales(load.kv_scale(prefix, "k"), load.kv_scale(prefix, "v")),
    )


def load_moe(config: ModelConfig, prefix: str, shard: ModelShard, groups: RankGroups, load: Loader) -> MixtureOfExperts:
    """The experts, or slices of them, that this rank holds."""
    moe = config.moe
    assert moe is not None
    if moe.is_stacked:
        return _load_stacked_moe(config, prefix, shard, groups, load)
    slots, held = expert_places(moe, shard, load.device)
    return MixtureOfExperts(
        load.router(prefix + "gate.weight", moe.num_experts),
        _load_experts(f"{prefix}experts.", shard, load, can_move=slots is not None),
        top_k=moe.num_experts_per_token,
        renormalize=moe.renormalize,
        sigmoid=load_sigmoid(moe, prefix, load),
        shared=load_part_of_sum(prefix + "shared_experts.", shard.shared_mlp, load) if moe.shared_size else None,
        expert_map=held,
        groups=groups,
        slots=slots,
    )


def _load_experts(prefix: str, shard: ModelShard, load: Loader, *, can_move: bool) -> Experts:
    """Return each weight by itself where weights are multiplied in blocks; experts that move among ranks are
    dequantised.
    """
    wide = shard.expert_mlp
    if load.is_packed and not can_move:
        return [load_part_of_sum(f"{prefix}{expert}.", wide, load) for expert in shard.experts]
    w13, w2 = [], []
    for expert in shard.experts:
        of_expert = f"{prefix}{expert}."
        w13.append(load.expert(of_expert, ("gate_proj", "up_proj"), rows=wide))
        w2.append(load.expert(of_expert, ("down_proj",), columns=wide))
    (gate_up, gate_up_scales), (down, down_scales) = stacked(w13), stacked(w2)
    return StackedExperts(gate_up, down, gate_up_scales, down_scales)


def load_sigmoid(moe: MoeConfig, prefix: str, load: Loader) -> SigmoidRouting | None:
    """Router parameters for sigmoid scoring; None if experts are chosen by softmax."""
    how = moe.sigmoid
    if how is None:
        return None
    return SigmoidRouting(
        weighs_inputs=how.weighs_inputs,
        bias=load.wide(prefix + "gate.e_score_correction_bias") if how.has_bias else None,
        num_groups=how.num_groups,
        num_top_groups=how.num_top_groups,
        factor=how.factor,
    )


def load_part_of_sum(prefix: str, wide: Span, load: Loader) -> GatedMlp:
    """Return these columns of one expert's MLP, or of the shared experts, whose outputs the MoE layer sums."""
    return GatedMlp(load.gated(prefix, "gate_proj", "up_proj", wide), load.part_of_sum(prefix + "down_proj", wide))


def _load_stacked_moe(
    config: ModelConfig, prefix: str, shard: ModelShard, groups: RankGroups, load: Loader
) -> MixtureOfExperts:
    """The same from one tensor per projection, which holds every expert's transposed, gate and up in turn."""
    moe = config.moe
    assert moe is not None
    slots, held = expert_places(moe, shard, load.device)
    each = (_load_clamped_expert(prefix + "experts.", expert, shard.expert_mlp, load) for expert in shard.experts)
    experts: Experts
    if load.is_packed and slots is None:
        assert moe.clamped_gate is not None
        experts = [ClampedMlp(Linear(w13, b13), Linear(w2, b2), moe.clamped_gate) for (w13, b13), (w2, b2) in each]
    else:
        wide, down = zip(*each, strict=True)
        (w13s, b13s), (w2s, b2s) = zip(*wide, strict=True), zip(*down, strict=True)
        experts = StackedExperts(
            torch.stack(w13s),
            torch.stack(w2s),
            w13_bias=torch.stack(b13s),
            w2_bias=torch.stack(b2s),
            clamped_gate=moe.clamped_gate,
        )
    return MixtureOfExperts(
        load.router(prefix + "router.weight", moe.num_experts, bias=prefix + "router.bias"),
        experts,
        top_k=moe.num_experts_per_token,
        renormalize=moe.renormalize,
        expert_map=held,
        groups=groups,
        slots=slots,
    )


def _load_clamped_expert(
    prefix: str, expert: int, wide: Span, load: Loader
) -> tuple[tuple[torch.Tensor | QuantisedBlocks, torch.Tensor], tuple[torch.Tensor | QuantisedBlocks, torch.Tensor]]:
    """Return (weight, bias) of gate and up, gate's rows first, and of down. Only the rank with the first slice of an
    expert has down's bias.
    """
    in_halves = partial(_gate_before_up, wide=wide)
    gate_up = load.stacked_expert(prefix + "gate_up_proj", expert)
    down = load.stacked_expert(prefix + "down_proj", expert, columns=wide)
    biases = [load(f"{prefix}{name}_bias", rows=(expert, expert + 1))[0] for name in ("gate_up_proj", "down_proj")]
    return (
        gate_up.select_rows(in_halves) if isinstance(gate_up, QuantisedBlocks) else in_halves(gate_up),
        in_halves(biases[0]),
    ), (
        down if isinstance(down, QuantisedBlocks) else down.contiguous(),
        torch.zeros_like(biases[1]) if wide[0] else biases[1],
    )


def _gate_before_up(rows: torch.Tensor, wide: Span) -> torch.Tensor:
    """Return this slice's rows of interleaved gate and up."""
    first, last = wide
    return torch.cat([rows[2 * first : 2 * last : 2], rows[2 * first + 1 : 2 * last : 2]])


def expert_places(
    moe: MoeConfig, shard: ModelShard, device: torch.device
) -> tuple[ExpertSlots | None, torch.Tensor | None]:
    """Return (slots if experts can move, otherwise the map of local experts if other ranks hold some)."""
    slots = None
    if shard.expert_placement is not None:
        slots = ExpertSlots(
            shard.expert_placement,
            num_experts=moe.num_experts,
            num_ranks=len(shard.expert_placement) // len(shard.experts),
            index=shard.expert_index,
            device=device,
        )
    is_split = slots is None and len(shard.experts) < moe.num_experts
    return slots, torch.tensor(expert_map(moe.num_experts, shard.experts), device=device) if is_split else None


@dataclass(frozen=True, slots=True)
class FusedProjections:
    """Matmuls of a layer, each fused with the operations before and after it."""

    attention: Attention
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear


class DecoderLayer:
    """Decoder layer: attention, then an MLP or MoE, each with a pre-norm and a residual connection."""

    def __init__(
        self, config: ModelConfig, layer: int, place: KVLayerIndex, shard: ModelShard, groups: RankGroups, load: Loader
    ) -> None:
        prefix = f"model.layers.{layer}."
        self._place = place
        self._eps = config.rms_norm_eps
        self._turn = rotation_index(config, layer)
        self._adapter_rows = load.adapter_rows
        self._input_norm = self.load_input_norm(config, layer, load)
        self.attention = self.load_attention(config, layer, shard, groups, load)
        self._mlp_norm = load_norm(config, prefix + "post_attention_layernorm.weight", load)
        self.is_moe = config.is_moe_layer(layer)
        self.feed_forward = self.load_feed_forward(config, layer, shard, groups, load)
        self._skinny_gemm = self._fused_projections()

    def _fused_projections(self) -> FusedProjections | None:
        """Projections for skinny steps without adapters; None if a weight is quantised, results are summed over ranks,
        or the layer has operations that the fused kernels do not implement.
        """
        attention, mlp = self.attention, self.feed_forward
        if type(self) is not DecoderLayer or type(attention) is not Attention or type(mlp) is not GatedMlp:
            return None
        adapted = [attention.qkv, attention.output, mlp.gate_up, mlp.down]
        products = [product.base if isinstance(product, AdaptedLinear) else product for product in adapted]
        linear = [product for product in products if isinstance(product, Linear) and product.joins_few_rows]
        return FusedProjections(attention, *linear) if len(linear) == len(products) else None

    @staticmethod
    def load_input_norm(config: ModelConfig, layer: int, load: Loader) -> torch.Tensor | None:
        """Norm of the attention input; None if the input is not normalised."""
        return load_norm(config, f"model.layers.{layer}.input_layernorm.weight", load)

    @staticmethod
    def load_attention(
        config: ModelConfig, layer: int, shard: ModelShard, groups: RankGroups, load: Loader
    ) -> Attention | LatentAttention:
        """The first half, as most families store it."""
        return load_attention(config, f"model.layers.{layer}.self_attn.", shard, groups, load)

    @staticmethod
    def load_feed_forward(
        config: ModelConfig, layer: int, shard: ModelShard, groups: RankGroups, load: Loader
    ) -> GatedMlp | MixtureOfExperts:
        """The second half, likewise."""
        make = load_moe if config.is_moe_layer(layer) else load_mlp
        return make(config, f"model.layers.{layer}.mlp.", shard, groups, load)

    def __call__(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        turns: Sequence[Rotation],
        kv_cache: KVTensors,
        metadata: Sequence[AttentionMetadata],
    ) -> torch.Tensor | None:
        """Compute hidden [num_tokens, hidden_size] in place. `delta`: the previous layer's output that is not yet added
        to hidden, so that the addition and the norm are one pass over memory (None if already added). Returns this
        layer's delta.
        """
        joins = self._skinny_gemm is not None and not self._adapter_rows.has_any
        if joins and self._input_norm is not None and hidden.shape[0] <= MAX_FEW_ROWS:
            assert self._skinny_gemm is not None
            self._compute_few_rows(self._skinny_gemm, hidden, delta, turns, kv_cache, metadata)
            return None
        attended = self._attend(hidden, delta, turns, kv_cache, metadata)
        if hidden.shape[0] <= MAX_ROWS or self.is_moe or hidden.is_cuda:
            return self._feed_forward(add_rms_norm(attended, hidden, self._mlp_norm, self._eps))
        hidden.add_(attended)
        for first, part in zip(range(0, hidden.shape[0], MAX_ROWS), torch.split(hidden, MAX_ROWS), strict=True):
            with self._adapter_rows.of_part(first, part.shape[0]):
                part.add_(self.mlp(part))
        return None

    def _compute_few_rows(
        self,
        joined: FusedProjections,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        turns: Sequence[Rotation],
        kv_cache: KVTensors,
        metadata: Sequence[AttentionMetadata],
    ) -> None:
        """Compute the whole layer in six launches: norms, gates and sums are fused into the matmuls."""
        if delta is not None:
            hidden.add_(delta)
        place, eps = self._place, self._eps
        keys, values = kv_cache.keys[place.index], kv_cache.values[place.index]
        qkv = joined.qkv.of_few_rows(hidden, norm=self._input_norm, eps=eps)
        attended = joined.attention.between_products(qkv, turns[self._turn], keys, values, metadata[place.group])
        joined.output.of_few_rows(attended, residual=hidden)
        gated = joined.gate_up.of_few_rows(hidden, norm=self._mlp_norm, eps=eps)
        joined.down.of_few_rows(gated, residual=hidden)

    def _attend(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        turns: Sequence[Rotation],
        kv_cache: KVTensors,
        metadata: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        """The first half's result, to be added to hidden; `delta` has been."""
        normalised = self._normalise(hidden, delta)
        place = self._place
        keys, values = kv_cache.keys[place.index], kv_cache.values[place.index]
        return self.attention(normalised, turns[self._turn], keys, values, metadata[place.group])

    def _normalise(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """The first half's input; `delta` is added to hidden."""
        if self._input_norm is None:
            return hidden if delta is None else hidden.add_(delta)
        if delta is None:
            return rms_norm(hidden, self._input_norm, self._eps)
        return add_rms_norm(delta, hidden, self._input_norm, self._eps)

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        """The second half's result, to be added to hidden [rows, hidden_size]."""
        return self._feed_forward(rms_norm(hidden, self._mlp_norm, self._eps))

    def _feed_forward(self, normalised: torch.Tensor) -> torch.Tensor:
        """Return the second half's output, computed from its normalised input rows."""
        return self.feed_forward(normalised)

    def compiled_weights(self) -> LayerWeights | None:
        """This layer for the compiled operators, None where its weights are not packed for them."""
        if not isinstance(self.attention, Attention):
            return None
        qkv, output = self.attention.qkv.native, self.attention.output.native
        if qkv is None or output is None or self.attention.sinks is not None or self._input_norm is None:
            return None
        norms = self.attention.norms
        mlp = self.feed_forward if isinstance(self.feed_forward, GatedMlp) else None
        return LayerWeights(
            self._input_norm,
            self._mlp_norm,
            qkv,
            output,
            None if norms is None else norms.query,
            None if norms is None else norms.key,
            None if mlp is None else mlp.gate_up.native,
            None if mlp is None else mlp.down.native,
        )


class Decoder:
    """One rank's shard of a decoder, on one device."""

    def __init__(
        self,
        config: ModelConfig,
        load: Loader,
        shard: ModelShard,
        groups: RankGroups = SINGLE_RANK,
        *,
        layer_type: type[DecoderLayer] = DecoderLayer,
        kv: Sequence[LayerKV] | None = None,
    ) -> None:
        """`kv`: KV cache of each layer, if it is not made of whole heads."""
        self.config = config
        dtype, device = load.dtype, load.device
        self._dtype, self._pipeline = dtype, groups.pipeline
        self._is_first_stage, self._is_last_stage = shard.is_first_stage, shard.is_last_stage
        places = kv_layer_indices(groups_of(decoder_kv(config) if kv is None else kv), shard.layers)
        self._layers = [
            layer_type(config, layer, place, shard, groups, load)
            for layer, place in zip(range(*shard.layers), places, strict=True)
        ]
        tied = config.tie_word_embeddings
        rows = None if groups.tensor is None else shard.vocabulary
        if shard.is_first_stage or (shard.is_last_stage and tied):
            # On the CPU the table is read in place: from the page cache if the file has the computing dtype or a type
            # that is packed unchanged, so that a tied, packed lm_head is the only copy in anonymous memory.
            table = load.vocabulary("model.embed_tokens.weight", rows=rows)
            self._embed = VocabularyEmbedding(table, shard.vocabulary[0], groups.tensor)
        if shard.is_last_stage:
            self._norm = load_norm(config, "model.norm.weight", load)
            self._lm_head = LmHead(
                table if tied else load.vocabulary("lm_head.weight", rows=rows), config.vocab_size, groups.tensor
            )
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        self._rotaries = [RotaryAngles(rope, config.rotary_size, device) for rope in ropes]
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        self.pads_rows = pads_rows(dtype, device)
        shape = decoder_shape(config, shard)
        is_plain = not any(config.windows) and layer_type is DecoderLayer and not config.has_sinks
        self._compiled = compile_layers(self._layers, shape, groups.tensor) if is_plain else None
        self.is_compiled = self._compiled is not None
        """True if the layers accept metadata for the compiled operators."""
        if self._compiled is not None:
            logger.info("CPU operators: compiled, for %s", self._compiled.instruction_set)
        elif device.type == "cpu":
            reason = why_not(dtype, shape) if is_plain else "they know neither windows nor sinks nor other layers"
            if is_library_missing():
                reason = f"{reason}; models that support them run 1.5 to 3 times slower"
            level = logging.WARNING if is_library_missing() else logging.INFO
            logger.log(level, "CPU operators: torch, not the compiled ones: %s", reason)

    @property
    def mixtures(self) -> list[MixtureOfExperts]:
        """This rank's layers that have experts."""
        return [layer.feed_forward for layer in self._layers if isinstance(layer.feed_forward, MixtureOfExperts)]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVTensors,
        metadata: Sequence[AttentionMetadata],
        *,
        num_layers: int | None = None,
        placed: Placed | None = None,
    ) -> torch.Tensor:
        """Return hidden states [num_tokens, hidden_size] before the last norm, for token_ids, positions [num_tokens]
        int64. `metadata` has an entry per KV group. If tokens have positions over time, height and width, `positions`
        is [3, num_tokens]. `placed`: embeddings of tokens that are not text, for the first stage.

        `num_layers` limits the layers, for profiling: they all use the same memory. A stage receives hidden states from
        the previous one and sends its own to the next.
        """
        before = None
        if not self._is_first_stage:
            rows = token_ids.shape[0]
            before = torch.empty(rows, self.config.hidden_size, dtype=self._dtype, device=token_ids.device)
            self.receive(before)
        hidden = self.compute(
            token_ids, positions, kv_cache, metadata, before=before, num_layers=num_layers, placed=placed
        )
        self.send(hidden)
        return hidden

    def receive(self, hidden: torch.Tensor) -> None:
        """Receive the previous stage's output into hidden [rows, hidden_size]. No-op on the first stage."""
        if not self._is_first_stage:
            assert self._pipeline is not None
            self._pipeline.receive(hidden, self._pipeline.index - 1)

    def send(self, hidden: torch.Tensor) -> None:
        """To the next stage. The last one sends nothing."""
        if not self._is_last_stage:
            assert self._pipeline is not None
            self._pipeline.send(hidden, self._pipeline.index + 1)

    def compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVTensors,
        metadata: Sequence[AttentionMetadata],
        *,
        before: torch.Tensor | None,
        num_layers: int | None = None,
        placed: Placed | None = None,
    ) -> torch.Tensor:
        """Run this stage's layers: the part of `forward` between receiving and sending. `before`: the previous stage's
        hidden states, which are overwritten; the first stage reads token ids only.
        """
        hidden = self.embedded(token_ids, placed) if before is None else before
        turns = [Rotation(rotary(positions)) for rotary in self._rotaries]
        if self.config.nope_layers:
            turns.append(identity_rotation(positions, self.config.rotary_size, self.config.temperature))
        if metadata[0].native is not None:
            assert self._compiled is not None
            self._compiled(hidden, turns[0].rotation, kv_cache, metadata[0], num_layers)
        else:
            delta = None
            for layer in self._layers[:num_layers]:
                delta = layer(hidden, delta, turns, kv_cache, metadata)
            if delta is not None:
                hidden.add_(delta)
        return hidden

    def embedded(self, token_ids: torch.Tensor, placed: Placed | None = None) -> torch.Tensor:
        """Return the first layer's input: [num_tokens] int64 -> [num_tokens, hidden_size]."""
        hidden = self._embed(token_ids)
        hidden = hidden if self._embedding_scale == 1.0 else hidden.mul_(self._embedding_scale)
        return hidden if placed is None else hidden.index_copy_(0, *placed)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        """These rows [num_rows] int64 of `forward`'s result -> [num_rows, vocab_size] on the last stage's first rank,
        in the dtype that its lm_head gives, None elsewhere.

        Every tensor-parallel rank of the last stage must call it, no rank of another stage.
        """
        return self._lm_head(self.normalised_rows(hidden, rows))

    def normalised_rows(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the given rows [num_rows] int64 of `forward`'s result after the last norm [num_rows, hidden_size], on
        any rank of the last stage.
        """
        return gather_rms_norm(hidden, rows, self._norm, self.config.rms_norm_eps)

    def normalised(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `forward`'s result after the last norm, on the last stage: the input of draft heads."""
        return rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    def logits_of(self, normalised: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab_size] float32 of normalised rows [rows, hidden_size], where one rank has the whole
        vocabulary.
        """
        logits = self._lm_head(normalised)
        assert logits is not None
        return logits.float()


def rotation_index(config: ModelConfig, layer: int) -> int:
    """Return the index of the layer's rotation in a step: the rope, the local rope of windowed layers, or the last (no
    rotation).
    """
    if layer in config.nope_layers:
        return 1 if config.local_rope is None else 2
    return int(config.local_rope is not None and config.window(layer) is not None)


def attention_scale(config: ModelConfig) -> float:
    """Factor of the attention scores."""
    return config.head_size**-0.5 if config.attention_scale is None else config.attention_scale


def head_rows(heads: Span, head_size: int) -> Span:
    """Rows of a projection that belong to these heads."""
    return heads[0] * head_size, heads[1] * head_size


def decoder_shape(config: ModelConfig, shard: ModelShard) -> DecoderShape:
    """A rank's layers in numbers."""
    return DecoderShape(
        hidden_size=config.hidden_size,
        num_heads=shard.num_heads,
        num_kv_heads=shard.num_kv_heads,
        head_size=config.head_size,
        intermediate_size=shard.mlp[1] - shard.mlp[0],
        eps=config.rms_norm_eps,
        scale=attention_scale(config),
    )
