"""y = x @ Wᵀ + b with block-fp8 weights: W is float8 with a scale per 128 x 128, x is quantised on the fly.

On devices without float8 matmuls (the CPU, GPUs before compute capability 8.9) the weights are dequantised while
loading, and layers/linear.py multiplies them: the same values, without quantised activations.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from trimtab_kernels.launch.device_facts import device_facts
from trimtab_kernels.native.matrix import PackedMatrix
from trimtab_kernels.silu_and_mul import silu_and_mul
from trimtab_kernels.w8a8_block_fp8 import dequantize_blocks, quantize_blocks, quantize_groups, w8a8_block_fp8
from trimtab_modelspec.quantization import BLOCK

from trimtab_engine.parallel.groups import RankGroup


class Projection(Protocol):
    """A linear layer, however its weights are stored."""

    native: PackedMatrix | None
    """The weight packed for the CPU's compiled operators."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]."""
        ...


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """A weight: values [out_features, in_features] float8_e4m3fn, scales [ceil(out / 128), ceil(in / 128)] float32."""

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> "BlockFp8":
        """Quantise one."""
        return cls(*quantize_blocks(weight))

    def restored(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize_blocks(self.values, self.scales, dtype)


def multiplies_float8(device: torch.device) -> bool:
    """Return True if this device's matrix units multiply float8."""
    return device.type == "cuda" and device_facts(device).has_float8


def joined_blocks(parts: list[BlockFp8]) -> list[BlockFp8]:
    """Return rows concatenated into as few weights as their blocks allow: a part can be followed by another only if its
    rows are whole blocks.
    """
    joined: list[BlockFp8] = []
    for part in parts:
        if joined and joined[-1].values.shape[0] % BLOCK == 0:
            last = joined.pop()
            values = torch.cat([last.values.view(torch.uint8), part.values.view(torch.uint8)])
            joined.append(BlockFp8(values.view(part.values.dtype), torch.cat([last.scales, part.scales])))
        else:
            joined.append(part)
    return joined


def stacked(weights: "list[torch.Tensor | BlockFp8]") -> tuple[torch.Tensor, torch.Tensor | None]:
    """Experts' weights as one tensor, with their scales where they have any."""
    blocks = [weight for weight in weights if isinstance(weight, BlockFp8)]
    if not blocks:
        return torch.stack([weight for weight in weights if isinstance(weight, torch.Tensor)]), None
    values = torch.stack([block.values.view(torch.uint8) for block in blocks])
    return values.view(blocks[0].values.dtype), torch.stack([block.scales for block in blocks])


class BlockFp8Linear:
    """Return a Linear with the rows of `parts` concatenated; with a group, a RowParallelLinear."""

    native: PackedMatrix | None = None

    def __init__(
        self, parts: list[BlockFp8], bias: torch.Tensor | None, dtype: torch.dtype, group: RankGroup | None = None
    ) -> None:
        self.out_features, self.in_features = sum(part.values.shape[0] for part in parts), parts[0].values.shape[1]
        self._parts = [BlockFp8(part.values.contiguous(), part.scales.contiguous()) for part in parts]
        self._bias = bias if group is None or group.index == 0 else None
        self._dtype, self._group = dtype, group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]."""
        return self.finish(self.product(x))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        a, a_scales = quantize_groups(x)
        products = [w8a8_block_fp8(a, a_scales, part.values, part.scales, self._dtype) for part in self._parts]
        y = products[0] if len(products) == 1 else torch.cat(products, dim=1)
        return y if self._bias is None else y.add_(self._bias)

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return y if self._group is None else self._group.all_reduce(y)


class GatedBlockFp8Linear(BlockFp8Linear):
    """A GatedLinear: silu of the first half of the rows times the second; returns half of out_features."""

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return silu_and_mul(y)
