"""A decoder layer of DeepSeek-V3: latent attention, then an MLP or an MoE like others'."""

from trimtab_modelspec.config import ModelConfig

from trimtab_engine.layers.latent_attention import LatentAttention, LatentQuery
from trimtab_engine.models.decoder import DecoderLayer, attention_scale, head_rows
from trimtab_engine.models.loading import Loader
from trimtab_engine.parallel.groups import RankGroups
from trimtab_engine.parallel.shard import ModelShard

LATENT_EPS = 1e-6  # epsilon of the norms of latent vectors, independent of config.json


class DeepseekLayer(DecoderLayer):
    """Heads are divided among ranks; the latent vector is every rank's."""

    @staticmethod
    def load_attention(
        config: ModelConfig, layer: int, shard: ModelShard, groups: RankGroups, load: Loader
    ) -> LatentAttention:
        """The weights that unfold the latent vector are kept as they are multiplied with: by head."""
        prefix, how = f"model.layers.{layer}.self_attn.", config.latent
        assert how is not None
        unfolding = load.dense(
            prefix + "kv_b_proj.weight", rows=head_rows(shard.heads, how.plain_size + how.value_size)
        ).view(shard.num_heads, -1, how.kv_rank)
        return LatentAttention(
            _load_query(config, prefix, shard, load),
            load.joined(prefix, {"kv_a_proj_with_mqa": (0, how.kept_size)}, has_bias=config.qkv_bias),
            load.copy(prefix + "kv_a_layernorm.weight"),
            unfolding[:, : how.plain_size].contiguous(),
            unfolding[:, how.plain_size :].transpose(1, 2).contiguous(),
            load.summed(
                prefix + "o_proj",
                head_rows(shard.heads, how.value_size),
                groups.tensor,
                has_bias=config.output_bias,
            ),
            scale=attention_scale(config),
            eps=LATENT_EPS,
            kv_scale=load.kv_scale(prefix, "k"),
        )


def _load_query(config: ModelConfig, prefix: str, shard: ModelShard, load: Loader) -> LatentQuery:
    how = config.latent
    assert how is not None
    rows = head_rows(shard.heads, how.plain_size + how.rotary_size)
    if how.query_rank is None:
        return LatentQuery(load.joined(prefix, {"q_proj": rows}), None, None, LATENT_EPS)
    return LatentQuery(
        load.joined(prefix, {"q_b_proj": rows}),
        load.joined(prefix, {"q_a_proj": (0, how.query_rank)}, has_bias=config.qkv_bias),
        load.copy(prefix + "q_a_layernorm.weight"),
        LATENT_EPS,
    )
