"""Model facts: the JSON object of docs/reference/contract.md section 6, from a configuration without weights.

The engine adds facts of a checkpoint (`trimtab-engine inspect`); the operator uses `facts_of_config` for `trimtab plan`
on a plain config.json.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.config_reader import MAX_LAYERS, ConfigReader
from trimtab_modelspec.errors import ModelError
from trimtab_modelspec.families.registry import BY_ARCHITECTURE, PLANNED_BY_ARCHITECTURE, language_model_config
from trimtab_modelspec.kv_groups import KVGroup, groups_of
from trimtab_modelspec.quantization import BLOCK, Quantization, StoredForm, stored_format
from trimtab_modelspec.scaled_format import Mxfp4, ScaledFormat
from trimtab_modelspec.tensors import (
    LINEAR_PARTS,
    PARTS,
    PROJECTION,
    Part,
    StoredTensor,
    Tensors,
    elements_by_part,
)

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_SIZE = 1 << 24  # of one dimension; products of several must stay countable bytes
MAX_MATRICES = 1_000_000  # layers x experts; each is listed by name. The largest published model has 60,000
StoredBytes = Callable[[str, StoredTensor], int | None]
"""Bytes of a named tensor with its scales; None if it is stored unquantized."""


def facts_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a model by its config.json only. Vision encoders are not counted.

    A quantization that the engine does not read gives `supported: false` with the reason in `refusal`, and the bytes of
    unquantized weights: an upper bound.

    Raises:
        ModelError: The architecture is unknown, or a value is missing or malformed.
    """
    where = "config.json"
    architecture = ConfigReader(config, {}, where).architecture
    if architecture is None:
        raise ModelError(f'{where}: names no architecture ("architectures"); give the config.json of a model')
    family = BY_ARCHITECTURE.get(architecture) or PLANNED_BY_ARCHITECTURE.get(architecture)
    if family is None:
        known = ", ".join((*BY_ARCHITECTURE, *PLANNED_BY_ARCHITECTURE))
        raise ModelError(f"{where}: architecture {architecture!r} is not known; known are {known}")
    words = language_model_config(config) if architecture in family.multimodal else config
    refusal = ""
    if architecture in PLANNED_BY_ARCHITECTURE:
        refusal = f"architecture {architecture} runs only on the CPU, through transformers"
    try:
        parsed = family.parse(ConfigReader(words, {}, where))
        form = stored_format(config, where)
        if isinstance(form, Quantization) and parsed.latent is None and BLOCK % parsed.head_size:
            raise ModelError(f"{where}: head_dim {parsed.head_size} does not divide an fp8 block of {BLOCK}")
    except ModelError as error:
        plain = {key: value for key, value in words.items() if key != "quantization_config"}
        if len(plain) == len(words) and "quantization_config" not in config:
            raise
        parsed, form, refusal = family.parse(ConfigReader(plain, {}, where)), None, str(error)
    _check_plausible(parsed, where)
    facts = model_facts(
        parsed,
        architecture=architecture,
        tensors=family.tensors(parsed),
        kv_groups=groups_of(family.kv(parsed)),
        form=form,
    )
    return {**facts, "supported": False, "refusal": refusal} if refusal else facts


def model_facts(
    config: ModelConfig,
    *,
    architecture: str,
    tensors: Tensors,
    kv_groups: Sequence[KVGroup],
    form: Quantization | StoredForm | None,
    stored_bytes: StoredBytes | None = None,
) -> dict[str, Any]:
    """Return the facts of a supported model.

    Args:
        config: The parsed configuration.
        architecture: Its name in config.json.
        tensors: Every tensor of a checkpoint.
        kv_groups: KV groups of the whole model.
        form: How the linear layers are stored; None if they are unquantized.
        stored_bytes: The bytes of a tensor as the checkpoint has it; None means by `form` only.
    """
    counts = elements_by_part(tensors)
    dtype_bytes = DTYPE_BYTES[config.dtype]
    by_part = _bytes_by_part(tensors, form, dtype_bytes, stored_bytes)
    at_dtype = {part: counts[part] * dtype_bytes for part in PARTS}
    return {
        "architecture": architecture,
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
        **_moe_facts(config),
        "latent_kv_size": 0 if config.latent is None else config.latent.kept_size,
        "kv_groups": [group.to_json() for group in kv_groups],
        "quantization": None if form is None else form.name,
        "weights_by_part": by_part,
        **({"weights_at_dtype": at_dtype} if isinstance(form, ScaledFormat | Mxfp4) else {}),
    }


def _check_plausible(config: ModelConfig, where: str) -> None:
    """Raise ModelError if listing the tensors would not end: config.json is untrusted and there are no weights."""
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_size", "vocab_size", "max_model_len"):
        if getattr(config, name) > MAX_SIZE:
            raise ModelError(f"{where}: {name} is {getattr(config, name)}; a whole number of 1 to {MAX_SIZE} is needed")
    num_experts = 1 if config.moe is None or config.moe.is_stacked else config.moe.num_experts
    if config.num_layers > MAX_LAYERS:
        raise ModelError(
            f"{where}: num_hidden_layers is {config.num_layers}; a whole number of 1 to {MAX_LAYERS} is needed"
        )
    if config.num_layers * num_experts > MAX_MATRICES:
        raise ModelError(
            f"{where}: {config.num_layers} layers of {num_experts} experts; at most {MAX_MATRICES} experts in all "
            f"layers are supported"
        )


def _bytes_by_part(
    tensors: Tensors,
    form: Quantization | StoredForm | None,
    dtype_bytes: int,
    stored_bytes: StoredBytes | None,
) -> dict[Part, int]:
    counts = elements_by_part(tensors)
    if form is None:
        return {part: counts[part] * dtype_bytes for part in PARTS}
    if isinstance(form, ScaledFormat | Mxfp4):
        by_part = dict.fromkeys(PARTS, 0)
        for name, tensor in tensors.items():
            stored = quantized_bytes(form, name, tensor) if stored_bytes is None else stored_bytes(name, tensor)
            by_part[tensor.part] += tensor.num_elements * dtype_bytes if stored is None else stored
        return by_part
    small = elements_by_part({name: tensor for name, tensor in tensors.items() if name.endswith(PROJECTION)})
    return {
        part: round(counts[part] * form.weight_bytes)
        if part in LINEAR_PARTS
        else round(small[part] * form.weight_bytes) + (counts[part] - small[part]) * dtype_bytes
        for part in PARTS
    }


def quantized_bytes(form: ScaledFormat | Mxfp4, name: str, tensor: StoredTensor) -> int | None:
    """Return the bytes of a weight with its scales by config.json; None if it is stored unquantized."""
    if isinstance(form, Mxfp4):
        is_small = len(tensor.shape) == 3
        return tensor.shape[0] * form.stored_bytes(tensor.shape[2], tensor.shape[1]) if is_small else None
    if not is_quantizable(name):
        return None
    scheme = form.scheme_of(name.removesuffix(".weight"))
    return None if scheme is None else scheme.stored_bytes(*tensor.shape)


def is_quantizable(name: str) -> bool:
    """Return True for weights of linear layers, the output layer included."""
    return name.endswith((*PROJECTION, "lm_head.weight"))


def _moe_facts(config: ModelConfig) -> dict[str, Any]:
    if config.moe is None:
        return {"num_experts": 0, "num_experts_per_token": 0, "moe_intermediate_size": 0, "dense_layers": []}
    return {
        "num_experts": config.moe.num_experts,
        "num_experts_per_token": config.moe.num_experts_per_token,
        "moe_intermediate_size": config.moe.intermediate_size,
        "dense_layers": sorted(config.moe.dense_layers),
    }
