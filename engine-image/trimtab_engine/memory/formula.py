"""Where the device's bytes go: the memory formula of docs/reference/contract.md section 5, and the ledger. Values only.

The operator has the same formula; both are tested against tests/golden/memory_formula.json. Measuring is the caller's.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

from trimtab_engine.errors import ConfigError
from trimtab_engine.memory.kv_groups import KVGroup

UTILIZATION_STEPS = 10_000  # min_utilization is a multiple of 0.0001: fine enough for a 141 GiB device (15 MiB)
GIB = 1 << 30
NONE_ON_DEVICE: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFormula:
    """What is known before the KV cache is made. Sizes are bytes per rank.

    `gpu_memory_utilization` is the decimal that the user wrote, so that 0.29 of 100 bytes is 29, not 30.
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
    """What this rank keeps of each token."""
    kv_dtype_bytes: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    """The most tokens of one step, which a window's blocks must hold at once."""
    draft_kv_bytes_per_token: int = 0
    """Keys and values of one token in all layers of a draft model, which lie in every block."""

    other_ranks: tuple["MemoryFormula", ...] = ()
    """The formulas of the engine's other ranks. All ranks have as many blocks as the tightest."""

    def at(self, gpu_memory_utilization: str) -> "MemoryFormula":
        """The same at another utilisation."""
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
        """Bytes of one block on the rank where it is largest: what sizes a number of blocks that all ranks share."""
        return max(rank.bytes_per_block for rank in (self, *self.other_ranks))

    @property
    def block_bytes_of_all_ranks(self) -> int:
        """Bytes of one block on all ranks together."""
        return sum(rank.bytes_per_block for rank in (self, *self.other_ranks))

    @property
    def num_blocks(self) -> int:
        """How many blocks every rank has."""
        own = self.kv_bytes // self.bytes_per_block
        return min([own, *(other.at(self.gpu_memory_utilization).num_blocks for other in self.other_ranks)])

    @property
    def num_tokens(self) -> int:
        """What fits however short the requests are, so that no window has let go of anything."""
        return self.tokens_of(self.num_blocks)

    def tokens_of(self, num_blocks: int) -> int:
        """The same of another number of blocks."""
        return num_blocks // len(self.kv_groups) * self.block_size

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks of all groups that one request of so many tokens needs."""
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
        """The longest request that so many blocks hold, up to max_model_len; 0: not even one token fits."""
        return bisect_right(range(1, self.max_model_len + 1), num_blocks, key=self.blocks_of)

    @property
    def max_concurrency(self) -> float:
        """How many requests of max_model_len run at once."""
        return self.num_blocks / self.blocks_per_request

    @property
    def min_device_bytes(self) -> int:
        """The smallest device whose whole memory holds one request of max_model_len, on the rank that needs most."""
        ranks = (self, *self.other_ranks)
        return max(rank.fixed_bytes + self.blocks_per_request * rank.bytes_per_block for rank in ranks)

    @property
    def min_utilization(self) -> str | None:
        """The smallest multiple of 0.0001 at which one request of max_model_len fits; None: not even at 1.

        ceil(device x k / 10000) >= needed holds exactly when device x k > (needed - 1) x 10000.
        """
        steps = max(0, self.min_device_bytes - 1) * UTILIZATION_STEPS // self.device_bytes + 1
        return decimal_text(Decimal(steps) / UTILIZATION_STEPS) if steps <= UTILIZATION_STEPS else None


def decimal_text(value: Decimal) -> str:
    """Plain digits without an exponent or trailing zeros: 0.9, 1."""
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def check_before_loading(
    formula: MemoryFormula,
    *,
    fixed_by: str | None,
    limit_bytes: int | None,
    tower_bytes: int = 0,
    remedies: Sequence[str] = (),
) -> None:
    """Raise ConfigError, with the numbers and what to set, where the weights cannot fit: before they are read.

    `formula` has the weights as the model's facts give them and nothing measured but `other`, so what passes may still
    not fit. `fixed_by` is the flag that fixes the KV cache; the utilisation has no say then. `limit_bytes` is what the
    container may use, whatever the device's size is said to be. `tower_bytes`: how much of the weights computes images
    and videos; `remedies`: what else would help.
    """
    of_tower = f" (the tower's {_gib(tower_bytes)} among them)" if tower_bytes else ""
    held = f"the weights take {_gib(formula.weights_bytes)}{of_tower}, and {_gib(formula.other_bytes)} is in use before"
    held += " them"
    needed = formula.other_bytes + formula.weights_bytes
    if limit_bytes is not None and needed > limit_bytes:
        raise ConfigError(
            f"out of memory before loading: {held}, but the container's memory limit is {_gib(limit_bytes)}; raise the "
            f"limit to more than {needed} bytes ({_gib(needed)}), {_listed(remedies)}or use a smaller model or --dtype "
            f"bfloat16"
        )
    usable = formula.device_bytes if fixed_by else formula.requested_bytes
    if not fixed_by:
        needed = formula.min_device_bytes
        held += f", and one request of {formula.max_model_len} tokens {_gib(needed - formula.fixed_bytes)} of KV cache"
    if needed <= usable:
        return
    of = "" if fixed_by else f" (--gpu-memory-utilization {formula.gpu_memory_utilization})"
    helps = []
    if not fixed_by and formula.min_utilization is not None:
        helps.append(f"raise --gpu-memory-utilization to more than {formula.min_utilization}")
    least = needed if fixed_by else math.ceil(needed / Fraction(formula.gpu_memory_utilization))
    helps.append(f"use a device of more than {least} bytes ({_gib(least)}; on the CPU: --device-memory-bytes)")
    helps += ["lower --max-model-len"] if formula.other_bytes + formula.weights_bytes < usable else []
    raise ConfigError(
        f"out of memory before loading: {held}, but of the device's {_gib(formula.device_bytes)} the engine may use "
        f"{_gib(usable)}{of}; {_listed([*helps, *remedies])}or use a smaller model or --dtype bfloat16"
    )


def _listed(remedies: Sequence[str]) -> str:
    return "".join(f"{remedy}, " for remedy in remedies)


def check_one_request_fits(
    formula: MemoryFormula, host_space: Mapping[str, int] = NONE_ON_DEVICE, also: Sequence[str] = ()
) -> None:
    """Raise ConfigError, with what to set, when the KV cache does not hold one request of max_model_len. `host_space`:
    bytes of host memory that lie on the device, as on the CPU, by what sets them; `also`: what else would help."""
    if formula.num_blocks >= formula.blocks_per_request:
        return
    minimum = formula.min_utilization
    missing = formula.min_device_bytes - formula.requested_bytes
    remedies = [
        f"lower {name} from {size >> 20}Mi to {(size - missing) >> 20}Mi or less (on the CPU it is part of this memory)"
        for name, size in host_space.items()
        if size >= missing
    ]
    remedies += also
    if minimum is not None:
        remedies.append(f"raise --gpu-memory-utilization from {formula.gpu_memory_utilization} to {minimum} or more")
    device_bytes = math.ceil(formula.min_device_bytes / Fraction(formula.gpu_memory_utilization))
    remedies.append(
        f"use a device of {device_bytes} bytes ({_gib(device_bytes)}) or more instead of "
        f"{formula.device_bytes} bytes (on the CPU: --device-memory-bytes)"
    )
    raise ConfigError(_does_not_fit(formula, formula.kv_bytes, formula.num_blocks, remedies))


def check_one_request_fits_fixed(formula: MemoryFormula, num_blocks: int, flag: str) -> None:
    """The same where `flag` fixes the number of blocks and the utilisation has no say. Nor may it exceed the device.

    `flag` is --kv-cache-memory-bytes or --num-gpu-blocks-override.
    """
    needed = formula.blocks_per_request
    # Without what others hold: they may let go of it, weights and KV cache never do.
    room = formula.device_bytes - formula.weights_bytes
    if num_blocks * formula.bytes_per_block > max(room, needed * formula.bytes_per_block):
        most = room // formula.bytes_per_block if flag == "--num-gpu-blocks-override" else room
        raise ConfigError(
            f"{flag} asks for a KV cache of {_gib(num_blocks * formula.bytes_per_block)}, but beside the weights the "
            f"device of {_gib(formula.device_bytes)} has {_gib(max(0, room))} left; lower it to {max(0, most)} or less"
        )
    if num_blocks >= needed:
        return
    least = needed if flag == "--num-gpu-blocks-override" else needed * formula.bytes_per_block
    remedies = [f"raise {flag} to {least} or more"]
    raise ConfigError(_does_not_fit(formula, num_blocks * formula.bytes_per_block, num_blocks, remedies))


def _does_not_fit(formula: MemoryFormula, available: int, num_blocks: int, remedies: list[str]) -> str:
    """vLLM's words, then what to set."""
    longest = formula.longest_model_len(num_blocks)
    needed = formula.blocks_per_request * formula.bytes_per_block
    if longest > 0:
        remedies = [*remedies, f"lower --max-model-len to {longest} or less"]
    head, last = remedies[:-1], remedies[-1]
    return (
        f"To serve at least one request with the model's max seq len ({formula.max_model_len}), "
        f"{_gib(needed)} KV cache is needed, which is larger than the available KV cache memory ({_gib(available)}). "
        f"Based on the available memory, the estimated maximum model length is {longest}. "
        f"What to do: {', '.join(head) + ', or ' if head else ''}{last}."
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Who owns the device's bytes at one moment, checked against what the driver counts.

    `kinds` are the owners, disjoint, in bytes: other, weights, kv_mapped, activations_peak, workspace, graphs,
    communicator. `kv_used` is the part of kv_mapped that tables hold, reported beside them.
    """

    device_bytes: int
    driver_used_bytes: int
    """What the driver, on the CPU the container's memory accounting, counts as used."""
    kinds: Mapping[str, int]
    untouched_bytes: int
    """Bytes of owners that the driver does not count yet: mapped KV pages that nobody has written."""
    block_size: int
    bytes_per_block: int
    blocks_total: int
    blocks_used: int
    blocks_cap: int

    @property
    def kv_used_bytes(self) -> int:
        return self.blocks_used * self.bytes_per_block

    @property
    def unattributed_bytes(self) -> int:
        """What the driver counts beyond what the owners have touched: near 0 unless something is not accounted for."""
        return self.driver_used_bytes - (sum(self.kinds.values()) - self.untouched_bytes)

    @property
    def free_bytes(self) -> int:
        """What no owner claims: the device less the owners. Never below 0."""
        return max(0, self.device_bytes - sum(self.kinds.values()))

    def by_kind(self) -> dict[str, int]:
        """Owners, kv_used and free: the values of trimtab_memory_bytes{kind}."""
        return {**self.kinds, "kv_used": self.kv_used_bytes, "free": self.free_bytes}

    def to_json(self) -> dict[str, object]:
        """The body of GET /admin/v1/memory."""
        return {
            "device_bytes": self.device_bytes,
            "driver_used_bytes": self.driver_used_bytes,
            "kinds": self.by_kind(),
            "untouched_bytes": self.untouched_bytes,
            "unattributed_bytes": self.unattributed_bytes,
            "kv": {
                "block_size": self.block_size,
                "bytes_per_block": self.bytes_per_block,
                "blocks_total": self.blocks_total,
                "blocks_used": self.blocks_used,
                "blocks_free": self.blocks_total - self.blocks_used,
                "blocks_cap": self.blocks_cap,
            },
        }


def total_of(ledgers: Sequence[Ledger]) -> dict[str, object]:
    """What several ranks have together, in bytes."""
    kinds: dict[str, int] = {}
    for ledger in ledgers:
        for kind, size in ledger.by_kind().items():
            kinds[kind] = kinds.get(kind, 0) + size
    return {
        "ranks": len(ledgers),
        "device_bytes": sum(ledger.device_bytes for ledger in ledgers),
        "driver_used_bytes": sum(ledger.driver_used_bytes for ledger in ledgers),
        "kinds": kinds,
    }
