"""What a model's layers keep of each token, in groups of layers that share one block table: the geometry of
docs/reference/contract.md section 5, the operator's side. Pure arithmetic; the engine has the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers that keep alike. Blocks of all groups are equally large, so that any block may serve any group."""

    layers: tuple[range, ...]
    """Which layers of the model, ascending. A rank that has none of them keeps their block table all the same."""
    num_kv_heads: int
    key_size: int
    """Elements of one head's key."""
    value_size: int
    """Elements of one head's value; 0 where values are part of the keys, as in a latent vector."""
    window: int | None = None
    """How many tokens a query sees, itself included; None: all before it."""

    @property
    def num_layers(self) -> int:
        return sum(map(len, self.layers))

    @property
    def num_elements(self) -> int:
        """One token in all layers of the group."""
        return self.num_layers * self.num_kv_heads * (self.key_size + self.value_size)

    def on_rank(self, stage: range, tensor: int) -> KvGroup:
        """The part of a rank that holds the layers of `stage`, as one of `tensor` ranks that divide them by heads;
        where there are fewer heads than ranks, several ranks keep the same one.
        """
        clipped = (range(max(span.start, stage.start), min(span.stop, stage.stop)) for span in self.layers)
        return KvGroup(
            layers=tuple(span for span in clipped if span),
            num_kv_heads=max(1, self.num_kv_heads // tensor),
            key_size=self.key_size,
            value_size=self.value_size,
            window=self.window,
        )

    def num_blocks(self, num_tokens: int, *, block_size: int, max_num_batched_tokens: int) -> int:
        """The most blocks that a request holds while it grows to so many tokens. Of a window: what the tokens of one
        step see and write, wherever it begins within a block.
        """
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        in_sight = self.window - 1 + max_num_batched_tokens
        return min(blocks, -(-(in_sight - 1) // block_size) + 1)

    def tokens_read(self, context: float) -> float:
        """How many tokens a query at the end of so long a context sees."""
        return context if self.window is None else min(context, self.window)

    def to_json(self) -> dict[str, object]:
        """What `trimtab-engine inspect` prints of it."""
        return {
            "layers": [[span.start, span.stop] for span in self.layers],
            "num_kv_heads": self.num_kv_heads,
            "key_size": self.key_size,
            "value_size": self.value_size,
            "window": self.window,
        }


def uniform_groups(num_layers: int, num_kv_heads: int, head_size: int) -> tuple[KvGroup, ...]:
    """One group, whose layers keep whole heads of keys and values, equally large, and see all tokens before."""
    layers = (range(num_layers),)
    return (KvGroup(layers=layers, num_kv_heads=num_kv_heads, key_size=head_size, value_size=head_size),)


def windowed_groups(windows: Sequence[int | None], num_kv_heads: int, head_size: int) -> tuple[KvGroup, ...]:
    """The same where layers see a window, or all (None): of each kind as many groups as keep each no larger than the
    smallest kind, the kind's layers dealt out in turn. As the engine cuts them.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    smallest = min(map(len, kinds.values()))
    groups = []
    for window, layers in kinds.items():
        count = -(-len(layers) // smallest)
        for first in range(count):
            spans = _spans(layers[first::count])
            each = {"num_kv_heads": num_kv_heads, "key_size": head_size, "value_size": head_size}
            groups.append(KvGroup(layers=spans, window=window, **each))
    return tuple(groups)


def _spans(layers: Sequence[int]) -> tuple[range, ...]:
    """Ascending numbers as ranges of neighbours."""
    starts = [layers[0], *(after for before, after in pairwise(layers) if after != before + 1)]
    stops = [*(before + 1 for before, after in pairwise(layers) if after != before + 1), layers[-1] + 1]
    return tuple(map(range, starts, stops))


def latent_groups(num_layers: int, latent_size: int) -> tuple[KvGroup, ...]:
    """One group, whose layers keep one latent vector, on every tensor rank."""
    return (KvGroup(layers=(range(num_layers),), num_kv_heads=1, key_size=latent_size, value_size=0),)


def covers(groups: Iterable[KvGroup], num_layers: int) -> bool:
    """Whether every layer is in exactly one group."""
    spans = sorted((span.start, span.stop) for group in groups for span in group.layers)
    end = 0
    for start, stop in spans:
        if start != end or stop <= start:
            return False
        end = stop
    return end == num_layers
