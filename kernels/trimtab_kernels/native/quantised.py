"""Weights of 4 or 8 bits in blocks of 32 numbers with their scales, [rows, bytes]: as GGUF stores them, and one of our
own for what AWQ and GPTQ store.

Form   bytes  weight
Q4_0   18     (q - 8) * scale        q of 4 bits, scale float16
Q4_1   20     q * scale + least      q of 4 bits, scale and least float16
Q8_0   34     q * scale              q of 8 bits, signed, scale float16
zeros  20     (q - zero) * scale     q of 4 bits, scale and zero float16, zero 0 to 15

Source of the forms: ggml's block_q4_0, block_q4_1 and block_q8_0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

GROUP = 32
"""Numbers of a block."""
SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Form:
    """How a block lies in memory."""

    name: str
    """ggml's, where it has one."""
    kind: int
    """`enum kind` of quantised.h."""
    bits: int
    has_least: bool
    offset: int
    """What is taken from the stored number."""
    has_zero: bool = False

    @property
    def num_factors(self) -> int:
        """The numbers in float16 that a block begins with."""
        return 1 + (self.has_least or self.has_zero)

    @property
    def block_bytes(self) -> int:
        """Bytes of GROUP weights."""
        return GROUP * self.bits // 8 + SCALE_BYTES * self.num_factors


FORMS = {
    form.name: form
    for form in (
        Form("Q4_0", 1, 4, has_least=False, offset=8),
        Form("Q4_1", 2, 4, has_least=True, offset=0),
        Form("Q8_0", 3, 8, has_least=False, offset=0),
    )
}
"""Those of ggml that are multiplied as they are."""
WITH_ZEROS = Form("zeros", 4, 4, has_least=False, offset=0, has_zero=True)
"""That of integers with a zero point per block."""


@dataclass(frozen=True, slots=True)
class QuantisedBlocks:
    """A weight [out_features, in_features]. `data` [out_features, in_features / GROUP * block_bytes] uint8."""

    form: Form
    data: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        rows, row_bytes = self.data.shape
        return rows, row_bytes // self.form.block_bytes * GROUP

    def restored(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight; in float32 bit for bit what ggml makes of it."""
        blocks = self.data.reshape(-1, self.form.block_bytes)
        head = SCALE_BYTES * self.form.num_factors
        factors = blocks[:, :head].contiguous().view(torch.float16).float()
        stored = blocks[:, head:]
        if self.form.bits == 8:
            numbers = stored.contiguous().view(torch.int8).float()
        else:
            numbers = torch.cat([stored & 15, stored >> 4], dim=1).float() - self.form.offset
        if self.form.has_zero:
            numbers = numbers - factors[:, 1:]
        values = numbers * factors[:, :1]
        if self.form.has_least:
            values = values + factors[:, 1:]
        return values.view(self.shape).to(dtype)


def joined(parts: Sequence[QuantisedBlocks]) -> QuantisedBlocks | None:
    """Rows one behind the other; None where the forms differ."""
    first = parts[0]
    if any(part.form is not first.form for part in parts):
        return None
    return first if len(parts) == 1 else QuantisedBlocks(first.form, torch.cat([part.data for part in parts]))
