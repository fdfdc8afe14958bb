"""The memory formula of docs/reference/contract.md section 5, the operator's side: what a device's KV cache will hold.

Pure arithmetic, exact: utilisations are decimals, never binary fractions. The engine has the same formula; both are
tested against tests/golden/memory_formula.json.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from trimtab_operator.layout.kv_groups import KvGroup

UTILIZATION_STEPS = 10_000  # min_utilization is a multiple of 0.0001, as in the contract


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShape:
    """What decides the size of the KV cache beside the utilisation. Sizes are bytes per rank."""

    device_bytes: int
    other_bytes: int
    weights_bytes: int
    activations_peak_bytes: int
    workspace_bytes: int
    graphs_bytes: int
    communicator_bytes: int
    kv_groups: tuple[KvGroup, ...]
    """What this rank keeps of each token."""
    kv_dtype_bytes: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    """The most tokens of one step, which a window's blocks must hold at once."""
    draft_kv_bytes_per_token: int = 0
    """Keys and values of one token in all layers of a draft model, which lie in every block."""

    @property
    def fixed_bytes(self) -> int:
        """All that is not KV cache."""
        return (
            self.other_bytes
            + self.weights_bytes
            + self.activations_peak_bytes
            + self.workspace_bytes
            + self.graphs_bytes
            + self.communicator_bytes
        )

    @property
    def bytes_per_block(self) -> int:
        """What the largest group keeps of `block_size` tokens: blocks of all groups are equally large."""
        own = max(group.num_elements for group in self.kv_groups) * self.kv_dtype_bytes
        return self.block_size * (own + self.draft_kv_bytes_per_token)

    @property
    def blocks_per_request(self) -> int:
        """Blocks that one request of `max_model_len` needs."""
        return self.blocks_of(self.max_model_len)

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks of all groups that one request of so many tokens needs."""
        step = self.max_num_batched_tokens
        return sum(
            group.num_blocks(num_tokens, block_size=self.block_size, max_num_batched_tokens=step)
            for group in self.kv_groups
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCapacity:
    """What fits at one utilisation: `num_tokens` however short the requests are, so that no window has let go of
    anything; `longest_model_len` of one request, up to `max_model_len` (0: not one token); `max_concurrency` counts
    requests of `max_model_len`.
    """

    requested_bytes: int
    kv_bytes: int
    bytes_per_block: int
    num_blocks: int
    num_tokens: int
    blocks_per_request: int
    longest_model_len: int
    max_concurrency: float


def kv_capacity(shape: MemoryShape, gpu_memory_utilization: str) -> KvCapacity:
    """The KV cache at a utilisation, which is given as the decimal it is written as (raises ValueError otherwise)."""
    requested = math.ceil(Fraction(gpu_memory_utilization) * shape.device_bytes)
    kv_bytes = max(0, requested - shape.fixed_bytes)
    num_blocks = kv_bytes // shape.bytes_per_block
    return KvCapacity(
        requested_bytes=requested,
        kv_bytes=kv_bytes,
        bytes_per_block=shape.bytes_per_block,
        num_blocks=num_blocks,
        num_tokens=num_blocks // len(shape.kv_groups) * shape.block_size,
        blocks_per_request=shape.blocks_per_request,
        longest_model_len=bisect_right(range(1, shape.max_model_len + 1), num_blocks, key=shape.blocks_of),
        max_concurrency=num_blocks / shape.blocks_per_request,
    )


def min_utilization(shape: MemoryShape) -> str | None:
    """The smallest multiple of 0.0001 at which one request of `max_model_len` fits; None when not even 1 will do.

    ceil(device × k / 10000) ≥ needed holds exactly when device × k > (needed − 1) × 10000.
    """
    needed = shape.fixed_bytes + shape.blocks_per_request * shape.bytes_per_block
    steps = max(0, needed - 1) * UTILIZATION_STEPS // shape.device_bytes + 1
    if steps > UTILIZATION_STEPS:
        return None
    text = format(Decimal(steps) / UTILIZATION_STEPS, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
