"""Storage format of 4-bit integer weights in a checkpoint, from its config.json."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class FourBits:
    """Integers of 4 bits with a scale and a zero point per output and group of inputs: weight = (q - zero) * scale."""

    name: str
    """awq or gptq: packing in 32-bit words (weights/four_bits.py)."""
    group_size: int | None
    """Inputs per group. None means all."""
    is_symmetric: bool = False
    """Every zero point is 8."""
    is_ordered: bool = False
    """True if inputs were quantized in a permuted order (desc_act), so that groups are not contiguous."""
    zero_offset: int = 0
    """Offset added to a stored zero point."""

    words: ClassVar[str] = "4 bits"
    """Description for messages."""

    @property
    def weight_bytes(self) -> float:
        """Stored bytes per parameter of a linear layer."""
        return 0.5 if self.group_size is None else 0.5 + 2.5 / self.group_size
