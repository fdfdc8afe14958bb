"""Rows of the engine benchmark: models, loads, targets, and the device's ideal rate. Pure: the engine's measurements
(end_to_end.py) and the peers' (peers/) use the same table.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from kernel_benchmarks.ideal import (
    LLAMA_8B,
    QWEN3_06B,
    QWEN3_8B,
    ModelShape,
    nano_vllm_workload,
    prefill_seconds,
    step_seconds,
    workload_seconds,
)

Workload = list[tuple[list[int], int]]
"""Prompts, and the number of tokens each generates."""
CONTEXT = 1024
STEPS = 64  # measured decode steps: the context grows by 6 %
WARM_UP_STEPS = 8
PREFILL_PROMPTS = 32
BUSY_BATCH = 32
FIRST_TOKEN, TOKENS = 3, 10_000
"""Prompts consist of these token ids, which every vocabulary here has."""


class Kind(Enum):
    """Kind of measurement. DECODE, PREFILL and WORKLOAD are rates in tokens/s, which peers report too."""

    DECODE = "decode"
    PREFILL = "prefill"
    WORKLOAD = "nano-vllm workload"
    BUSY = "GPU busy"
    RESIZE = "live KV resize"


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One row. `bar` is the target share of the limit, or for RESIZE the allowed seconds."""

    shape: ModelShape
    kind: Kind
    bar: float
    batch: int = 0

    @property
    def name(self) -> str:
        details = {
            Kind.DECODE: f" {self.batch} x 1k",
            Kind.BUSY: f", {BUSY_BATCH} x 1k",
            Kind.RESIZE: " of 10 GiB under load",
        }
        return f"engine {self.shape.name} {self.kind.value}{details.get(self.kind, '')}"

    @property
    def has_peers(self) -> bool:
        return self.kind in (Kind.DECODE, Kind.PREFILL, Kind.WORKLOAD)

    @property
    def load(self) -> Workload:
        """Load of a row with peers. Decodes generate enough tokens that none ends before the last has been measured."""
        if self.kind is Kind.WORKLOAD:
            return nano_vllm_workload()
        if self.kind is Kind.PREFILL:
            return [(prompt, 1) for prompt in prompts(PREFILL_PROMPTS, CONTEXT)]
        return decode_load(self.batch, CONTEXT, STEPS)

    def limit(self, limits: Mapping[str, float]) -> float:
        """Return the device's ideal tokens/s, from the bandwidth and the matrix rate of the same run."""
        bandwidth, flops = limits["copy"], limits["bf16"]
        if self.kind is Kind.WORKLOAD:
            best = workload_seconds(self.shape, self.load, bandwidth=bandwidth, flops=flops)
            return sum(count for _, count in self.load) / best
        if self.kind is Kind.PREFILL:
            return CONTEXT / prefill_seconds(self.shape, CONTEXT, flops=flops)
        cached = int(self.batch * (CONTEXT + WARM_UP_STEPS + STEPS / 2))
        return self.batch / step_seconds(self.shape, self.batch, cached, bandwidth=bandwidth, flops=flops)


def prompts(count: int, length: int) -> list[list[int]]:
    dice = random.Random(count)
    return [[dice.randrange(FIRST_TOKEN, TOKENS) for _ in range(length)] for _ in range(count)]


def decode_load(batch: int, context: int, steps: int) -> Workload:
    """Return prompts for decodes, including the steps until all of them decode."""
    return [(prompt, steps + WARM_UP_STEPS + 8 + batch) for prompt in prompts(batch, context)]


ROWS = (
    EngineRow(LLAMA_8B, Kind.DECODE, 0.90, 1),
    EngineRow(LLAMA_8B, Kind.DECODE, 0.85, 32),
    EngineRow(LLAMA_8B, Kind.DECODE, 0.75, 256),
    EngineRow(LLAMA_8B, Kind.PREFILL, 0.70),
    EngineRow(LLAMA_8B, Kind.BUSY, 0.97),
    EngineRow(QWEN3_06B, Kind.WORKLOAD, 0.60),
    EngineRow(LLAMA_8B, Kind.RESIZE, 0.2),
    EngineRow(QWEN3_8B, Kind.WORKLOAD, 0.60),
)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that share one engine process. The resize needs less memory at start."""

    shape: ModelShape
    resizes: bool

    @property
    def rows(self) -> list[EngineRow]:
        return [row for row in ROWS if row.shape == self.shape and (row.kind is Kind.RESIZE) == self.resizes]

    def select_rows(self, only: str, has: Callable[[str], bool]) -> list[EngineRow]:
        """Return the selected rows without a result."""
        return [row for row in self.rows if only in row.name and not has(row.name)]


GROUPS = (Group(LLAMA_8B, False), Group(QWEN3_06B, False), Group(LLAMA_8B, True), Group(QWEN3_8B, False))
