"""The engine's live parameters that the tuner changes, and the range that an engine reports for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Parameter(StrEnum):
    """A live parameter, by its name in the admin API."""

    GPU_MEMORY_UTILIZATION = "gpu_memory_utilization"
    WATERMARK = "watermark"
    MAX_NUM_SEQS = "max_num_seqs"
    MAX_NUM_BATCHED_TOKENS = "max_num_batched_tokens"

    @property
    def is_share(self) -> bool:
        """Return True if values are shares between 0 and 1, False if they are counts."""
        return self in (Parameter.GPU_MEMORY_UTILIZATION, Parameter.WATERMARK)


Value = int | float
Values = Mapping[Parameter, Value]

SAME_SHARE = 1e-6  # shares closer than this are equal


def typed(parameter: Parameter, value: float) -> Value:
    """Return the value as the engine accepts it: shares rounded to four decimals, counts as integers."""
    return round(float(value), 4) if parameter.is_share else round(value)


def is_same(one: Value, other: Value) -> bool:
    """Return True if two values of a parameter are equal within rounding."""
    return abs(one - other) <= SAME_SHARE


@dataclass(frozen=True, slots=True)
class FieldRange:
    """Range that an engine reports for one parameter, and whether it can change without a restart."""

    live: bool
    minimum: float
    maximum: float
