"""Checkpoints in the formats of compressed-tensors, AutoFP8, ModelOpt, and gpt-oss's mxfp4, by their documentation, in
plain torch.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from four_bit_checkpoint import GPTQ_ORDER, in_words

Tensors = dict[str, torch.Tensor]
PROJECTION = re.compile(r"_proj(_with_mqa)?\.weight$")


@dataclass(frozen=True, slots=True)
class ScaledRecipe:
    """Formats of projections: `weights` as in config_groups."""

    storage: str
    weights: dict[str, Any]
    ignore: tuple[str, ...] = ("lm_head",)
    activations: dict[str, Any] | None = field(
        default_factory=lambda: {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    )
    has_input_scales: bool = False
    method: str = "compressed-tensors"
    dtype: torch.dtype = torch.bfloat16
    """Dtype of scales."""

    @property
    def config(self) -> dict[str, Any]:
        """`quantization_config`."""
        if self.method == "fp8":
            scheme = "static" if self.has_input_scales else "dynamic"
            return {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": list(self.ignore)}
        if self.method == "modelopt":
            return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": list(self.ignore)}
        group = {"targets": ["Linear"], "weights": self.weights, "input_activations": self.activations}
        return {
            "quant_method": "compressed-tensors",
            "format": self.storage,
            "config_groups": {"group_0": group | {"output_activations": None}},
            "ignore": list(self.ignore),
            "kv_cache_scheme": None,
            "quantization_status": "compressed",
        }


def store(tensors: Tensors, recipe: ScaledRecipe, *, seed: int = 3) -> Tensors:
    """Replace each projection that the recipe does not ignore by its parts; return the restored weights and all other
    tensors.
    """
    restored: Tensors = {}
    generator = torch.Generator().manual_seed(seed)
    for name in list(tensors):
        stem = name.removesuffix(".weight")
        if not PROJECTION.search(name) or any(_is_named(stem, entry) for entry in recipe.ignore):
            restored[name] = tensors[name]
            continue
        parts, restored[name] = stored(tensors.pop(name), recipe, generator)
        tensors |= {f"{stem}.{part}": tensor for part, tensor in parts.items()}
    return restored


def _is_named(stem: str, entry: str) -> bool:
    return re.match(entry[3:], stem) is not None if entry.startswith("re:") else entry == stem


def stored(weight: torch.Tensor, recipe: ScaledRecipe, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Return the parts of weight [out, in], and the restored weight."""
    how, (out, size) = recipe.weights, weight.shape
    bits, is_float = how["num_bits"], how["type"] == "float"
    most = 448.0 if is_float else float((1 << bits - 1) - 1)
    rows, columns = _places(how, out, size, generator)
    shape = (int(rows.max()) + 1, int(columns.max()) + 1)
    cells = (rows.unsqueeze(1) * shape[1] + columns).expand(out, size)
    largest = torch.zeros(shape[0] * shape[1]).scatter_reduce_(0, cells.flatten(), weight.abs().flatten(), "amax")
    scales = (largest / most).to(recipe.dtype)
    zeros = torch.zeros_like(scales, dtype=torch.int8)
    if not how["symmetric"]:
        zeros = torch.randint(-2, 3, zeros.shape, generator=generator).to(torch.int8)
        scales = (largest / (most - 2)).to(recipe.dtype)
    wide = weight / scales.float()[cells]
    if is_float:
        numbers = wide.clamp(-most, most).to(torch.float8_e4m3fn)
        restored = numbers.float() * scales.float()[cells]
    else:
        numbers = (wide + zeros[cells]).round().clamp(-most - 1, most).to(torch.int8)
        restored = (numbers.float() - zeros[cells]) * scales.float()[cells]
    scalar = how["strategy"] == "tensor" and recipe.method != "compressed-tensors"
    parts = {"weight_scale": scales[0] if scalar else scales if how["strategy"] == "tensor" else scales.view(shape)}
    if how.get("actorder") == "group":
        parts["weight_g_idx"] = columns.int()
    if recipe.has_input_scales:
        parts["input_scale"] = torch.tensor(0.5)
    if recipe.storage != "pack-quantized":
        kept = {} if how["symmetric"] else {"weight_zero_point": zeros.view(parts["weight_scale"].shape)}
        return {**parts, **kept, "weight": numbers}, restored
    parts |= {"weight_packed": packed(numbers, bits), "weight_shape": torch.tensor([out, size])}
    if not how["symmetric"]:
        parts["weight_zero_point"] = packed(zeros.view(shape).t(), bits).t().contiguous()
    return parts, restored


def _places(how: dict[str, Any], out: int, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale row and column of each row and column of the weight."""
    rows, columns, strategy = torch.arange(out), torch.arange(size), how["strategy"]
    if strategy == "tensor":
        return rows * 0, columns * 0
    if strategy == "channel":
        return rows, columns * 0
    if strategy == "block":
        return rows // how["block_structure"][0], columns // how["block_structure"][1]
    groups = columns // how["group_size"]
    if how.get("actorder") == "group":
        groups = groups[torch.randperm(size, generator=torch.Generator().manual_seed(size))]
    return rows, groups


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """[lines, n] int8 -> [lines, n / (32 / bits)] int32."""
    unsigned = numbers.long() + (1 << bits - 1)
    if bits == 4:
        return in_words(torch.nn.functional.pad(unsigned, (0, -unsigned.shape[1] % 8)), GPTQ_ORDER)
    return torch.nn.functional.pad(unsigned, (0, -unsigned.shape[1] % 4)).to(torch.uint8).view(torch.int32)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def store_in_mxfp4(tensors: Tensors) -> None:
    """Replace gpt-oss's experts [experts, in, out] by blocks and scales."""
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weight = tensors.pop(name).transpose(1, 2)
        groups = weight.reshape(*weight.shape[:2], -1, 32)
        powers = (groups.abs().amax(dim=-1) / 6).clamp(min=2.0**-20).log2().ceil()
        numbers = (groups / powers.exp2().unsqueeze(-1)).unsqueeze(-1).sub(E2M1).abs().argmin(dim=-1).to(torch.uint8)
        tensors[f"{name}_blocks"] = numbers[..., 0::2] | numbers[..., 1::2] << 4
        tensors[f"{name}_scales"] = (powers + 127).to(torch.uint8)
