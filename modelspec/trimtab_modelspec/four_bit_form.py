"""How integers of 4 bits lie in a checkpoint, by its config.json: for who parses that and for who reads them."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class FourBits:
    """Integers of 4 bits with a scale and a zero point per output and group of inputs: weight = (q - zero) * scale."""

    name: str
    """awq or gptq: how they lie in words of 32 bits (weights/four_bits.py)."""
    group_size: int | None
    """Inputs of a group; None: all."""
    is_symmetric: bool = False
    """Every zero point is 8."""
    is_ordered: bool = False
    """Inputs were quantised in an order of their own (desc_act), so that a group's need not lie side by side."""
    zero_offset: int = 0
    """What is added to a stored zero point."""

    words: ClassVar[str] = "4 bits"
    """In people's words."""

    @property
    def weight_bytes(self) -> float:
        """Bytes per parameter of a linear layer, as it is stored."""
        return 0.5 if self.group_size is None else 0.5 + 2.5 / self.group_size
