"""Weights of 4 to 8 bits in blocks of 32 or 256 numbers with their factors, [rows, bytes]: as GGUF stores them, and
forms of our own for what AWQ, GPTQ, compressed-tensors and mxfp4 store.

Form   bytes  weight
Q4_0   18     (q - 8) * scale        q of 4 bits, scale float16
Q4_1   20     q * scale + least      q of 4 bits, scale and least float16
Q5_0   22     (q - 16) * scale       q of 5 bits, the fifth ones apart
Q5_1   24     q * scale + least
Q8_0   34     q * scale              q of 8 bits, signed, scale float16
zeros  20     (q - zero) * scale     q of 4 bits, scale and zero float16, zero 0 to 15
Q4_K   144    q * (d * s) - e * m    256 numbers of 4 bits, d and e float16, s and m of 6 bits for each 32
Q5_K   176    q * (d * s) - e * m    q of 5 bits
Q6_K   210    (q - 32) * (d * s)     256 numbers of 6 bits, d float16, s of 8 bits, signed, for each 16
e2m1   18     q * scale              q twice a number of 4 bits (e2m1): 0 1 2 3 4 6 8 12 and the same below 0
e4m3   1      q                      a float8 each, none of them NaN

Beside the blocks there may be a scale per row, and an order: which column of the weight each stored one is.

Source of the forms: ggml's block_q4_0 and its like.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

GROUP = 32
"""Numbers of a small block, and those that have one scale of x."""
SUPER = 256
"""Numbers of a large block."""
ROWS_TOGETHER = 32
"""What every instruction set's panels of outputs divide."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a block lies in memory."""

    name: str
    """ggml's, where it has one."""
    kind: int
    """`enum kind` of quantised.h."""
    numbers: int
    """Weights of a block."""
    block_bytes: int
    restore: Callable[[torch.Tensor], torch.Tensor]
    """[blocks, block_bytes] uint8 to [blocks, numbers] float32, bit for bit what ggml makes of it."""
    unpacked_bytes: int = 0
    """What a block takes more when it is packed for the products: factors of 6 bits take 8."""
    unit: float = 1.0
    """By what the compiled products' sums are still to be multiplied."""

    @property
    def packed_bytes(self) -> int:
        """Of a block, packed for the products."""
        return self.block_bytes + self.unpacked_bytes


def _factors(stored: torch.Tensor) -> torch.Tensor:
    """[blocks, 2 n] bytes to [blocks, n] numbers, stored as float16."""
    return stored.contiguous().view(torch.float16).float()


def _signed(stored: torch.Tensor) -> torch.Tensor:
    return stored.contiguous().view(torch.int8).float()


def _lower(stored: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes to [..., 2 n] numbers of 4 bits: the lower halves of all, then the upper ones."""
    return torch.cat([stored & 15, stored >> 4], dim=-1)


def _bits(stored: torch.Tensor, count: int) -> torch.Tensor:
    """[..., n] bytes to [..., 8 / count, n] numbers of `count` bits, the lowest first."""
    shifts = torch.arange(0, 8, count, dtype=torch.uint8).unsqueeze(1)
    return stored.unsqueeze(-2) >> shifts & (1 << count) - 1


def _with_fifth(lower: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Q5_0's and Q5_1's numbers: byte i has those of 8 i .. 8 i + 7."""
    return lower | _bits(stored, 1).transpose(1, 2).flatten(1) << 4


def _from_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_lower(blocks[:, 2:]).float() - 8) * _factors(blocks[:, :2])


def _from_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _lower(blocks[:, 4:]).float() * _factors(blocks[:, :2]) + _factors(blocks[:, 2:4])


def _from_q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_with_fifth(_lower(blocks[:, 6:]), blocks[:, 2:6]).float() - 16) * _factors(blocks[:, :2])


def _from_q5_1(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _with_fifth(_lower(blocks[:, 8:]), blocks[:, 4:8]).float()
    return numbers * _factors(blocks[:, :2]) + _factors(blocks[:, 2:4])


def _from_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _signed(blocks[:, 2:]) * _factors(blocks[:, :2])


def _from_zeros(blocks: torch.Tensor) -> torch.Tensor:
    return (_lower(blocks[:, 4:]).float() - _factors(blocks[:, 2:4])) * _factors(blocks[:, :2])


E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
"""Twice the numbers of 4 bits."""


def _from_e2m1(blocks: torch.Tensor) -> torch.Tensor:
    return torch.tensor(E2M1)[_lower(blocks[:, 2:]).long()] * _factors(blocks[:, :2])


def _from_e4m3(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.float8_e4m3fn).float()


def _with_leasts(blocks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """`numbers` [blocks, 8, 32] of Q4_K or Q5_K. Of the 12 bytes of factors the first 4 have s of groups 0 .. 3, the
    next m; the last have the lower bits of s and m of groups 4 .. 7, whose upper ones are in those before."""
    head, factors = _factors(blocks[:, :4]), blocks[:, 4:16]
    first, rest = factors[:, :8], factors[:, 8:]
    upper = first >> 6 << 4
    s = torch.cat([first[:, :4] & 63, rest & 15 | upper[:, :4]], dim=1)
    m = torch.cat([first[:, 4:] & 63, rest >> 4 | upper[:, 4:]], dim=1)
    scales, leasts = head[:, :1] * s.float(), head[:, 1:] * m.float()
    return (numbers.float() * scales.unsqueeze(2) - leasts.unsqueeze(2)).flatten(1)


def _from_q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _with_leasts(blocks, _lower(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _from_q5_k(blocks: torch.Tensor) -> torch.Tensor:
    lower = _lower(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _with_leasts(blocks, lower | _bits(blocks[:, 16:48], 1) << 4)


def _from_q6_k(blocks: torch.Tensor) -> torch.Tensor:
    lower = _lower(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    upper = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    numbers = (lower | upper << 4).view(-1, 16, 16).float() - 32
    scales = _factors(blocks[:, 208:]) * _signed(blocks[:, 192:208])
    return (numbers * scales.unsqueeze(2)).flatten(1)


FORMS = {
    form.name: form
    for form in (
        Form("Q4_0", 1, GROUP, 18, _from_q4_0),
        Form("Q4_1", 2, GROUP, 20, _from_q4_1),
        Form("Q8_0", 3, GROUP, 34, _from_q8_0),
        Form("Q5_0", 5, GROUP, 22, _from_q5_0),
        Form("Q5_1", 6, GROUP, 24, _from_q5_1),
        Form("Q4_K", 7, SUPER, 144, _from_q4_k, unpacked_bytes=4),
        Form("Q5_K", 8, SUPER, 176, _from_q5_k, unpacked_bytes=4),
        Form("Q6_K", 9, SUPER, 210, _from_q6_k),
    )
}
"""Those of ggml that are multiplied as they are."""
WITH_ZEROS = Form("zeros", 4, GROUP, 20, _from_zeros)
"""That of integers with a zero point per block."""
MXFP4 = Form("e2m1", 10, GROUP, 18, _from_e2m1)
"""That of mxfp4 (OCP Microscaling Formats 1.0), whose scale is a power of two: half of it is the block's."""
FLOAT8 = Form("e4m3", 11, 1, 1, _from_e4m3, unit=256.0)
"""That of float8 with a scale per row; sums are those of numbers 256 times smaller (product.h)."""


@dataclass(frozen=True, slots=True)
class QuantisedBlocks:
    """A weight [out_features, in_features]. `data` [out_features, in_features / form.numbers * block_bytes] uint8.
    `scales` [out_features] float32: what each row is multiplied by. `order` [in_features] int32: which column of the
    weight each stored one is, only of forms of integers."""

    form: Form
    data: torch.Tensor
    scales: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        rows, row_bytes = self.data.shape
        return rows, row_bytes // self.form.block_bytes * self.form.numbers

    @property
    def parts(self) -> "tuple[QuantisedBlocks, ...]":
        """Itself."""
        return (self,)

    def of_rows(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> "QuantisedBlocks":
        """Some of its rows, or all in another order: `choose` is called with tensors [out_features, ...]."""
        scales = None if self.scales is None else choose(self.scales)
        return QuantisedBlocks(self.form, choose(self.data), scales, self.order)

    def restored(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight; in float32 bit for bit what ggml makes of it."""
        weight = self.form.restore(self.data.reshape(-1, self.form.block_bytes)).view(self.shape)
        if self.scales is not None:
            weight = weight * self.scales.unsqueeze(1)
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order.long(), weight)
        return weight.to(dtype)


@dataclass(frozen=True, slots=True)
class MixedBlocks:
    """Rows of several forms, one part behind the other, of one order."""

    parts: tuple[QuantisedBlocks, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the whole weight."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def order(self) -> torch.Tensor | None:
        """Of all parts."""
        return self.parts[0].order


def joined(parts: Sequence[QuantisedBlocks]) -> QuantisedBlocks | MixedBlocks | None:
    """Rows one behind the other. None where they are not multiplied together: the form changes within a panel, float8
    stands beside integers, or columns come in several orders."""
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
    is_mixed = any(part.shape[0] % ROWS_TOGETHER for part in whole[:-1]) or any(part.form is FLOAT8 for part in whole)
    return None if is_mixed else MixedBlocks(tuple(whole))


def scales_of(parts: Sequence[QuantisedBlocks]) -> torch.Tensor | None:
    """The scales of these rows, one behind the other; None where no row has one."""
    if all(part.scales is None for part in parts):
        return None
    return torch.cat([torch.ones(part.shape[0]) if part.scales is None else part.scales for part in parts])


def _is_one_order(orders: Sequence[torch.Tensor | None]) -> bool:
    first = orders[0]
    if first is None:
        return all(order is None for order in orders)
    return all(order is not None and torch.equal(order, first) for order in orders)
