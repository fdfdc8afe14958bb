"""Weights of 4 to 8 bits in blocks of 32 or 256 numbers with their factors, [rows, bytes]: GGUF's formats, and
additional ones for AWQ, GPTQ, compressed-tensors and mxfp4.

Format bytes  weight
Q4_0   18     (q - 8) * scale        q of 4 bits, scale float16
Q4_1   20     q * scale + min        q of 4 bits, scale and min float16
Q5_0   22     (q - 16) * scale       q of 5 bits, the fifth bits stored separately
Q5_1   24     q * scale + min
Q8_0   34     q * scale              q of 8 bits, signed, scale float16
zeros  20     (q - zero) * scale     q of 4 bits, scale and zero float16, zero 0 to 15
Q4_K   144    q * (d * s) - e * m    256 numbers of 4 bits, d and e float16, s and m of 6 bits for each 32
Q5_K   176    q * (d * s) - e * m    q of 5 bits
Q6_K   210    (q - 32) * (d * s)     256 numbers of 6 bits, d float16, s of 8 bits, signed, for each 16
e2m1   18     q * scale              q twice a 4-bit number (e2m1): 0 1 2 3 4 6 8 12 and their negatives
e4m3   1      q                      one float8, never NaN

In addition to the blocks, there may be one scale per row, and an order: the column of the weight of each stored one.

Source of the formats: ggml's block_q4_0 and related structs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

GROUP = 32
"""Numbers of a small block, and of x per scale."""
SUPER = 256
"""Numbers of a large block."""
PANEL_ROW_MULTIPLE = 32
"""A multiple of every instruction set's panel size."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The memory layout of a block."""

    name: str
    """ggml's name, if it has one."""
    kind: int
    """`enum kind` of quantised.h."""
    numbers: int
    """Weights per block."""
    block_bytes: int
    restore: Callable[[torch.Tensor], torch.Tensor]
    """Converts [blocks, block_bytes] uint8 to [blocks, numbers] float32, bit for bit like ggml."""
    unpacked_bytes: int = 0
    """Additional bytes of a block when packed for the GEMMs: 6-bit factors take 8 bits."""
    unit: float = 1.0
    """Factor by which the compiled GEMMs' sums must be multiplied."""

    @property
    def packed_bytes(self) -> int:
        """Bytes of a block when packed for the GEMMs."""
        return self.block_bytes + self.unpacked_bytes


def _factors(stored: torch.Tensor) -> torch.Tensor:
    """Convert [blocks, 2 n] bytes to [blocks, n] numbers, stored as float16."""
    return stored.contiguous().view(torch.float16).float()


def _signed(stored: torch.Tensor) -> torch.Tensor:
    return stored.contiguous().view(torch.int8).float()


def _nibbles(stored: torch.Tensor) -> torch.Tensor:
    """Convert [..., n] bytes to [..., 2 n] numbers of 4 bits: all lower nibbles, then the upper ones."""
    return torch.cat([stored & 15, stored >> 4], dim=-1)


def _bits(stored: torch.Tensor, count: int) -> torch.Tensor:
    """Convert [..., n] bytes to [..., 8 / count, n] numbers of `count` bits, the lowest first."""
    shifts = torch.arange(0, 8, count, dtype=torch.uint8).unsqueeze(1)
    return stored.unsqueeze(-2) >> shifts & (1 << count) - 1


def _add_fifth_bits(lower: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Add the fifth bits of Q5_0 and Q5_1: byte i contains those of numbers 8 i .. 8 i + 7."""
    return lower | _bits(stored, 1).transpose(1, 2).flatten(1) << 4


def _from_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[:, 2:]).float() - 8) * _factors(blocks[:, :2])


def _from_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]).float() * _factors(blocks[:, :2]) + _factors(blocks[:, 2:4])


def _from_q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_add_fifth_bits(_nibbles(blocks[:, 6:]), blocks[:, 2:6]).float() - 16) * _factors(blocks[:, :2])


def _from_q5_1(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _add_fifth_bits(_nibbles(blocks[:, 8:]), blocks[:, 4:8]).float()
    return numbers * _factors(blocks[:, :2]) + _factors(blocks[:, 2:4])


def _from_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _signed(blocks[:, 2:]) * _factors(blocks[:, :2])


def _from_zero_points(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[:, 4:]).float() - _factors(blocks[:, 2:4])) * _factors(blocks[:, :2])


E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
"""Twice the values of the 4-bit codes."""


def _from_e2m1(blocks: torch.Tensor) -> torch.Tensor:
    return torch.tensor(E2M1)[_nibbles(blocks[:, 2:]).long()] * _factors(blocks[:, :2])


def _from_e4m3(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.float8_e4m3fn).float()


def _apply_mins(blocks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Apply scales and mins to `numbers` [blocks, 8, 32] of Q4_K or Q5_K. Of the 12 bytes of factors, the first 4
    contain s of groups 0 .. 3, the next m; the last contain the lower bits of s and m of groups 4 .. 7, whose upper
    bits are in the ones before.
    """
    head, factors = _factors(blocks[:, :4]), blocks[:, 4:16]
    first, rest = factors[:, :8], factors[:, 8:]
    upper = first >> 6 << 4
    s = torch.cat([first[:, :4] & 63, rest & 15 | upper[:, :4]], dim=1)
    m = torch.cat([first[:, 4:] & 63, rest >> 4 | upper[:, 4:]], dim=1)
    scales, leasts = head[:, :1] * s.float(), head[:, 1:] * m.float()
    return (numbers.float() * scales.unsqueeze(2) - leasts.unsqueeze(2)).flatten(1)


def _from_q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _apply_mins(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _from_q5_k(blocks: torch.Tensor) -> torch.Tensor:
    lower = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _apply_mins(blocks, lower | _bits(blocks[:, 16:48], 1) << 4)


def _from_q6_k(blocks: torch.Tensor) -> torch.Tensor:
    lower = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    upper = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    numbers = (lower | upper << 4).view(-1, 16, 16).float() - 32
    scales = _factors(blocks[:, 208:]) * _signed(blocks[:, 192:208])
    return (numbers * scales.unsqueeze(2)).flatten(1)


BLOCK_FORMATS = {
    form.name: form
    for form in (
        BlockFormat("Q4_0", 1, GROUP, 18, _from_q4_0),
        BlockFormat("Q4_1", 2, GROUP, 20, _from_q4_1),
        BlockFormat("Q8_0", 3, GROUP, 34, _from_q8_0),
        BlockFormat("Q5_0", 5, GROUP, 22, _from_q5_0),
        BlockFormat("Q5_1", 6, GROUP, 24, _from_q5_1),
        BlockFormat("Q4_K", 7, SUPER, 144, _from_q4_k, unpacked_bytes=4),
        BlockFormat("Q5_K", 8, SUPER, 176, _from_q5_k, unpacked_bytes=4),
        BlockFormat("Q6_K", 9, SUPER, 210, _from_q6_k),
    )
}
"""ggml's formats that are multiplied without conversion."""
ZERO_POINTS = BlockFormat("zeros", 4, GROUP, 20, _from_zero_points)
"""Integers with a zero point per block."""
MXFP4 = BlockFormat("e2m1", 10, GROUP, 18, _from_e2m1)
"""mxfp4 (OCP Microscaling Formats 1.0), whose scale is a power of two: the block stores half of it."""
FLOAT8 = BlockFormat("e4m3", 11, 1, 1, _from_e4m3, unit=256.0)
"""float8 with a scale per row; the sums are those of numbers 256 times smaller (gemm.h)."""


@dataclass(frozen=True, slots=True)
class QuantisedBlocks:
    """A weight [out_features, in_features]. `data` [out_features, in_features / form.numbers * block_bytes] uint8.
    `scales` [out_features] float32: a factor of each row. `order` [in_features] int32: the column of the weight of each
    stored one, only for integer formats.
    """

    form: BlockFormat
    data: torch.Tensor
    scales: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight."""
        rows, row_bytes = self.data.shape
        return rows, row_bytes // self.form.block_bytes * self.form.numbers

    @property
    def parts(self) -> "tuple[QuantisedBlocks, ...]":
        """This weight as the only part."""
        return (self,)

    def select_rows(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> "QuantisedBlocks":
        """Select or reorder rows: `choose` is called with tensors [out_features, ...]."""
        scales = None if self.scales is None else choose(self.scales)
        return QuantisedBlocks(self.form, choose(self.data), scales, self.order)

    def restored(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the dequantised weight; in float32 bit for bit like ggml."""
        weight = self.form.restore(self.data.reshape(-1, self.form.block_bytes)).view(self.shape)
        if self.scales is not None:
            weight = weight * self.scales.unsqueeze(1)
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order.long(), weight)
        return weight.to(dtype)


@dataclass(frozen=True, slots=True)
class MixedBlocks:
    """Rows of several formats, in sequence, with one order."""

    parts: tuple[QuantisedBlocks, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the whole weight."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def order(self) -> torch.Tensor | None:
        """Order of all parts."""
        return self.parts[0].order


def joined(parts: Sequence[QuantisedBlocks]) -> QuantisedBlocks | MixedBlocks | None:
    """Join rows. None if they cannot be multiplied together: the format changes within a panel, float8 is mixed with
    integers, or columns have several orders.
    """
    if not _is_one_order([part.order for part in parts]):
        return None
    runs = [list(run) for _, run in groupby(parts, key=lambda part: part.form.name)]
    whole = [
        run[0]
        if len(run) == 1
        else QuantisedBlocks(run[0].form, torch.cat([p.data for p in run]), scales_of(run), run[0].order)
        for run in runs
    ]
    if len(whole) == 1:
        return whole[0]
    is_mixed = any(part.shape[0] % PANEL_ROW_MULTIPLE for part in whole[:-1]) or any(
        part.form is FLOAT8 for part in whole
    )
    return None if is_mixed else MixedBlocks(tuple(whole))


def scales_of(parts: Sequence[QuantisedBlocks]) -> torch.Tensor | None:
    """Return the scales of these rows in sequence; None if no row has one."""
    if all(part.scales is None for part in parts):
        return None
    return torch.cat([torch.ones(part.shape[0]) if part.scales is None else part.scales for part in parts])


def _is_one_order(orders: Sequence[torch.Tensor | None]) -> bool:
    first = orders[0]
    if first is None:
        return all(order is None for order in orders)
    return all(order is not None and torch.equal(order, first) for order in orders)
