"""Shard of a model on one rank: pure spans, computed from the model's configuration and the layout."""

from dataclasses import dataclass

from trimtab_modelspec.config import Division, ModelConfig
from trimtab_modelspec.partition import Span, equal_span, kv_head_span, layers_of_stages, vocabulary_span

from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.parallel.expert_balance import Placement, first_placement
from trimtab_engine.parallel.experts import PlacementStrategy, place_experts
from trimtab_engine.parallel.ranks import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShard:
    """Spans [first, last) of a rank's shard. `mlp` and `expert_mlp` are rows of gate and up."""

    layers: Span
    heads: Span
    kv_heads: Span
    mlp: Span
    vocabulary: Span
    experts: tuple[int, ...]
    """Expert ids, one per slot; empty for a dense model."""
    expert_placement: Placement | None
    """With load balancing: the initial experts in the slots of all ranks of the group; an expert may then be in several
    slots.
    """
    expert_index: int
    """This rank's place in its expert group."""
    expert_mlp: Span
    shared_mlp: Span
    """Rows of gate and up of the shared expert."""
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
    placement: PlacementStrategy = "linear",
    layer_partition: tuple[int, ...] | None = None,
    num_redundant_experts: int | None = None,
) -> ModelShard:
    """Return the shard of one rank. `num_redundant_experts`: None without load balancing of experts. Raises
    ConfigError, with the number that is wrong, for a layout that cannot work.
    """
    if config.division is not None:
        _check_division(config, config.division, layout)
    place, size = layout.place(rank), layout.tensor
    if layout.expert and config.moe is None:
        raise ConfigError(
            f"--enable-expert-parallel needs a mixture of experts, and {config.architecture} has none; leave it out"
        )
    flag = "--tensor-parallel-size:"
    layers = layers_of_stages(config.num_layers, layout.pipeline, layer_partition)[place.pipeline]
    index = place.data * size + place.tensor
    experts, expert_mlp = _experts(config, layout, index, placement)
    slots = None if num_redundant_experts is None else _slots(config, layout, num_redundant_experts)
    if slots is not None:
        each = len(slots) // (layout.tensor * layout.data)
        experts = slots[index * each : (index + 1) * each]
    return ModelShard(
        layers=layers,
        heads=equal_span(config.num_attention_heads, size, place.tensor, f"{flag} num_attention_heads"),
        kv_heads=kv_head_span(config.num_kv_heads, size, place.tensor),
        mlp=equal_span(config.intermediate_size, size, place.tensor, f"{flag} intermediate_size")
        if config.has_dense_layers and config.division is None
        else (0, 0),
        vocabulary=vocabulary_span(config.vocab_size, size, place.tensor),
        experts=experts,
        expert_placement=slots,
        expert_index=index,
        expert_mlp=expert_mlp,
        shared_mlp=(0, 0)
        if config.moe is None or not config.moe.shared_size
        else equal_span(config.moe.shared_size, size, place.tensor, f"{flag} the shared expert's size"),
        is_first_stage=place.pipeline == 0,
        is_last_stage=place.pipeline == layout.pipeline - 1,
    )


def _check_division(config: ModelConfig, division: Division, layout: Layout) -> None:
    """Raise NotSupportedError for ranks that transformers' code of a model is not divided over."""
    model = f"{config.architecture} runs on transformers' own code, which is"
    for flag, is_asked in (
        ("--pipeline-parallel-size", layout.pipeline > 1),
        ("--enable-expert-parallel", layout.expert),
    ):
        if is_asked:
            raise NotSupportedError(f"{flag}: {model} not divided by it; leave it out, or start more replicas")
    if layout.tensor not in division.degrees:
        fitting = ", ".join(map(str, division.degrees))
        raise NotSupportedError(
            f"--tensor-parallel-size: {model} not divided over {layout.tensor} ranks: {division.reason}; set one of "
            f"{fitting}, or start more replicas"
        )


def _slots(config: ModelConfig, layout: Layout, num_redundant: int) -> Placement:
    """Return equally many slots on every rank of the group.

    Raises:
        ConfigError: With the next valid number.
    """
    assert config.moe is not None  # expert parallelism was refused without
    num_experts, ranks = config.moe.num_experts, layout.tensor * layout.data
    if (num_experts + num_redundant) % ranks:
        fitting = num_redundant + -(num_experts + num_redundant) % ranks
        raise ConfigError(
            f"--eplb-config: {num_experts} experts and num_redundant_experts {num_redundant} cannot be divided among "
            f"tensor x data parallel = {ranks} ranks; set num_redundant_experts to {fitting}"
        )
    return first_placement(num_experts, num_redundant)


def _experts(
    config: ModelConfig, layout: Layout, index: int, placement: PlacementStrategy
) -> tuple[tuple[int, ...], Span]:
    """Return whole experts with expert parallelism, else a slice of each, over the same TP x DP ranks."""
    if config.moe is None:
        return (), (0, 0)
    ranks, wide = layout.tensor * layout.data, config.moe.intermediate_size
    if layout.expert:
        return place_experts(config.moe.num_experts, ranks, placement)[index], (0, wide)
    what = "without --enable-expert-parallel each expert is split over tensor x data parallel: moe_intermediate_size"
    return tuple(range(config.moe.num_experts)), equal_span(wide, ranks, index, what)


def check_layout(
    config: ModelConfig,
    layout: Layout,
    layer_partition: tuple[int, ...] | None = None,
    num_redundant_experts: int | None = None,
) -> None:
    """Raise ConfigError unless every rank has its shard."""
    for rank in range(layout.world_size):
        shard_model(config, layout, rank, layer_partition=layer_partition, num_redundant_experts=num_redundant_experts)
