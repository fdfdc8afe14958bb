"""The GEMM shapes of a model, and the launch configurations of each that are worth timing. Pure; `measurement` times
them.
"""

import itertools
import random
from dataclasses import dataclass
from typing import Any

from trimtab_kernels.launch.device_facts import DeviceFacts
from trimtab_kernels.launch.gemm_config import MAX_SPLIT_K, MIN_STEPS_PER_SPLIT, GemmConfig, default_config
from trimtab_kernels.launch.jit import cdiv, next_power_of_2

MAX_ACCUMULATORS = 128 * 256
"""fp32 sums of one CTA at most: 255 registers of 256 threads hold no more together with the operands."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Weights [n, k] of a projection."""

    n: int
    k: int


def shapes_of(config: dict[str, Any], tensor_parallel_size: int = 1) -> list[Shape]:
    """Return the distinct (N, K) of one rank's dense projections.

    q, k and v are one GEMM, gate and up another, as the engine computes them. Column-parallel projections divide N,
    row-parallel ones K. DeepSeek's latent attention has its own projections; experts belong to fused_moe.

    Raises:
        KeyError: the config lacks a size.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    tp = tensor_parallel_size
    shapes: list[Shape] = []
    if "kv_lora_rank" in config:
        rope, nope = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        latent, value = config["kv_lora_rank"], config["v_head_dim"]
        if config.get("q_lora_rank"):
            shapes += [Shape(config["q_lora_rank"] + latent + rope, hidden)]
            shapes += [Shape(heads * (rope + nope) // tp, config["q_lora_rank"])]
        else:
            shapes += [Shape(heads * (rope + nope) // tp, hidden), Shape(latent + rope, hidden)]
        shapes += [Shape(heads * (nope + value) // tp, latent), Shape(hidden, heads * value // tp)]
    else:
        size = config.get("head_dim") or hidden // heads
        kv_heads = max(config.get("num_key_value_heads", heads), tp)
        shapes += [Shape((heads + 2 * kv_heads) * size // tp, hidden), Shape(hidden, heads * size // tp)]
    wide = [config["intermediate_size"]]
    if config.get("n_shared_experts"):
        wide.append(config["n_shared_experts"] * config["moe_intermediate_size"])
    for size in wide:
        shapes += [Shape(2 * size // tp, hidden), Shape(hidden, size // tp)]
    return list(dict.fromkeys(shapes))


def search_space(num_tokens: int, shape: Shape, facts: DeviceFacts) -> list[GemmConfig]:
    """Return configurations worth timing; the default is always among them."""
    candidates = [default_config(num_tokens, shape.n, shape.k, facts)]
    padded = next_power_of_2(num_tokens)
    tallest = min(256, max(16, 2 * padded))  # taller tiles would compute padding
    lowest = min(64, max(16, padded // 2))  # lower ones would read the weights repeatedly
    for block_m, block_n, block_k, group_m, warps, stages, split in itertools.product(
        (16, 32, 64, 128, 256), (32, 64, 128, 256), (64, 128), (1, 16, 32), (4, 8), (2, 3, 4, 5), (1, 2, 4, 8)
    ):
        config = GemmConfig(block_m, block_n, block_k, group_m, warps, stages, split)
        if lowest <= block_m <= tallest and _is_sensible(config, num_tokens, shape, facts):
            candidates.append(config)
    return list(dict.fromkeys(candidates))


def _is_sensible(config: GemmConfig, num_tokens: int, shape: Shape, facts: DeviceFacts) -> bool:
    rows, columns = cdiv(num_tokens, config.block_m), cdiv(shape.n, config.block_n)
    accumulators = config.block_m * config.block_n
    return (
        config.operand_bytes <= facts.shared_bytes
        and accumulators <= MAX_ACCUMULATORS
        and accumulators >= 32 * config.num_warps * 2  # less than two sums per thread leaves threads idle
        and (config.num_warps == 8 or accumulators <= 128 * 128)
        and (config.group_m == 1 or rows > 1)  # one row of tiles has one order
        and config.split_k <= min(MAX_SPLIT_K, max(1, cdiv(shape.k, 128) // MIN_STEPS_PER_SPLIT))
        and (config.split_k == 1 or rows * columns < 2 * facts.num_sms)  # enough CTAs without split K
        and (config.block_k == 128 or config.split_k == 1)
    )


def shuffle_configs(configs: list[GemmConfig]) -> list[GemmConfig]:
    """Shuffle the configurations, the default first: a search that is cut off has then sampled the whole space."""
    rest = configs[1:]
    random.Random(len(configs)).shuffle(rest)
    return [*configs[:1], *rest]
