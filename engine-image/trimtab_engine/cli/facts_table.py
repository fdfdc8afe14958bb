"""Model facts as a readable table. `inspect -o json` prints all numbers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab_engine.weights.gguf_parts import parts_of

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
COUNTS = (("billion", 10**9), ("million", 10**6), ("thousand", 10**3))


def facts_table(facts: Mapping[str, Any], dtype_bytes: int, disk_bytes: int, stored_types: Sequence[str] = ()) -> str:
    """Return lines of "name value". Facts that are None (unsupported architectures) have no line.

    `stored_types` lists the tensor types of a GGUF file, which differ from the run-time dtype.
    """
    rows = {
        "model": facts["model"],
        "architecture": _architecture(facts),
        "parameters": _format_known(facts["num_parameters"], _count),
        "weights": f"{_weights(facts)}; {size(disk_bytes)} on disk ({', '.join((facts['format'], *stored_types))})",
        "layers": _format_known(facts["num_layers"], lambda count: f"{count}{_of_width(facts['hidden_size'])}"),
        "attention": _format_known(facts["num_attention_heads"], lambda _: _attention(facts)),
        "MLP": _format_known(facts["intermediate_size"], lambda width: f"{width} wide"),
        "experts": _experts(facts) if facts["num_experts"] else None,
        "vocabulary": _format_known(facts["vocab_size"], _tokens),
        "longest request": _format_known(facts["max_model_len"], _tokens),
        "images": f"{size(facts['tower_bytes'])} more for the vision encoder" if facts.get("tower_bytes") else None,
        "KV cache": _kv_cache(facts, dtype_bytes),
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {words}" for name, words in rows.items() if words is not None)


def size(num_bytes: int) -> str:
    """Return bytes in a human-readable unit."""
    for name, unit in UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


def bytes_on_disk(model: Path) -> int:
    """Return the total size of the weight files in bytes."""
    parts = [model.with_name(name) for name in parts_of(model.name)]
    files = parts if model.is_file() else [*model.glob("*.safetensors"), *model.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def _format_known(value: Any, words: Callable[[Any], str]) -> str | None:
    return None if value is None else words(value)


def _tokens(count: Any) -> str:
    return f"{count:,} tokens" if isinstance(count, int) else f"{count}"  # the value of config.json, of any type


def _count(number: int) -> str:
    for name, unit in COUNTS:
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return str(number)


def _architecture(facts: Mapping[str, Any]) -> str:
    if not facts["supported"]:
        return f"{facts['architecture']}, not supported by this engine"
    by = ", executed by transformers' code" if facts.get("computed_by") == "transformers" else ""
    return f"{facts['architecture']}{by}"


def _weights(facts: Mapping[str, Any]) -> str:
    stored_as = facts["quantization"] or facts["dtype"]
    return "of unknown size" if facts["weights_bytes"] is None else f"{size(facts['weights_bytes'])} as {stored_as}"


def _attention(facts: Mapping[str, Any]) -> str:
    heads = f"{facts['num_attention_heads']} heads"
    if facts["latent_kv_size"]:
        return f"{heads}, one latent vector of {facts['latent_kv_size']} per token and layer"
    of_size = "" if facts["head_size"] is None else f" of {facts['head_size']}"
    return f"{heads}{of_size}, {facts['num_kv_heads']} KV heads"


def _of_width(width: Any) -> str:
    return "" if width is None else f" of width {width}"


def _experts(facts: Mapping[str, Any]) -> str:
    dense = f"; layers {facts['dense_layers']} have none" if facts["dense_layers"] else ""
    per_token, width = facts["num_experts_per_token"], facts["moe_intermediate_size"]
    return f"{facts['num_experts']} per layer, {per_token} for each token, {width} wide{dense}"


def _kv_cache(facts: Mapping[str, Any], dtype_bytes: int) -> str | None:
    groups, longest = facts["kv_groups"], facts["max_model_len"]
    if not groups or longest is None:
        return None
    per_token = 0
    for group in groups:
        num_layers = sum(last - first for first, last in group["layers"])
        elements = group["num_kv_heads"] * (group["key_size"] + group["value_size"])
        per_token += num_layers * elements * dtype_bytes
    windows = "" if all(group["window"] is None for group in groups) else "up to "
    return f"{size(per_token)} per token, {windows}{size(per_token * longest)} for the longest request"
