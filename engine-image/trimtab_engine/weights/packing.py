"""Packing formats with which weights are multiplied as stored; decided before any weight is read."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Packing:
    """Rows of one packing are multiplied together."""

    form: str
    """The block's (trimtab_kernels.native.quantised)."""
    element_bytes: float
    """Bytes per number in memory."""
    order: bytes | None = None
    """The order of the inputs, where that is their own."""
