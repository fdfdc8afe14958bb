"""Some rows and columns of a weight in integers of 4 or 8 bits, however a checkpoint packs them: restored to float32,
or in blocks for the CPU's compiled products.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab_engine.errors import ModelError

if TYPE_CHECKING:
    import torch
    from trimtab_kernels.native.quantised import QuantisedBlocks

BLOCK = 32
"""Inputs of a block that is multiplied as it is; they must be of one group."""
MIDDLE = 8
"""The zero point of 4 bits that is quantised symmetrically."""
BLOCK_BYTES = {4: 18, 8: 34}
"""Block types of integers without a zero point, by their number of bits."""
ZEROS_BYTES = 20
"""Block type of 4-bit integers with a zero point."""


@dataclass(frozen=True, slots=True)
class IntegerPart:
    """A quantised part: weight = (integer - zero) * scale. `integers` [rows, columns]: 4-bit values 0 to 15 as uint8,
    or 8-bit values -128 to 127 as int8. `scales`, and `zeros` of any dtype, [rows, groups]; the default zero is 8 for 4
    bits, 0 for 8 bits. `groups` [columns] int64: the group of each column.
    """

    integers: "torch.Tensor"
    scales: "torch.Tensor"
    zeros: "torch.Tensor | None"
    groups: "torch.Tensor"

    @property
    def _is_small(self) -> bool:
        import torch

        return self.integers.dtype == torch.uint8

    def restored(self) -> "torch.Tensor":
        """[rows, columns] float32."""
        weight = self.integers.float()
        if self.zeros is not None:
            weight -= self.zeros.index_select(1, self.groups)
        elif self._is_small:
            weight -= MIDDLE
        weight *= self.scales.float().index_select(1, self.groups)
        return weight

    def blocks(self) -> "QuantisedBlocks | None":
        """Return the part as blocks, or None if blocks cannot represent it: columns that do not form whole blocks of
        one group even when sorted by group; scales outside float16's range even after a power of two is factored out of
        each row; zero points with 8 bits.
        """
        from trimtab_kernels.native.quantised import BLOCK_FORMATS, GROUP, ZERO_POINTS, QuantisedBlocks

        if self.integers.shape[1] % BLOCK or (self.zeros is not None and not self._is_small):
            return None
        order, groups = in_blocks(self.groups)
        factors = _factors(self.scales)
        if groups is None or factors is None:
            return None
        scales, of_rows = factors
        integers = self.integers if order is None else self.integers.index_select(1, order)
        numbers = integers.reshape(len(integers), -1, GROUP)
        if self._is_small:
            numbers = numbers[..., : GROUP // 2] | numbers[..., GROUP // 2 :] << 4
        form = BLOCK_FORMATS["Q4_0" if self._is_small else "Q8_0"] if self.zeros is None else ZERO_POINTS
        halves = [scales] if self.zeros is None else [scales, self.zeros]
        return QuantisedBlocks(form, _in_bytes(halves, groups, numbers), of_rows, order)


def in_blocks(groups: "torch.Tensor") -> "tuple[torch.Tensor | None, torch.Tensor | None]":
    """Return (order of columns in which each block has one group, None for the original order; the group [blocks] of
    each block, None if there is no such order). `groups` [columns]: the group of each column.
    """
    import torch

    if groups.shape[0] % BLOCK:
        return None, None
    of_blocks = groups.view(-1, BLOCK)
    if bool((of_blocks == of_blocks[:, :1]).all()):
        return None, of_blocks[:, 0]
    order = torch.argsort(groups, stable=True)
    of_blocks = groups[order].view(-1, BLOCK)
    if bool((of_blocks != of_blocks[:, :1]).any()):
        return None, None
    return order.int(), of_blocks[:, 0]


def _factors(scales: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor | None] | None":
    """Return (scales [rows, groups] in float16's range, factor of each row), or None if float16 cannot represent
    them.
    """
    import torch

    wide = scales.float()
    if bool((wide.half() == wide).all()):
        return wide.half(), None
    if wide.shape[1] == 1:
        return torch.ones_like(wide).half(), wide[:, 0].contiguous()
    _, power = torch.frexp(wide.abs().amax(dim=1))
    of_rows = torch.ldexp(torch.ones_like(wide[:, 0]), power.clamp(-120, 120))
    rest = wide / of_rows.unsqueeze(1)
    return (rest.half(), of_rows) if bool((rest.half() == rest).all()) else None


def _in_bytes(factors: "list[torch.Tensor]", groups: "torch.Tensor", numbers: "torch.Tensor") -> "torch.Tensor":
    """Interleave `factors` [rows, groups] with the numbers [rows, blocks, bytes]: each block is preceded by its group's
    factors.
    """
    import torch

    halves = [factor.half().index_select(1, groups).unsqueeze(-1).view(torch.uint8) for factor in factors]
    return torch.cat([*halves, numbers.view(torch.uint8)], dim=-1).view(len(numbers), -1)


def check_numbers(scales: "torch.Tensor", name: str, where: str) -> None:
    """Raise ModelError where a scale is NaN or infinite."""
    import torch

    if not bool(torch.isfinite(scales).all()):
        raise ModelError(f"{where}: {name} has scales that are NaN or infinite; download or quantise it again")
