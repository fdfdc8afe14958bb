"""A model's projections one by one, as its family names them, by the numbers of its config.json: for what is stored
otherwise than as a whole part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Projection:
    """`count` weights [out, size] of one layer; their names differ by experts alone."""

    module: str
    part: str
    out: int
    size: int
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the shapes follow from. Latent ones are 0 where keys and values are whole heads."""

    architecture: str
    num_layers: int
    hidden: int
    vocabulary: int
    is_tied: bool
    query_rows: int
    kv_rows: int
    output_columns: int
    mlp_width: int
    num_experts: int
    expert_width: int
    shared_width: int
    dense_layers: frozenset[int]
    """Those with a plain MLP; of a dense model all."""
    query_rank: int = 0
    kv_rank: int = 0
    kept_size: int = 0
    unfolded_rows: int = 0


def projections(sizes: Sizes) -> Iterator[Projection]:
    """Layer by layer, and the output layer."""
    for layer in range(sizes.num_layers):
        prefix = f"model.layers.{layer}."
        yield from (_latent if sizes.kv_rank else _heads)(sizes, prefix + "self_attn.")
        if layer in sizes.dense_layers:
            yield from _mlp(prefix + "mlp.", "dense_mlp", sizes.hidden, sizes.mlp_width)
        else:
            yield from _experts(sizes, prefix + "mlp.")
    if not sizes.is_tied:
        yield Projection("lm_head", "lm_head", sizes.vocabulary, sizes.hidden)


def _heads(sizes: Sizes, prefix: str) -> Iterator[Projection]:
    yield Projection(prefix + "q_proj", "attention", sizes.query_rows, sizes.hidden)
    yield Projection(prefix + "k_proj", "kv_projection", sizes.kv_rows, sizes.hidden)
    yield Projection(prefix + "v_proj", "kv_projection", sizes.kv_rows, sizes.hidden)
    yield Projection(prefix + "o_proj", "attention", sizes.hidden, sizes.output_columns)


def _latent(sizes: Sizes, prefix: str) -> Iterator[Projection]:
    if sizes.query_rank:
        yield Projection(prefix + "q_a_proj", "replicated", sizes.query_rank, sizes.hidden)
        yield Projection(prefix + "q_b_proj", "attention", sizes.query_rows, sizes.query_rank)
    else:
        yield Projection(prefix + "q_proj", "attention", sizes.query_rows, sizes.hidden)
    yield Projection(prefix + "kv_a_proj_with_mqa", "replicated", sizes.kept_size, sizes.hidden)
    yield Projection(prefix + "kv_b_proj", "attention", sizes.unfolded_rows, sizes.kv_rank)
    yield Projection(prefix + "o_proj", "attention", sizes.hidden, sizes.output_columns)


def _mlp(prefix: str, part: str, hidden: int, width: int, count: int = 1) -> Iterator[Projection]:
    yield Projection(prefix + "gate_proj", part, width, hidden, count)
    yield Projection(prefix + "up_proj", part, width, hidden, count)
    yield Projection(prefix + "down_proj", part, hidden, width, count)


def _experts(sizes: Sizes, prefix: str) -> Iterator[Projection]:
    """The first stands for all; gpt-oss's lie in one tensor per projection."""
    if sizes.architecture == "GptOssForCausalLM":
        yield Projection(
            prefix + "experts.gate_up_proj", "experts", 2 * sizes.expert_width, sizes.hidden, sizes.num_experts
        )
        yield Projection(prefix + "experts.down_proj", "experts", sizes.hidden, sizes.expert_width, sizes.num_experts)
        return
    yield from _mlp(prefix + "experts.0.", "experts", sizes.hidden, sizes.expert_width, sizes.num_experts)
    if sizes.shared_width:
        yield from _mlp(prefix + "shared_experts.", "shared_experts", sizes.hidden, sizes.shared_width)
