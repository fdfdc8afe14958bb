"""Pooling parameters of a request, as plain values that are sent in messages."""

from typing import Literal

import msgspec

PoolingMethod = Literal["last", "mean"]
"""Pooled hidden states, taken after the final norm: those of the last token, or the mean over all tokens."""


class Pooling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a prompt becomes one vector. The leading `dimensions` values are kept (None means all), for models trained
    with truncatable vectors (matryoshka, arXiv:2205.13147). With `normalize` the result is scaled to unit length.
    """

    method: PoolingMethod = "last"
    dimensions: int | None = None
    normalize: bool = True

    @property
    def needs_all_tokens(self) -> bool:
        """Return True if every prompt token must be computed, regardless of the prefix cache."""
        return self.method == "mean"
