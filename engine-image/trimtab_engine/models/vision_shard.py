"""One rank's part of a vision encoder whose weights are divided over tensor-parallel ranks: whole heads and a slice of
the MLP.
"""

from dataclasses import dataclass

from trimtab_modelspec.partition import Span, equal_span

from trimtab_engine.config.vision import VisionConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.parallel.groups import RankGroup

FLAG = "--tensor-parallel-size with --mm-encoder-tp-mode weights (data shares no weights):"


@dataclass(frozen=True, slots=True)
class VisionEncoderShard:
    """Spans [first, last) of a rank's part; `group`: the ranks whose results are summed, None if the encoder is not
    divided.
    """

    num_heads: int
    columns: Span
    """Columns of the attention's output projection, and rows of each of queries, keys and values."""
    mlp: Span
    hidden_size: int
    group: RankGroup | None

    @classmethod
    def of(cls, vision: VisionConfig, group: RankGroup | None) -> "VisionEncoderShard":
        """Return the rank's part.

        Raises:
            ConfigError: the encoder cannot be divided over this number of ranks.
        """
        size, index = (1, 0) if group is None else (group.size, group.index)
        if size > 1 and vision.fixed_resolution is not None:
            raise ConfigError(
                "--mm-encoder-tp-mode weights: ranks cannot share transformers' vision encoder; "
                "give each the whole of it, with --mm-encoder-tp-mode data"
            )
        first, last = equal_span(vision.num_heads, size, index, f"{FLAG} the vision encoder's num_heads")
        mlp = equal_span(vision.intermediate_size, size, index, f"{FLAG} the vision encoder's intermediate_size")
        width = vision.head_size
        return cls(last - first, (first * width, last * width), mlp, vision.hidden_size, group)

    @property
    def rows_of_three(self) -> tuple[Span, Span, Span]:
        """Rows of queries, keys and values that are stored in one tensor."""
        first, last = self.columns
        query, key, value = ((first + part * self.hidden_size, last + part * self.hidden_size) for part in range(3))
        return query, key, value
