"""Memory ledger of one rank: the formula's values compared with the device's current counts."""

from trimtab_modelspec.memory_formula import MemoryFormula

from trimtab_engine.device.device import Device
from trimtab_engine.device.kv_cache import KVCache
from trimtab_engine.memory.formula import Ledger


def rank_ledger(
    formula: MemoryFormula,
    device: Device,
    kv_cache: KVCache,
    *,
    blocks_used: int,
    has_weights: bool = True,
    untouched_swap_bytes: int = 0,
) -> Ledger:
    """Return the device's memory by owner."""
    rounding = 0 if device.kind == "cpu" else kv_cache.rounding_bytes  # the formula's workspace holds it
    return Ledger(
        device_bytes=formula.device_bytes,
        driver_used_bytes=device.used_bytes(),
        kinds={
            "other": formula.other_bytes,
            "weights": formula.weights_bytes if has_weights else 0,
            "kv_mapped": kv_cache.mapped_bytes,
            "activations_peak": formula.activations_peak_bytes,
            "workspace": formula.workspace_bytes,
            "graphs": formula.graphs_bytes,
            "communicator": formula.communicator_bytes,
        },
        untouched_bytes=max(0, kv_cache.mapped_bytes + rounding - kv_cache.resident_bytes()) + untouched_swap_bytes,
        block_size=formula.block_size,
        bytes_per_block=formula.bytes_per_block,
        blocks_total=kv_cache.num_blocks,
        blocks_used=blocks_used,
        blocks_cap=kv_cache.cap_blocks,
    )
