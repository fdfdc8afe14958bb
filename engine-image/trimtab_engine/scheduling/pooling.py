"""What a request asks of its prompt's hidden states instead of tokens: plain values that travel in messages."""

from typing import Literal

import msgspec

PoolingMethod = Literal["last", "mean"]
"""Whose hidden states, behind the last norm, become the vector: the last token's, or the mean of all tokens'."""


class Pooling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a prompt becomes one vector. Of that the leading `dimensions` values are kept (None: all), as models are
    trained for whose vectors may be cut (matryoshka, arXiv:2205.13147); with `normalize` it is then divided by its
    length."""

    method: PoolingMethod = "last"
    dimensions: int | None = None
    normalize: bool = True

    @property
    def needs_all_tokens(self) -> bool:
        """Whether every token of the prompt must be computed, whatever the prefix cache has."""
        return self.method == "mean"
