"""The memory formula of docs/reference/contract.md section 5: how large a device's KV cache is. Exact arithmetic.

Utilizations are decimals, never binary fractions. Measuring is the caller's task.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

from trimtab_modelspec.kv_groups import KVGroup

UTILIZATION_STEPS = 10_000  # min_utilization is a multiple of 0.0001: fine enough for a 141 GiB device (15 MiB)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFormula:
    """Memory sizes known before the KV cache is created, in bytes per rank. `gpu_memory_utilization` is the user's
    decimal, so that 0.29 of 100 bytes is 29, not 30.
    """

    device_bytes: int
    gpu_memory_utilization: str
    other_bytes: int
    """Resident on the device before the weights."""
    weights_bytes: int
    activations_peak_bytes: int
    workspace_bytes: int
    graphs_bytes: int
    communicator_bytes: int
    kv_groups: tuple[KVGroup, ...]
    """KV groups of this rank."""
    kv_dtype_bytes: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    """Maximum tokens of one step, which a window's blocks must hold at once."""
    draft_kv_bytes_per_token: int = 0
    """KV bytes of one token in all layers of a draft model, included in every block."""

    other_ranks: tuple["MemoryFormula", ...] = ()
    """The formulas of the engine's other ranks. All ranks have as many blocks as the tightest."""

    def at(self, gpu_memory_utilization: str) -> "MemoryFormula":
        """Return the same at another utilisation."""
        return replace(self, gpu_memory_utilization=gpu_memory_utilization)

    @property
    def requested_bytes(self) -> int:
        return math.ceil(Fraction(self.gpu_memory_utilization) * self.device_bytes)

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
    def kv_bytes(self) -> int:
        return max(0, self.requested_bytes - self.fixed_bytes)

    @property
    def bytes_per_block(self) -> int:
        """The largest group's: blocks of all groups are equally large."""
        own = max(group.num_elements for group in self.kv_groups) * self.kv_dtype_bytes
        return self.block_size * (own + self.draft_kv_bytes_per_token)

    @property
    def widest_block_bytes(self) -> int:
        """Bytes of a block on the rank with the largest blocks; determines block counts shared by all ranks."""
        return max(rank.bytes_per_block for rank in (self, *self.other_ranks))

    @property
    def block_bytes_of_all_ranks(self) -> int:
        """Bytes of one block on all ranks together."""
        return sum(rank.bytes_per_block for rank in (self, *self.other_ranks))

    @property
    def num_blocks(self) -> int:
        """Number of blocks on every rank."""
        own = self.kv_bytes // self.bytes_per_block
        return min([own, *(other.at(self.gpu_memory_utilization).num_blocks for other in self.other_ranks)])

    @property
    def num_tokens(self) -> int:
        """Tokens that fit for requests so short that no window has freed a block."""
        return self.tokens_of(self.num_blocks)

    def tokens_of(self, num_blocks: int) -> int:
        """Return the same of another number of blocks."""
        return num_blocks // len(self.kv_groups) * self.block_size

    def blocks_of(self, num_tokens: int) -> int:
        """Return the blocks of all groups that one request of `num_tokens` tokens needs."""
        step = self.max_num_batched_tokens
        return sum(
            group.num_blocks(num_tokens, block_size=self.block_size, max_num_batched_tokens=step)
            for group in self.kv_groups
        )

    @property
    def blocks_per_request(self) -> int:
        """Blocks that one request of max_model_len needs."""
        return self.blocks_of(self.max_model_len)

    def longest_model_len(self, num_blocks: int) -> int:
        """Return the longest request that `num_blocks` blocks hold, up to max_model_len. 0 if not one token fits."""
        return bisect_right(range(1, self.max_model_len + 1), num_blocks, key=self.blocks_of)

    @property
    def max_concurrency(self) -> float:
        """Return how many requests of max_model_len run at once."""
        return self.num_blocks / self.blocks_per_request

    @property
    def min_device_bytes(self) -> int:
        """Return the smallest device whose whole memory holds one request of max_model_len, on the rank that needs
        most.
        """
        ranks = (self, *self.other_ranks)
        return max(rank.fixed_bytes + self.blocks_per_request * rank.bytes_per_block for rank in ranks)

    @property
    def min_utilization(self) -> str | None:
        """Return the smallest multiple of 0.0001 at which one request of max_model_len fits. None if it does not fit at
        1.

        ceil(device x k / 10000) >= needed holds exactly when device x k > (needed - 1) x 10000.
        """
        steps = max(0, self.min_device_bytes - 1) * UTILIZATION_STEPS // self.device_bytes + 1
        return decimal_text(Decimal(steps) / UTILIZATION_STEPS) if steps <= UTILIZATION_STEPS else None


def decimal_text(value: Decimal) -> str:
    """Plain digits without an exponent or trailing zeros: 0.9, 1."""
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
