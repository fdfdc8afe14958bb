"""Random low-rank adapters as PEFT saves them, and the weights that a model has with one of them merged in."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "somebody/somewhere",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_dropout": 0.05,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_dora": False,
    "use_rslora": False,
}
"""PEFT's configuration besides rank, scale and names."""


def modules_of(shapes: Mapping[str, tuple[int, ...]], targets: Iterable[str]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the model's modules with these names, but for experts."""
    ends = tuple(f".{target}.weight" for target in targets)
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if name.endswith(ends) and ".experts." not in name
    }


def an_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, int]],
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    size: float = 0.3,
    ranks: Mapping[str, int] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    **changes: Any,
) -> str:
    """Write random factors of these modules. `ranks`: ranks that differ per module; `tensors`: extra tensors;
    `changes`: of the configuration.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    stored = dict(tensors or {})
    for name, (outputs, inputs) in modules.items():
        own = (ranks or {}).get(name, rank)
        stored[f"base_model.model.{name}.lora_A.weight"] = torch.randn(own, inputs, generator=generator) * size
        stored[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, own, generator=generator) * size
    save_file(stored, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in modules})
    config = CONFIG | {"r": rank, "lora_alpha": alpha, "target_modules": targets, "rank_pattern": dict(ranks or {})}
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return str(folder)


def merged(model: str | Path, adapter: str, folder: Path) -> str:
    """A copy of a checkpoint with W + scale * B A in place of each W that the adapter has factors of, as PEFT does."""
    folder.mkdir(parents=True)
    config = json.loads((Path(adapter) / "adapter_config.json").read_text())
    factors = load_file(Path(adapter) / "adapter_model.safetensors")
    tensors = load_file(Path(model) / "model.safetensors")
    for name in [name for name in factors if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        down, up = factors[name].double(), factors[name.replace("lora_A", "lora_B")].double()
        alpha = config["alpha_pattern"].get(module, config["lora_alpha"])
        scale = alpha / (math.sqrt(len(down)) if config["use_rslora"] else len(down))
        weight = f"{module}.weight"
        tensors[weight] = (tensors[weight].double() + scale * up @ down).to(tensors[weight].dtype)
    save_file(tensors, folder / "model.safetensors")
    for file in Path(model).iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)
