"""KV cache size and memory checks at start-up, from configuration and measurements.

formula.py has the formula; this module has the flags that control it, and the errors that name them.
"""

import logging
import math
from dataclasses import dataclass, replace
from fractions import Fraction

from trimtab_modelspec.kv_groups import KVGroup
from trimtab_modelspec.memory_formula import MemoryFormula

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.memory.formula import (
    GIB,
    check_before_loading,
    check_one_request_fits,
    check_one_request_fits_fixed,
)
from trimtab_engine.memory.reserved import Processes, reserved_bytes
from trimtab_engine.multimodal.items import MODALITIES

logger = logging.getLogger("trimtab_engine.core")


@dataclass(frozen=True, slots=True)
class KVSize:
    """Initial and maximum number of KV blocks, and the flag that fixes them, if any."""

    num_blocks: int
    cap_blocks: int
    fixed_by: str | None


def reserved_for_processes(config: EngineConfig, vocab_size: int) -> int:
    """Return `other` of the formula on the CPU, in bytes per rank."""
    processes = Processes(
        num_ranks=config.num_local_ranks,
        num_api_servers=config.num_local_api_servers,
        has_first_process=config.has_first_process,
        media_cache_bytes=config.processor_cache_bytes if config.modalities else None,
        num_media_caches=config.num_local_media_caches,
    )
    return reserved_bytes(processes, vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmeasured:
    """Values known before the weights are read. Sizes are bytes per rank."""

    device_bytes: int
    other_bytes: int
    limit_bytes: int | None
    """The container's memory limit. None means no limit."""
    weights_bytes: int
    """Bytes of the weights without the vision encoder's."""
    tower_bytes: int
    """Bytes of the vision encoder. 0 without one."""
    kv_groups: tuple[KVGroup, ...]
    """This rank's."""
    kv_dtype_bytes: int
    max_model_len: int


def check_weights_fit(config: EngineConfig, known: Unmeasured) -> None:
    """Raise ConfigError where the weights, with one request's KV cache, cannot fit, before any of them is read."""
    formula = MemoryFormula(
        device_bytes=known.device_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        other_bytes=known.other_bytes,
        weights_bytes=known.weights_bytes + known.tower_bytes,
        activations_peak_bytes=0,
        workspace_bytes=0,
        graphs_bytes=0,
        communicator_bytes=0,
        kv_groups=known.kv_groups,
        kv_dtype_bytes=known.kv_dtype_bytes,
        block_size=config.block_size,
        max_model_len=1 if config.max_model_len == "auto" else known.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens_cap,
    )
    fixed = fixed_blocks(config, formula)
    check_before_loading(
        formula,
        fixed_by=fixed[1] if fixed else None,
        limit_bytes=known.limit_bytes,
        tower_bytes=known.tower_bytes,
        remedies=media_remedies(config),
    )


def longest_that_fits(config: EngineConfig, formula: MemoryFormula) -> MemoryFormula:
    """Apply --max-model-len auto. If no block fits, the length is unchanged, and size_kv_cache reports the missing
    memory.
    """
    num_blocks, _ = fixed_blocks(config, formula) or (formula.num_blocks, "")
    longest = formula.longest_model_len(num_blocks)
    if not config.enable_chunked_prefill:
        longest = min(longest, config.max_num_batched_tokens)  # a prompt must fit into one step
    if longest < 1:
        return formula
    logger.info("max_model_len auto: %d tokens fit, of the model's %d", longest, formula.max_model_len)
    return replace(formula, max_model_len=longest)


def size_kv_cache(config: EngineConfig, formula: MemoryFormula) -> KVSize:
    """Return the initial and maximum size of the KV cache.

    Raises:
        ConfigError: If not one request would fit.
    """
    fixed = fixed_blocks(config, formula)
    if fixed is None:
        check_one_request_fits(formula, _host_space(config), media_remedies(config))
        return KVSize(formula.num_blocks, formula.at(config.gpu_memory_utilization_cap).num_blocks, None)
    num_blocks, flag = fixed
    check_one_request_fits_fixed(formula, num_blocks, flag)
    return KVSize(num_blocks, num_blocks, flag)


def _host_space(config: EngineConfig) -> dict[str, int]:
    """Return host memory that counts as device memory, by flag: on the CPU both are the same memory."""
    if config.device != "cpu":
        return {}
    swap = "--swap-space" if config.swap_space_bytes == config.swap_space_bytes_cap else "--swap-space-cap"
    cache = "--kv-offload-size" if config.kv_offload_bytes == config.kv_offload_bytes_cap else "--kv-offload-size-cap"
    return {swap: config.swap_space_bytes_cap, cache: config.kv_offload_bytes_cap}


def media_remedies(config: EngineConfig) -> list[str]:
    """Return advice for freeing memory of images and videos; empty for a text-only model. On the CPU the caches of all
    processes are part of this memory.
    """
    if not config.modalities:
        return []
    remedies = []
    count, each = config.num_local_media_caches, config.processor_cache_bytes
    if config.device == "cpu" and count and each:
        remedies.append(
            f"lower --mm-processor-cache-gb (it is {each / GIB:.2g} in each of {count} processes, which on the CPU is "
            f"part of this memory)"
        )
    if config.device == "cuda":
        remedies.append(
            "lower --max-num-encoder-input-tokens, of as many tokens as which an image is computed at start"
        )
    kinds = ", ".join(f'"{kind}": 0' for kind in MODALITIES)
    return [*remedies, f"serve text only with --limit-mm-per-prompt '{{{kinds}}}', which drops the vision encoder"]


def memory_warning(config: EngineConfig, formula: MemoryFormula, size: KVSize, room_bytes: int) -> str | None:
    """Return a warning if this node's ranks may exceed the memory left by other processes. None otherwise. Only a
    warning: other processes' memory varies, and the number of KV blocks must not depend on it.
    """
    most = formula.fixed_bytes + size.cap_blocks * formula.bytes_per_block
    claimed = most * config.num_local_ranks
    if claimed <= room_bytes:
        return None
    rest = max(0, room_bytes // config.num_local_ranks)
    remedy = f"lower {size.fixed_by}"
    if size.fixed_by is None:
        remedy = f"set --device-memory-bytes {math.floor(rest / Fraction(config.gpu_memory_utilization_cap))} or less"
    return (
        f"this engine may use up to {claimed / GIB:.2f} GiB here, but other processes leave only "
        f"{room_bytes / GIB:.2f} GiB: under load the kernel would kill it; {remedy}, or stop other processes"
    )


def fixed_blocks(config: EngineConfig, formula: MemoryFormula) -> tuple[int, str] | None:
    """Return the number of blocks and the flag that fixes it, where one does."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override, "--num-gpu-blocks-override"
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // formula.bytes_per_block, "--kv-cache-memory-bytes"
    return None


REMEDIES = {
    "weights": "use a larger device, a smaller model or --dtype bfloat16",
    "profile": "lower --max-num-batched-tokens, --max-num-seqs (and caps) or --max-model-len, or use a larger device",
    "graphs": "capture fewer sizes (--cudagraph-capture-sizes), set --enforce-eager, or use a larger device",
    "kv_cache": "lower --gpu-memory-utilization (with its cap) or the KV cache size flag, or use a larger device",
}
"""Advice after running out of memory, by start-up stage."""


def out_of_memory(config: EngineConfig, stage: str) -> str:
    """Return the line to print when an allocation failed while starting."""
    size = config.device_memory_bytes
    declared = "" if size is None else f" on a device of {size / GIB:.2f} GiB (--device-memory-bytes)"
    remedies = [REMEDIES.get(stage, REMEDIES["weights"]), *(media_remedies(config) if stage == "profile" else ())]
    return (
        f"out of memory at start, in stage {stage}{declared}; the envelope is max_num_batched_tokens "
        f"{config.max_num_batched_tokens_cap}, max_num_seqs {config.max_num_seqs_cap}, gpu_memory_utilization "
        f"{config.gpu_memory_utilization_cap}; {'; or '.join(remedies)}"
    )
