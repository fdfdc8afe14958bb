"""Tile configuration of GEMMs: measured configurations if available, otherwise a rule.

One file per shape and GPU name, in vLLM's format and with vLLM's names, so that files can be exchanged with vLLM:
`N=4096,K=4096,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json`, `{"M": {"BLOCK_SIZE_M": …}}`.
The entry whose M is nearest to the number of tokens is used.
"""

import json
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from trimtab_kernels.launch.device_facts import DeviceFacts
from trimtab_kernels.launch.jit import cdiv, next_power_of_2

logger = logging.getLogger(__name__)
CONFIG_FOLDER = Path(__file__).parents[1] / "configs"
BLOCK_SHAPE = "[128,128]"
MAX_SPLIT_K = 8
MIN_STEPS_PER_SPLIT = 4
"""Steps of 128 columns: a shorter split of K would not fill its own pipeline."""


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Tile sizes, tiles of a group (see tile_of), splits of K, warps and stages."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    split_k: int = 1

    def to_json(self) -> dict[str, int]:
        """Return the configuration with vLLM's keys; SPLIT_K is an addition and absent when it is 1."""
        entry = {
            "BLOCK_SIZE_M": self.block_m,
            "BLOCK_SIZE_N": self.block_n,
            "BLOCK_SIZE_K": self.block_k,
            "GROUP_SIZE_M": self.group_m,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }
        return entry if self.split_k == 1 else entry | {"SPLIT_K": self.split_k}

    @classmethod
    def from_json(cls, entry: dict[str, int]) -> "GemmConfig":
        """Parse an entry.

        Raises:
            KeyError: a key is missing.
        """
        return cls(
            entry["BLOCK_SIZE_M"],
            entry["BLOCK_SIZE_N"],
            entry["BLOCK_SIZE_K"],
            entry["GROUP_SIZE_M"],
            entry["num_warps"],
            entry["num_stages"],
            entry.get("SPLIT_K", 1),
        )

    @property
    def operand_bytes(self) -> int:
        """Return the elements of both operands in flight; times the itemsize, their shared memory."""
        return (self.block_m + self.block_n) * self.block_k * self.num_stages


def config_file_name(
    n: int, k: int, device_name: str, *, num_experts: int | None = None, dtype: str = "fp8_w8a8"
) -> str:
    """Return the file name. `num_experts` is set for fused_moe, whose file names begin with E."""
    head = f"N={n},K={k}" if num_experts is None else f"E={num_experts},N={n},K={k}"
    tail = f",block_shape={BLOCK_SHAPE}" if dtype == "fp8_w8a8" else ""
    return f"{head},device_name={device_name},dtype={dtype}{tail}.json"


def device_name() -> str:
    """Return the GPU's name as used in file names; all H200 variants share one name."""
    name = torch.cuda.get_device_name().replace(" ", "_")
    return "NVIDIA_H200" if "H200" in name else name


@cache
def load_configs(file_name: str, folder: Path = CONFIG_FOLDER) -> dict[int, GemmConfig] | None:
    """Return the configurations by number of tokens, or None, with one warning, if the file does not exist."""
    path = folder / file_name
    if not path.exists():
        logger.warning(
            "Using default launch configurations, which may be slow: there is no %s; measure them with "
            "`python -m trimtab_kernels.tune`",
            path,
        )
        return None
    return {int(m): GemmConfig.from_json(entry) for m, entry in json.loads(path.read_text()).items()}


def nearest(configs: dict[int, GemmConfig], num_tokens: int) -> GemmConfig:
    """Return the entry whose M is nearest; the larger one of two equally near entries."""
    return configs[min(configs, key=lambda m: (abs(m - num_tokens), -m))]


def default_config(num_tokens: int, n: int, k: int, facts: DeviceFacts, *, itemsize: int = 1) -> GemmConfig:
    """Return the configuration without measurements: narrow tiles and split K for few tokens, square tiles for many."""
    block_m = min(128, max(16, next_power_of_2(num_tokens)))
    block_n = 64 if block_m <= 32 else 128
    block_k = 128 if itemsize == 1 else 64
    tiles = cdiv(num_tokens, block_m) * cdiv(n, block_n)
    most = max(1, cdiv(k, 128) // MIN_STEPS_PER_SPLIT)
    split = min(MAX_SPLIT_K, next_power_of_2(most + 1) // 2, next_power_of_2(cdiv(2 * facts.num_sms, tiles)))
    stages = 4 if facts.shared_bytes >= 160 << 10 else 3
    while stages > 2 and (block_m + block_n) * block_k * itemsize * stages > facts.shared_bytes:
        stages -= 1
    return GemmConfig(block_m, block_n, block_k, 16, 8 if block_m >= 128 else 4, stages, max(1, split))


def block_fp8_config(num_tokens: int, n: int, k: int, facts: DeviceFacts) -> GemmConfig:
    """Return the configuration of w8a8_block_fp8. Without a GPU, no file is read."""
    if torch.cuda.is_available():
        measured = load_configs(config_file_name(n, k, device_name()))
        if measured:
            return nearest(measured, num_tokens)
    return default_config(num_tokens, n, k, facts)
