"""The engine's live fields that the tuner moves, and what an engine says about each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Knob(StrEnum):
    """A live field, by its name in the admin API."""

    GPU_MEMORY_UTILIZATION = "gpu_memory_utilization"
    WATERMARK = "watermark"
    MAX_NUM_SEQS = "max_num_seqs"
    MAX_NUM_BATCHED_TOKENS = "max_num_batched_tokens"

    @property
    def is_share(self) -> bool:
        """Whether its values are shares between 0 and 1 rather than counts."""
        return self in (Knob.GPU_MEMORY_UTILIZATION, Knob.WATERMARK)


Value = int | float
Values = Mapping[Knob, Value]

SAME_SHARE = 1e-6  # shares closer than this are one value written twice


def typed(knob: Knob, value: float) -> Value:
    """The value as the engine takes it: shares to four decimals, counts as whole numbers."""
    return round(float(value), 4) if knob.is_share else round(value)


def is_same(one: Value, other: Value) -> bool:
    """Whether two values of a knob are one."""
    return abs(one - other) <= SAME_SHARE


@dataclass(frozen=True, slots=True)
class FieldRange:
    """What an engine says about one field: whether it is live, and what could be set now."""

    live: bool
    minimum: float
    maximum: float
