"""Start-up checks on the memory formula (docs/reference/contract.md section 5), and the memory ledger. Values only;
callers measure.

The operator uses the same formula; both are tested against tests/golden/memory_formula.json.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from trimtab_modelspec.memory_formula import MemoryFormula

from trimtab_engine.errors import ConfigError

GIB = 1 << 30
NONE_ON_DEVICE: Mapping[str, int] = {}


def check_before_loading(
    formula: MemoryFormula,
    *,
    fixed_by: str | None,
    limit_bytes: int | None,
    tower_bytes: int = 0,
    remedies: Sequence[str] = (),
) -> None:
    """Check that the weights fit before they are read. `formula` has the weights of the model facts and only `other`
    measured, so passing is not a guarantee.

    Args:
        fixed_by: The flag that fixes the KV cache; the utilization is then ignored.
        limit_bytes: The container's memory limit, independent of the device size.
        tower_bytes: The part of the weights that computes images and videos.
        remedies: Further advice.

    Raises:
        ConfigError: With the numbers and the flags to change.
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
    """Check that the KV cache holds one request of max_model_len.

    Args:
        host_space: Bytes of host memory on the device, as on the CPU, by flag.
        also: Further advice.

    Raises:
        ConfigError: With the flags to change.
    """
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
    """Check the same if `flag` (--kv-cache-memory-bytes or --num-gpu-blocks-override) fixes the number of blocks and
    the utilization is ignored, and that the blocks fit on the device.
    """
    needed = formula.blocks_per_request
    # Without other processes' memory: they may free it, weights and KV cache stay.
    room = formula.device_bytes - formula.weights_bytes
    if num_blocks * formula.bytes_per_block > max(room, needed * formula.bytes_per_block):
        most = room // formula.bytes_per_block if flag == "--num-gpu-blocks-override" else room
        raise ConfigError(
            f"{flag} requires a KV cache of {_gib(num_blocks * formula.bytes_per_block)}, but next to the weights the "
            f"device of {_gib(formula.device_bytes)} has {_gib(max(0, room))} left; lower it to {max(0, most)} or less"
        )
    if num_blocks >= needed:
        return
    least = needed if flag == "--num-gpu-blocks-override" else needed * formula.bytes_per_block
    remedies = [f"raise {flag} to {least} or more"]
    raise ConfigError(_does_not_fit(formula, num_blocks * formula.bytes_per_block, num_blocks, remedies))


def _does_not_fit(formula: MemoryFormula, available: int, num_blocks: int, remedies: list[str]) -> str:
    """Return vLLM's error message, with advice."""
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
    """Device memory by owner at one moment, compared with the driver's count.

    `kinds` are disjoint owners in bytes: other, weights, kv_mapped, activations_peak, workspace, graphs, communicator.
    `kv_used` is the part of kv_mapped held by block tables, reported in addition.
    """

    device_bytes: int
    driver_used_bytes: int
    """Bytes in use by the driver's count; on the CPU by the container's memory accounting."""
    kinds: Mapping[str, int]
    untouched_bytes: int
    """Bytes of owners that the driver does not count yet: mapped KV pages that were never written."""
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
        """Bytes that the driver counts beyond the touched bytes of owners: near 0 unless some memory is not accounted
        for.
        """
        return self.driver_used_bytes - (sum(self.kinds.values()) - self.untouched_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes claimed by no owner: device size minus owners, at least 0."""
        return max(0, self.device_bytes - sum(self.kinds.values()))

    def by_kind(self) -> dict[str, int]:
        """Return owners, kv_used and free: the values of trimtab_memory_bytes{kind}."""
        return {**self.kinds, "kv_used": self.kv_used_bytes, "free": self.free_bytes}

    def to_json(self) -> dict[str, object]:
        """Return the body of GET /admin/v1/memory."""
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
    """Return the sum over several ranks, in bytes."""
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
