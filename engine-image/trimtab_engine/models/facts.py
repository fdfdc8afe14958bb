"""Model facts from file headers only (docs/reference/contract.md section 6). Needs no torch and reads no weight, except
to compare a stored output layer with the embeddings to which config.json ties it.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.facts import DTYPE_BYTES, is_quantizable
from trimtab_modelspec.facts import model_facts as modelspec_facts
from trimtab_modelspec.quantization import stored_format
from trimtab_modelspec.tensors import StoredTensor, num_elements

from trimtab_engine.errors import ModelError
from trimtab_engine.models.checkpoint import check_counts, expected_tensors
from trimtab_engine.models.registry import (
    BY_ARCHITECTURE,
    architecture_of,
    kv_groups_of,
    open_model,
    parse_model_config,
    parse_vision_config,
    vision_encoder_of,
)
from trimtab_engine.weights.scaled import ScaledSource
from trimtab_engine.weights.source import WeightSource

MAX_REFUSAL = 500  # characters: the facts go through a container's termination message
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


def model_facts(model: str, *, load_format: str = "auto") -> dict[str, Any]:
    """Return the facts as a JSON object. An unsupported architecture has `supported: false`, the reason, and null for
    facts that its config.json does not have under the usual names.

    Raises:
        ModelError: the model cannot be read.
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
    if source.shapes():  # dummy weights follow the configuration
        check_counts(config, source)
    form = stored_format(source.config, source.where)
    facts = modelspec_facts(
        config,
        architecture=architecture_of(source.config, source.where),
        tensors=expected_tensors(config),
        kv_groups=kv_groups_of(config),
        form=form,
        stored_bytes=partial(_stored_bytes, source) if isinstance(source, ScaledSource) else None,
    )
    return {**facts, **_tower(source, config, DTYPE_BYTES[config.dtype]), **_computed_by(config)}


def _computed_by(config: ModelConfig) -> dict[str, Any]:
    """Return the external code that computes the model, if any, and the maximum number of tensor-parallel ranks."""
    if config.division is None:
        return {}
    return {"computed_by": "transformers", "tensor_parallel_sizes": list(config.division.degrees)}


def _stored_bytes(source: ScaledSource, name: str, tensor: StoredTensor) -> int | None:
    """Return the bytes of a weight with its scales by the checkpoint's own tensors."""
    if not is_quantizable(name):
        return None
    scheme = source.scheme_of(name)
    return None if scheme is None else scheme.stored_bytes(*tensor.shape)


def _tower(source: WeightSource, config: ModelConfig, dtype_bytes: int) -> dict[str, Any]:
    """Return the devices that compute images and videos."""
    try:
        kind, vision = vision_encoder_of(config), parse_vision_config(source, config)
    except ModelError:
        return {}  # loading reports the reason; the language model is served without it
    if kind is None or vision is None:
        return {}
    return {"tower_bytes": num_elements(kind.tensors(vision).values()) * dtype_bytes}


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
