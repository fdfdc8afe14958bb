"""What one rank has of a tower whose weights are shared by tensor-parallel ranks: whole heads and a part of the MLP."""

from dataclasses import dataclass

from trimtab_modelspec.partition import Span, equal_span

from trimtab_engine.config.vision import VisionConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.parallel.groups import RankGroup

FLAG = "--tensor-parallel-size with --mm-encoder-tp-mode weights (data shares no weights):"


@dataclass(frozen=True, slots=True)
class TowerShare:
    """Spans [first, last) of what a rank holds; `group`: the ranks whose products sum, None for a whole tower."""

    num_heads: int
    columns: Span
    """Of the attention's output projection, and rows of each of queries, keys and values."""
    mlp: Span
    hidden_size: int
    group: RankGroup | None

    @classmethod
    def of(cls, vision: VisionConfig, group: RankGroup | None) -> "TowerShare":
        """Raises ConfigError for a tower that so many ranks cannot share."""
        size, index = (1, 0) if group is None else (group.size, group.index)
        if size > 1 and vision.fixed_resolution is not None:
            raise ConfigError(
                "--mm-encoder-tp-mode weights: the tower of this model is transformers', which ranks cannot share; "
                "give each the whole of it, with --mm-encoder-tp-mode data"
            )
        first, last = equal_span(vision.num_heads, size, index, f"{FLAG} the tower's num_heads")
        mlp = equal_span(vision.intermediate_size, size, index, f"{FLAG} the tower's intermediate_size")
        width = vision.head_size
        return cls(last - first, (first * width, last * width), mlp, vision.hidden_size, group)

    @property
    def rows_of_three(self) -> tuple[Span, Span, Span]:
        """Rows of queries, keys and values that lie in one tensor."""
        first, last = self.columns
        query, key, value = ((first + part * self.hidden_size, last + part * self.hidden_size) for part in range(3))
        return query, key, value
