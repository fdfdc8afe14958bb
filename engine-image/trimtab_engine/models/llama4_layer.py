"""A decoder layer of Llama 4: queries and keys normalised without weights where they are rotated, in the adjacent pairs
in which they are stored; experts of one tensor per projection, and one that every token passes.
"""

import torch
from trimtab_kernels.native.decoder import LayerWeights
from trimtab_kernels.rope_and_cache import Norms
from trimtab_modelspec.config import ModelConfig

from trimtab_engine.layers.attention import Attention, KVScales
from trimtab_engine.layers.gated_mlp import GatedMlp
from trimtab_engine.layers.moe import MixtureOfExperts, StackedExperts
from trimtab_engine.models.decoder import (
    DecoderLayer,
    attention_scale,
    expert_places,
    head_rows,
    load_mlp,
    load_part_of_sum,
    load_sigmoid,
)
from trimtab_engine.models.loading import Loader
from trimtab_engine.parallel.groups import RankGroups
from trimtab_engine.parallel.shard import ModelShard


class Llama4Layer(DecoderLayer):
    """Both halves are named and made in the family's own way."""

    @staticmethod
    def load_attention(
        config: ModelConfig, layer: int, shard: ModelShard, groups: RankGroups, load: Loader
    ) -> Attention:
        """The norms are applied before the rotation here, and after it in the released code: without weights both are
        equal.
        """
        prefix, size = f"model.layers.{layer}.self_attn.", config.head_size
        heads, kv_heads = head_rows(shard.heads, size), head_rows(shard.kv_heads, size)
        ones = torch.ones(size, dtype=load.dtype, device=load.device)
        is_normalised = config.qk_norm and layer not in config.nope_layers
        return Attention(
            load.joined(prefix, {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}, has_bias=config.qkv_bias),
            load.summed(prefix + "o_proj", heads, groups.tensor, has_bias=config.output_bias),
            scale=attention_scale(config),
            norms=Norms(ones, ones, config.rms_norm_eps) if is_normalised else None,
            kv_scales=KVScales(load.kv_scale(prefix, "k"), load.kv_scale(prefix, "v")),
        )

    @staticmethod
    def load_feed_forward(
        config: ModelConfig, layer: int, shard: ModelShard, groups: RankGroups, load: Loader
    ) -> GatedMlp | MixtureOfExperts:
        """Return the second half of a layer by the module that replaces the MLP."""
        prefix = f"model.layers.{layer}.feed_forward."
        make = _load_moe if config.is_moe_layer(layer) else load_mlp
        return make(config, prefix, shard, groups, load)

    def compiled_weights(self) -> LayerWeights | None:
        """Always None: the compiled operators implement neither these norms nor these experts."""
        return None


def _load_moe(
    config: ModelConfig, prefix: str, shard: ModelShard, groups: RankGroups, load: Loader
) -> MixtureOfExperts:
    moe = config.moe
    assert moe is not None
    first, last = shard.expert_mlp
    w13, w2 = [], []
    for expert in shard.experts:
        rows = (expert, expert + 1)
        gate_up = load(prefix + "experts.gate_up_proj", rows=rows)[0]
        gate, up = gate_up.chunk(2, dim=1)
        w13.append(torch.cat([gate[:, first:last].t(), up[:, first:last].t()]))
        w2.append(load(prefix + "experts.down_proj", rows=rows)[0, first:last].t().contiguous())
    slots, held = expert_places(moe, shard, load.device)
    return MixtureOfExperts(
        load.router(prefix + "router.weight", moe.num_experts),
        StackedExperts(torch.stack(w13), torch.stack(w2)),
        top_k=moe.num_experts_per_token,
        renormalize=moe.renormalize,
        sigmoid=load_sigmoid(moe, prefix, load),
        shared=load_part_of_sum(prefix + "shared_expert.", shard.shared_mlp, load),
        expert_map=held,
        groups=groups,
        slots=slots,
    )
