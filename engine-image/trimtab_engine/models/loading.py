"""Reads one rank's part of a checkpoint, to the computing dtype and device, and reports what was read."""

from collections.abc import Callable

import torch
from trimtab_kernels.rotary_embedding import interleave_pairs

from trimtab_engine.errors import ModelError
from trimtab_engine.layers.linear import GatedLinear, Linear, RowParallelLinear
from trimtab_engine.parallel.groups import RankGroup
from trimtab_engine.weights.source import Span, WeightSource

Progress = Callable[[int], None]
"""Called with numbers of elements."""


class Loader:
    """Tensors by name, whole or in part; linear layers of several projections."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device, progress: Progress) -> None:
        self._source, self._dtype, self._device, self._progress = source, dtype, device, progress

    def __call__(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> torch.Tensor:
        """One tensor or a part of it; it may be a view of the file."""
        tensor = self._source.tensor(name, rows=rows, columns=columns)
        self._progress(tensor.numel())
        return tensor.to(device=self._device, dtype=self._dtype)

    def kv_scale(self, attention: str, which: str) -> float:
        """The checkpoint's scale of this layer's keys (k) or values (v) in a float8 KV cache; 1 where it has none."""
        names = (f"{attention}{place}{which}_scale" for place in ("", f"{which}_proj.", "attn."))
        name = next((name for name in names if name in self._source.shapes()), None)
        if name is None:
            return 1.0
        scales = self._source.tensor(name).float().flatten()
        if scales.numel() != 1 or not 0 < float(scales[0]) < float("inf"):
            raise ModelError(f"{self._source.where}: {name} is {scales.tolist()[:4]}; one number above 0 is needed")
        return float(scales[0])

    def copy(self, name: str) -> torch.Tensor:
        """A tensor of its own memory, for small weights."""
        return self(name).clone()

    def joined(
        self, prefix: str, parts: dict[str, Span], *, has_bias: bool = False, pairs: int | None = None
    ) -> Linear:
        """Rows of several projections as one. `pairs`: head size, to interleave the first two (q and k)."""
        weights = [self(f"{prefix}{name}.weight", rows=rows) for name, rows in parts.items()]
        biases = [self(f"{prefix}{name}.bias", rows=rows) for name, rows in parts.items()] if has_bias else []
        if pairs is not None:
            weights[:2] = [interleave_pairs(weight, pairs) for weight in weights[:2]]
            biases[:2] = [interleave_pairs(bias, pairs) for bias in biases[:2]]
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def gated(self, prefix: str, gate: str, up: str, rows: Span, *, has_bias: bool = False) -> GatedLinear:
        """Rows of the two projections of a gated MLP."""
        names = (gate, up)
        weight = torch.cat([self(f"{prefix}{name}.weight", rows=rows) for name in names])
        bias = torch.cat([self(f"{prefix}{name}.bias", rows=rows) for name in names]) if has_bias else None
        return GatedLinear(weight, bias)

    def summed(self, name: str, columns: Span, group: RankGroup | None, *, has_bias: bool = False) -> Linear:
        """Columns of a projection whose products the group sums."""
        bias = self(f"{name}.bias") if has_bias else None
        if group is None:
            return Linear(self(f"{name}.weight"), bias)
        return RowParallelLinear(self(f"{name}.weight", columns=columns), bias, group)
