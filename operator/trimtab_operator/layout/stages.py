"""Pipeline stages: the engine's partition of layers, and the weight bytes of one rank.

The rules are the engine's (docs/concepts/parallelism.md): remaining layers are assigned one each to the stages before
the last, from the back. The first stage has the embedding, the last one the output layer. Ranks of a stage hold equal
shares; if the vocabulary or the experts do not divide evenly, the largest share is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab_modelspec.facts import DTYPE_BYTES
from trimtab_modelspec.partition import layers_of_stages

from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.resource.spec import Parallelism


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage, and the weights in bytes of its largest rank."""

    index: int
    layers: range
    num_mixture_layers: int
    is_first: bool
    is_last: bool
    expert_bytes: int
    """Experts, divided over tensor × data ranks; a step reads only the selected ones."""
    lookup_bytes: int
    """Embedding, of which a step reads only the rows of its tokens."""
    read_bytes: int
    """All other weights; a step reads all of them."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def weights_bytes(self) -> int:
        return self.expert_bytes + self.lookup_bytes + self.read_bytes


def stages_of(facts: ModelFacts, parallelism: Parallelism) -> tuple[Stage, ...]:
    """Return the stages of a valid layout."""
    spans = layers_of_stages(facts.num_layers, parallelism.pipeline)
    return tuple(_stage(facts, parallelism, index, range(*span)) for index, span in enumerate(spans))


def min_weights_bytes(facts: ModelFacts, parallelism: Parallelism) -> int:
    """Return a lower bound of the largest rank's weights: its share if everything could be divided."""
    ranks, experts = parallelism.tensor * parallelism.pipeline, facts.weights.experts
    return (facts.weights_bytes - experts) // ranks + experts // (ranks * parallelism.data)


def _stage(facts: ModelFacts, parallelism: Parallelism, index: int, layers: range) -> Stage:
    weights, tensor = facts.weights, parallelism.tensor
    is_first, is_last = index == 0, index == parallelism.pipeline - 1
    num_dense = sum(1 for layer in facts.dense_layers if layer in layers) if facts.is_moe else len(layers)
    num_mixtures = len(layers) - num_dense
    all_dense = len(facts.dense_layers) if facts.is_moe else facts.num_layers
    all_mixtures = facts.num_layers - all_dense
    kv_parts = tensor if facts.latent_kv_size else min(tensor, facts.num_kv_heads)
    read = _share(weights.attention, len(layers), facts.num_layers * tensor)
    read += _share(weights.kv_projection, len(layers), facts.num_layers * kv_parts)
    final_norm = facts.hidden_size * DTYPE_BYTES[facts.dtype]
    router = facts.num_experts * final_norm  # of one mixture layer
    per_layer = max(0, weights.replicated - all_mixtures * router - final_norm)
    read += _share(per_layer, len(layers), facts.num_layers)
    read += num_mixtures * router + is_last * final_norm
    read += _share(weights.dense_mlp, num_dense, all_dense * tensor)
    read += _share(weights.shared_experts, num_mixtures, all_mixtures * tensor)
    rows = -(-facts.vocab_size // tensor)
    if is_last:
        read += _share(weights.embedding if facts.tie_word_embeddings else weights.lm_head, rows, facts.vocab_size)
    has_lookup = is_first and not (is_last and facts.tie_word_embeddings)
    return Stage(
        index=index,
        layers=layers,
        num_mixture_layers=num_mixtures,
        is_first=is_first,
        is_last=is_last,
        expert_bytes=_expert_bytes(facts, parallelism, num_mixtures, all_mixtures),
        lookup_bytes=_share(weights.embedding, rows, facts.vocab_size) if has_lookup else 0,
        read_bytes=read,
    )


def _expert_bytes(facts: ModelFacts, parallelism: Parallelism, num_mixtures: int, all_mixtures: int) -> int:
    """Return the bytes of whole experts under expert parallelism (rounded up per rank), else of slices."""
    ranks = parallelism.tensor * parallelism.data
    if parallelism.expert and facts.is_moe:
        held = -(-facts.num_experts // ranks)
        return _share(facts.weights.experts, num_mixtures * held, all_mixtures * facts.num_experts)
    return _share(facts.weights.experts, num_mixtures, all_mixtures * ranks)


def _share(total: int, part: int, of: int) -> int:
    """Return total × part / of, rounded up; 0 if total or part is 0."""
    return -(-total * part // of) if total and part else 0
