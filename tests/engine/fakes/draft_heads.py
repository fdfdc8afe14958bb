"""Tiny random draft heads for tiny random models, and their reference drafts by transformers' layers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

Tensors = dict[str, torch.Tensor]
Drafts = Callable[[list[int], int], list[int]]
"""(all tokens so far, count) -> the drafts after them."""


def save_eagle(folder: Path, target: Path, *, num_layers: int = 2, has_bias: bool = True, **changes: Any) -> Path:
    """A head for the Llama checkpoint in `target`, stored as the released ones are: with a copy of the embeddings, and
    without a norm before its first layer.
    """
    values = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": num_layers} | changes
    hidden = values["hidden_size"]
    layers = LlamaForCausalLM(LlamaConfig(**values)).state_dict()
    kept = {
        name.removeprefix("model."): tensor
        for name, tensor in layers.items()
        if name.startswith("model.layers.") and name != "model.layers.0.input_layernorm.weight"
    }
    kept |= {"fc.weight": torch.empty(hidden, 2 * hidden), "embed_tokens.weight": layers["model.embed_tokens.weight"]}
    if has_bias:
        kept["fc.bias"] = torch.empty(hidden)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_random(kept), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def eagle_drafts(head: Path, target: Path) -> Drafts:
    """Return the head's drafts, recomputed from scratch for each draft."""
    model: Any = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    weights = load_file(head / "model.safetensors")
    config = LlamaConfig(**json.loads((head / "config.json").read_text()))
    layers: Any = LlamaForCausalLM(config).model
    own = {name: tensor for name, tensor in weights.items() if name.startswith("layers.")}
    lacking = layers.load_state_dict(own, strict=False).missing_keys
    assert "layers.0.input_layernorm.weight" in lacking
    layers.layers[0].input_layernorm = torch.nn.Identity()

    def block(x: torch.Tensor) -> torch.Tensor:
        return _through(layers.layers, layers.rotary_emb, x)

    def join(embedded: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(torch.cat([embedded, before], -1), weights["fc.weight"], weights["fc.bias"])

    return _drafts(model, join, block, model.lm_head)


def save_deepseek_with_mtp(folder: Path, config: dict[str, Any]) -> Path:
    """Save a checkpoint of `config` with an additional multi-token prediction layer."""
    model: Any = DeepseekV3ForCausalLM(
        DeepseekV3Config(**config | {"num_hidden_layers": config["num_hidden_layers"] + 1})
    )
    model.config.num_hidden_layers = config["num_hidden_layers"]
    model.config.num_nextn_predict_layers = 1
    hidden, prefix = config["hidden_size"], f"model.layers.{config['num_hidden_layers']}."
    embeddings = model.model.embed_tokens.weight
    tensors = model.state_dict() | {
        prefix + "enorm.weight": torch.empty(hidden),
        prefix + "hnorm.weight": torch.empty(hidden),
        prefix + "eh_proj.weight": torch.empty(hidden, 2 * hidden),
        prefix + "embed_tokens.weight": embeddings,
        prefix + "shared_head.norm.weight": torch.empty(hidden),
        prefix + "shared_head.head.weight": torch.empty(config["vocab_size"], hidden),
    }
    model.save_pretrained(folder, state_dict=_random(tensors))
    return folder


def mtp_drafts(folder: Path, config: dict[str, Any]) -> Drafts:
    """Return the drafts of that checkpoint's last layer, recomputed from scratch for each draft."""
    num_layers = config["num_hidden_layers"]
    model: Any = DeepseekV3ForCausalLM(DeepseekV3Config(**config | {"num_hidden_layers": num_layers + 1}))
    (file,) = folder.glob("*.safetensors")
    weights, prefix = load_file(file), f"model.layers.{num_layers}."
    model.load_state_dict(_as_computed(model, weights), strict=False)
    layer = model.model.layers[num_layers]
    model.model.layers = model.model.layers[:num_layers]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(
            x, x.shape[-1:], weights[f"{prefix}{name}.weight"], model.config.rms_norm_eps
        )

    def join(embedded: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        embedded = embedded.clone()
        embedded[0] = 0.0
        both = torch.cat([norm(embedded, "enorm"), norm(before, "hnorm")], -1)
        return both @ weights[prefix + "eh_proj.weight"].t()

    def block(x: torch.Tensor) -> torch.Tensor:
        return _through([layer], model.model.rotary_emb, x)

    def head(x: torch.Tensor) -> torch.Tensor:
        return norm(x, "shared_head.norm") @ weights[prefix + "shared_head.head.weight"].t()

    return _drafts(model, join, block, head)


def _drafts(model: Any, join: Any, block: Any, head: Any) -> Drafts:
    @torch.no_grad()
    def drafts(tokens: list[int], count: int) -> list[int]:
        hidden = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        found: list[int] = []
        for _ in range(count):
            embedded = model.model.embed_tokens(torch.tensor([*tokens, *found][1:]))
            newest = block(join(embedded, hidden))[-1:]
            hidden = torch.cat([hidden, newest])
            found.append(int(head(newest).argmax()))
        return found

    return drafts


def _through(layers: Any, rotary: Any, x: torch.Tensor) -> torch.Tensor:
    """Run x [tokens, hidden_size] through causal layers of transformers."""
    x, positions = x.unsqueeze(0), torch.arange(x.shape[0]).unsqueeze(0)
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
    for layer in layers:
        x = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary(x, positions))
    return x[0]


def _random(tensors: Tensors) -> Tensors:
    """The same random numbers under the same names."""
    filled = {}
    for name, tensor in tensors.items():
        generator = torch.Generator().manual_seed(sum(name.encode()) * 7919 + len(name))
        centre = 1.0 if "norm" in name and name.endswith(".weight") else 0.0
        spread = 0.25 if tensor.dim() > 1 else 0.1
        filled[name] = torch.randn(tensor.shape, generator=generator) * spread + centre
    return filled


def _as_computed(model: Any, weights: Tensors) -> Tensors:
    """Transformers computes experts from stacked tensors and stores them one by one."""
    found = dict(weights)
    for name, parameter in model.state_dict().items():
        if name in weights or ".experts." not in name:
            continue
        prefix = name[: name.index(".experts.")]
        parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        experts = [
            torch.cat([weights[f"{prefix}.experts.{n}.{part}.weight"] for part in parts])
            for n in range(parameter.shape[0])
        ]
        found[name] = torch.stack(experts)
    return found
