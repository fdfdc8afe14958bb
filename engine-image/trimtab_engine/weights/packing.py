"""How a weight is multiplied as a checkpoint stores it, before any of it is read."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Packing:
    """Rows of one packing are multiplied together."""

    form: str
    """The block's (trimtab_kernels.native.quantised)."""
    element_bytes: float
    """Of a number, as it is held."""
    order: bytes | None = None
    """The order of the inputs, where that is their own."""
