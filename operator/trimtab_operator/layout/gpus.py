"""What is known of a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device. Rates are per second, at their published peak."""

    name: str
    memory_bytes: int
    """What the driver counts as the device's total."""
