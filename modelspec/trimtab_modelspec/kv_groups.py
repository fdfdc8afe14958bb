"""KV layout of a model: keys and values per layer, and groups of layers that share one block table.

A block is `block_size` tokens of all layers of one group. Blocks of all groups are equally large, so that any block can
serve any group. A smaller group leaves part of its blocks empty, so groups are made about equally large:
```
layers     0 1 2 3 4 5   6 7 8 9 10 11          w: sliding window, f: full attention
kind       w w w w w f   w w w w w  f
groups     a b c d e F   a b c d e  F           five windowed groups, one full, two layers each
```
A model with identical layers is one group (docs/reference/contract.md, section 5).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from trimtab_modelspec.attention_window import AttentionWindow
from trimtab_modelspec.partition import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """KV of one layer per token. Sizes count elements."""

    num_kv_heads: int
    key_size: int
    """Key elements per head."""
    value_size: int
    """Value elements per head. 0 if values are part of the keys, as in a latent vector."""
    window: int | None = None
    """Maximum tokens visible to a query, including itself. None means all preceding ones."""
    is_chunked: bool = False
    """True if a query attends within its chunk of `window` tokens instead of a sliding window."""

    @property
    def num_elements(self) -> int:
        return self.num_kv_heads * (self.key_size + self.value_size)

    def on_rank(self, tensor: int) -> "LayerKV":
        """Return the KV of one of `tensor` ranks that divide the layer by heads; with fewer heads than ranks, several
        ranks hold the same head.
        """
        return replace(self, num_kv_heads=max(1, self.num_kv_heads // tensor))


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with equal KV under one block table. A rank without any of its layers keeps the table too."""

    layers: tuple[Span, ...]
    """Layer spans of the model."""
    each: LayerKV

    @property
    def num_layers(self) -> int:
        return sum(last - first for first, last in self.layers)

    @property
    def num_elements(self) -> int:
        """Elements per token in all layers of the group."""
        return self.num_layers * self.each.num_elements

    @property
    def attention_window(self) -> AttentionWindow:
        """Attention window of the group."""
        return AttentionWindow(self.each.window, self.each.is_chunked)

    def on_rank(self, stage: Span, tensor: int) -> "KVGroup":
        """Return the part of a rank that holds the layers of `stage`, as one of `tensor` ranks that divide them."""
        clipped = ((max(first, stage[0]), min(last, stage[1])) for first, last in self.layers)
        return KVGroup(tuple(span for span in clipped if span[0] < span[1]), self.each.on_rank(tensor))

    def num_blocks(self, num_tokens: int, *, block_size: int, max_num_batched_tokens: int) -> int:
        """Return the maximum blocks that a request holds while it grows to `num_tokens` tokens."""
        return self.attention_window.num_blocks(num_tokens, block_size, max_num_batched_tokens)

    def tokens_read(self, context: float) -> float:
        """Return how many tokens a query at the end of a context of this length attends to."""
        return context if self.each.window is None else min(context, self.each.window)

    def to_json(self) -> dict[str, object]:
        """Return the entry of `kv_groups` in the model facts."""
        return {
            "layers": [list(span) for span in self.layers],
            "num_kv_heads": self.each.num_kv_heads,
            "key_size": self.each.key_size,
            "value_size": self.each.value_size,
            "window": self.each.window,
        }


def uniform_group(num_layers: int, num_kv_heads: int, head_size: int) -> KVGroup:
    """Return a group with equally large keys and values and full attention."""
    return KVGroup(((0, num_layers),), LayerKV(num_kv_heads=num_kv_heads, key_size=head_size, value_size=head_size))


def groups_of(layers: Sequence[LayerKV]) -> tuple[KVGroup, ...]:
    """Groups of a model's layers: of each kind as many as keep each group no larger than the smallest kind. A kind's
    layers are dealt out in turn, so that pipeline stages have about as much of each group.
    """
    kinds: dict[LayerKV, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault(layer, []).append(index)
    smallest = min(len(indices) * kind.num_elements for kind, indices in kinds.items())
    groups = []
    for kind, indices in kinds.items():
        count = -(-len(indices) // max(1, smallest // kind.num_elements))
        groups += [KVGroup(_spans(indices[first::count]), kind) for first in range(count)]
    return tuple(groups)


def covers_all_layers(groups: Iterable[KVGroup], num_layers: int) -> bool:
    """Return True if every layer is in exactly one group."""
    end = 0
    for first, last in sorted(span for group in groups for span in group.layers):
        if first != end or last <= first:
            return False
        end = last
    return end == num_layers


@dataclass(frozen=True, slots=True)
class KVLayerIndex:
    """Location of a layer's KV: its group's index, and its index among the group's layers on its rank. Layers of
    several groups share a location in the KV cache's memory, never a block.
    """

    group: int
    index: int


def kv_layer_indices(groups: Sequence[KVGroup], stage: Span) -> list[KVLayerIndex]:
    """Return the place of every layer of a stage, in the order of the layers."""
    places: dict[int, KVLayerIndex] = {}
    for number, group in enumerate(groups):
        own = group.on_rank(stage, 1)
        layers = (layer for first, last in own.layers for layer in range(first, last))
        places |= {layer: KVLayerIndex(number, index) for index, layer in enumerate(layers)}
    return [places[layer] for layer in range(*stage)]


def _spans(indices: Sequence[int]) -> tuple[Span, ...]:
    """Return ascending numbers as spans of consecutive ones."""
    starts = [indices[0], *(after for before, after in pairwise(indices) if after != before + 1)]
    ends = [*(before + 1 for before, after in pairwise(indices) if after != before + 1), indices[-1] + 1]
    return tuple(zip(starts, ends, strict=True))
