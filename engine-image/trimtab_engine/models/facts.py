"""Model facts from headers alone (docs/reference/contract.md section 6). Needs no torch and reads no weight."""

import math
from collections.abc import Mapping
from typing import Any

from trimtab_engine.config.model import ModelConfig
from trimtab_engine.config.quantization import Quantization, StoredForm, stored_form
from trimtab_engine.errors import ModelError
from trimtab_engine.memory.kv_groups import KVGroup
from trimtab_engine.models.checkpoint import check_counts, expected_tensors
from trimtab_engine.models.registry import (
    BY_ARCHITECTURE,
    architecture_of,
    kv_groups_of,
    open_model,
    parse_model_config,
    parse_vision_config,
    tower_of,
)
from trimtab_engine.models.tensors import (
    LINEAR_PARTS,
    PARTS,
    PROJECTION,
    Part,
    StoredTensor,
    Tensors,
    elements_by_part,
    num_elements,
)
from trimtab_engine.weights.scaled import ScaledSource
from trimtab_engine.weights.scaled_form import Mxfp4, ScaledForm
from trimtab_engine.weights.source import WeightSource

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_REFUSAL = 500  # characters: the facts go through a container's termination message
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


def model_facts(model: str, *, load_format: str = "auto") -> dict[str, Any]:
    """The facts as a JSON object. An architecture that is not built has `supported: false`, why it is not, and null for
    what its config.json does not say in the usual words. Raises ModelError when the model cannot be read.
    """
    source = open_model(model, load_format)
    try:
        config = parse_model_config(source.config, source.generation_config, source.where)
    except ModelError as refusal:
        if architecture_of(source.config, source.where) in BY_ARCHITECTURE:
            raise
        facts = _unsupported(source, str(refusal))
    else:
        facts = _supported(source, config)
    return {"model": model, **facts, "format": source.format}


def _supported(source: WeightSource, config: ModelConfig) -> dict[str, Any]:
    if source.shapes():  # dummy weights are what is asked for
        check_counts(config, source)
    tensors = expected_tensors(config)
    counts = elements_by_part(tensors)
    quantization = stored_form(source.config, source.where)
    dtype_bytes = DTYPE_BYTES[config.dtype]
    at_dtype = {part: counts[part] * dtype_bytes for part in PARTS}
    by_part = _stored_by_part(source, tensors, quantization, dtype_bytes)
    return {
        "architecture": architecture_of(source.config, source.where),
        "supported": True,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_size": config.head_size,
        "vocab_size": config.vocab_size,
        "max_model_len": config.max_model_len,
        "num_parameters": sum(counts.values()),
        "weights_bytes": sum(by_part.values()),
        "dtype": config.dtype,
        "tie_word_embeddings": config.tie_word_embeddings,
        **_mixture(config),
        "latent_kv_size": 0 if config.latent is None else config.latent.kept_size,
        "kv_groups": [_kv_group(group) for group in kv_groups_of(config)],
        "quantization": None if quantization is None else quantization.name,
        "weights_by_part": by_part,
        **({"weights_at_dtype": at_dtype} if isinstance(quantization, ScaledForm | Mxfp4) else {}),
        **_tower(source, config, dtype_bytes),
        **_computed_by(config),
    }


def _computed_by(config: ModelConfig) -> dict[str, Any]:
    """Whose code computes it, where that is not ours, and over how many tensor-parallel ranks it can be divided."""
    if config.division is None:
        return {}
    return {"computed_by": "transformers", "tensor_parallel_sizes": list(config.division.degrees)}


def _stored_by_part(
    source: WeightSource, tensors: Tensors, form: Quantization | StoredForm | None, dtype_bytes: int
) -> dict[Part, int]:
    """Bytes of each part, as it is stored."""
    counts = elements_by_part(tensors)
    if form is None:
        return {part: counts[part] * dtype_bytes for part in PARTS}
    if isinstance(form, ScaledForm | Mxfp4):
        by_part = dict.fromkeys(PARTS, 0)
        for name, tensor in tensors.items():
            stored = _stored_bytes(source, form, name, tensor)
            by_part[tensor.part] += tensor.num_elements * dtype_bytes if stored is None else stored
        return by_part
    small = elements_by_part({name: tensor for name, tensor in tensors.items() if name.endswith(PROJECTION)})
    return {
        part: round(counts[part] * form.weight_bytes)
        if part in LINEAR_PARTS
        else round(small[part] * form.weight_bytes) + (counts[part] - small[part]) * dtype_bytes
        for part in PARTS
    }


def _stored_bytes(source: WeightSource, form: ScaledForm | Mxfp4, name: str, tensor: StoredTensor) -> int | None:
    """What a weight takes with its scales; None: it is stored as it is. By what the checkpoint has, where there is
    one, else by config.json."""
    if isinstance(form, Mxfp4):
        is_small = len(tensor.shape) == 3
        return tensor.shape[0] * form.stored_bytes(tensor.shape[2], tensor.shape[1]) if is_small else None
    if not name.endswith(PROJECTION) and not name.endswith("lm_head.weight"):
        return None
    module = name.removesuffix(".weight")
    scheme = source.scheme_of(name) if isinstance(source, ScaledSource) else form.scheme_of(module)
    return None if scheme is None else scheme.stored_bytes(*tensor.shape)


def _tower(source: WeightSource, config: ModelConfig, dtype_bytes: int) -> dict[str, Any]:
    """What images and videos are computed with, where they are."""
    try:
        kind, vision = tower_of(config), parse_vision_config(source, config)
    except ModelError:
        return {}  # the engine says why when it is to load it; its text half is served without
    if kind is None or vision is None:
        return {}
    return {"tower_bytes": num_elements(kind.tensors(vision).values()) * dtype_bytes}


def _mixture(config: ModelConfig) -> dict[str, Any]:
    if config.moe is None:
        return {"num_experts": 0, "num_experts_per_token": 0, "moe_intermediate_size": 0, "dense_layers": []}
    return {
        "num_experts": config.moe.num_experts,
        "num_experts_per_token": config.moe.num_experts_per_token,
        "moe_intermediate_size": config.moe.intermediate_size,
        "dense_layers": sorted(config.moe.dense_layers),
    }


def _kv_group(group: KVGroup) -> dict[str, Any]:
    each = group.each
    return {
        "layers": [list(span) for span in group.layers],
        "num_kv_heads": each.num_kv_heads,
        "key_size": each.key_size,
        "value_size": each.value_size,
        "window": each.window,
    }


def _unsupported(source: WeightSource, why: str) -> dict[str, Any]:
    config = source.config
    text = config.get("text_config")
    words: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
    num_parameters = sum(math.prod(shape) for shape in source.shapes().values())
    dtype = str(words.get("dtype") or words.get("torch_dtype") or "float32").removeprefix("torch.")
    heads, hidden = words.get("num_attention_heads"), words.get("hidden_size")
    head_size = words.get("head_dim")
    if head_size is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        head_size = hidden // heads
    return {
        "architecture": architecture_of(config, source.where),
        "supported": False,
        "refusal": why[:MAX_REFUSAL],
        "num_layers": words.get("num_hidden_layers"),
        "hidden_size": hidden,
        "intermediate_size": words.get("intermediate_size"),
        "num_attention_heads": heads,
        "num_kv_heads": words.get("num_key_value_heads", heads),
        "head_size": head_size,
        "vocab_size": words.get("vocab_size"),
        "max_model_len": words.get("max_position_embeddings"),
        "num_parameters": num_parameters,
        "weights_bytes": num_parameters * DTYPE_BYTES.get(dtype, 4),
        "dtype": dtype,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "num_experts": next((words[key] for key in EXPERT_KEYS if words.get(key)), 0),
        "num_experts_per_token": words.get("num_experts_per_tok"),
        "moe_intermediate_size": words.get("moe_intermediate_size"),
        "dense_layers": None,
        "latent_kv_size": None,
        "kv_groups": None,
        "quantization": None,
        "weights_by_part": None,
    }
