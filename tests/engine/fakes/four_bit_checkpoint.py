"""4-bit integer checkpoints in AWQ's and GPTQ's published formats, packed word by word."""

import re
import zlib
from dataclasses import dataclass
from typing import Any

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output index (of eight adjacent ones) in a word's first, second, ... 4 bits."""
GPTQ_ORDER = tuple(range(8))
SAME_INPUTS = re.compile(r"\b(q|k|v|gate|up)_proj$")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Quantization and packing of a weight."""

    method: str
    group_size: int = 32
    is_symmetric: bool = False
    is_ordered: bool = False
    shares_orders: bool = True
    """Projections of the same inputs have them in one order, as GPTQ's tools make it."""
    checkpoint_format: str | None = None
    has_biases: bool = False
    """GPTQ's tools write a bias of zeros where a layer has none."""

    @property
    def config(self) -> dict[str, Any]:
        """`quantization_config`."""
        shared = {"quant_method": self.method, "bits": 4, "group_size": self.group_size}
        if self.method == "awq":
            return {**shared, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
        words = {} if self.checkpoint_format is None else {"checkpoint_format": self.checkpoint_format}
        return {**shared, "sym": self.is_symmetric, "desc_act": self.is_ordered, **words}


def quantise(tensors: Tensors, recipe: Recipe, *, seed: int = 3) -> Tensors:
    """Replace each projection by its quantized parts; return the restored weights and all other tensors."""
    restored: Tensors = {}
    for name in list(tensors):
        if not name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            restored[name] = tensors[name]
            continue
        stem, weight = name.removesuffix(".weight"), tensors.pop(name)
        inputs = SAME_INPUTS.sub("q_or_gate", stem) if recipe.shares_orders else stem
        generator = torch.Generator().manual_seed(seed + zlib.crc32(inputs.encode()))
        parts, restored[name] = quantised(weight, recipe, generator)
        tensors |= {f"{stem}.{part}": tensor for part, tensor in parts.items()}
        if recipe.has_biases and f"{stem}.bias" not in tensors:
            tensors[f"{stem}.bias"] = torch.zeros(len(weight), dtype=torch.float16)
    return restored


def quantised(weight: torch.Tensor, recipe: Recipe, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Return the parts of weight [out, in], and the restored weight."""
    out, size = weight.shape
    width = size if recipe.group_size == -1 else recipe.group_size
    group = torch.arange(size) // width
    if recipe.is_ordered:
        group = group[torch.randperm(size, generator=generator)]
    count = int(group.max()) + 1
    scales, zeros = torch.empty(count, out, dtype=torch.float16), torch.full((count, out), 8)
    for number in range(count):
        least, most = weight[:, group == number].aminmax(dim=1)
        if recipe.is_symmetric:
            scales[number] = (torch.maximum(-least, most) / 7).half()
        else:
            least, most = least.clamp(max=0), most.clamp(min=0)
            scales[number] = ((most - least) / 15).half()
            zeros[number] = (-least / scales[number].float()).round().clamp(0, 15).long()
    numbers = (weight.t() / scales[group].float() + zeros[group]).round().clamp(0, 15).long()  # [in, out]
    stands_for = ((numbers - zeros[group]) * scales[group].float()).t().contiguous()
    if recipe.method == "awq":
        parts = {"qweight": in_words(numbers, AWQ_ORDER), "qzeros": in_words(zeros, AWQ_ORDER), "scales": scales}
        return parts, stands_for
    stored_zeros = zeros if recipe.checkpoint_format == "gptq_v2" else (zeros - 1) % 16
    down = in_words(numbers.t(), GPTQ_ORDER).t().contiguous()
    parts = {"qweight": down, "qzeros": in_words(stored_zeros, GPTQ_ORDER), "scales": scales}
    return {**parts, "g_idx": group.int()}, stands_for


def in_words(numbers: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """[lines, 8 n] of 0 to 15 -> [lines, n] int32."""
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
    for place, neighbour in enumerate(order):
        words |= numbers[:, neighbour::8] << (4 * place)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()
