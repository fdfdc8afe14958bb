"""What one rank holds of a model: pure spans, computed from the model's numbers and the layout, refused by number."""

from dataclasses import dataclass

from trimtab_engine.errors import ConfigError
from trimtab_engine.model_config import ModelConfig
from trimtab_engine.parallel.experts import Placement, place_experts
from trimtab_engine.parallel.partition import Span, equal_span, kv_head_span, layers_of_stages, vocabulary_span
from trimtab_engine.parallel.ranks import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShard:
    """Spans [first, last) of what a rank holds. `mlp` and `expert_mlp` are rows of gate and up."""

    layers: Span
    heads: Span
    kv_heads: Span
    mlp: Span
    vocabulary: Span
    experts: tuple[int, ...]
    """Expert ids; empty for a dense model."""
    expert_mlp: Span
    is_first_stage: bool
    is_last_stage: bool

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]


def shard_model(
    config: ModelConfig,
    layout: Layout,
    rank: int,
    *,
    placement: Placement = "linear",
    layer_partition: tuple[int, ...] | None = None,
) -> ModelShard:
    """The shard of one rank. Raises ConfigError, with the number that is wrong, for a layout that cannot work."""
    place, size = layout.place(rank), layout.tensor
    if layout.expert and config.moe is None:
        raise ConfigError(
            f"--enable-expert-parallel needs a mixture of experts, and {config.architecture} has none; leave it out"
        )
    flag = "--tensor-parallel-size:"
    layers = layers_of_stages(config.num_layers, layout.pipeline, layer_partition)[place.pipeline]
    experts, expert_mlp = _experts(config, layout, place.data * size + place.tensor, placement)
    return ModelShard(
        layers=layers,
        heads=equal_span(config.num_attention_heads, size, place.tensor, f"{flag} num_attention_heads"),
        kv_heads=kv_head_span(config.num_kv_heads, size, place.tensor),
        mlp=equal_span(config.intermediate_size, size, place.tensor, f"{flag} intermediate_size")
        if config.has_dense_layers
        else (0, 0),
        vocabulary=vocabulary_span(config.vocab_size, size, place.tensor),
        experts=experts,
        expert_mlp=expert_mlp,
        is_first_stage=place.pipeline == 0,
        is_last_stage=place.pipeline == layout.pipeline - 1,
    )


def _experts(config: ModelConfig, layout: Layout, index: int, placement: Placement) -> tuple[tuple[int, ...], Span]:
    """Whole experts with expert parallelism, else a slice of each, over the same TP x DP ranks."""
    if config.moe is None:
        return (), (0, 0)
    ranks, wide = layout.tensor * layout.data, config.moe.intermediate_size
    if layout.expert:
        return place_experts(config.moe.num_experts, ranks, placement)[index], (0, wide)
    what = "without --enable-expert-parallel each expert is split over tensor x data parallel: moe_intermediate_size"
    return tuple(range(config.moe.num_experts)), equal_span(wide, ranks, index, what)


def check_layout(config: ModelConfig, layout: Layout, layer_partition: tuple[int, ...] | None = None) -> None:
    """Raise ConfigError unless every rank has its shard."""
    for rank in range(layout.world_size):
        shard_model(config, layout, rank, layer_partition=layer_partition)
