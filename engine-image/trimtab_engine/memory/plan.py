"""POST /admin/v1/memory/plan: the memory of another configuration, before a restart. Pure.

It starts from this engine's measurements and applies the requested changes. Each kind of memory reports the source of
its number: `measured` here; `scaled` from a measurement; `computed` by formula; `unmeasured`, if this layout has none
of it and the planned one will.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal

from trimtab_modelspec.kv_groups import KVGroup
from trimtab_modelspec.memory_formula import MemoryFormula
from trimtab_modelspec.partition import layers_of_stages

from trimtab_engine.config.engine import BLOCK_SIZES, MAX_BATCHED_TOKENS
from trimtab_engine.config.live.reading import (
    Bound,
    Bounds,
    FieldError,
    InvalidValue,
    Json,
    Kind,
    Number,
    Value,
    clamp,
    in_words,
    read,
)
from trimtab_engine.errors import ConfigError
from trimtab_engine.memory.formula import check_one_request_fits

KV_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
MAX_RANKS = 1024  # per degree: beyond any group that is built
MAX_DEVICE_BYTES = 1 << 50
LOGITS_COPIES = 3  # of [max_num_seqs, vocabulary] float32 while sampling: logits, their sorted copy, probabilities
MIN_UTILIZATION = 0.0001  # the step of min_utilization


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBase:
    """Configuration and measurements of this engine. Heads and layers are the whole model's."""

    formula: MemoryFormula
    """Per rank, in the present layout."""
    max_num_seqs: int
    """With max_num_batched_tokens: the caps at which the activations were measured."""
    max_num_batched_tokens: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    kv_groups: tuple[KVGroup, ...]
    vocab_size: int
    model_max_len: int
    """Maximum length of the model's positions."""
    dtype: str
    """The model's: what kv_cache_dtype auto means."""
    kv_cache_dtype: str
    swap_space_bytes: int = 0
    swap_is_on_device: bool = False
    """On the CPU host memory is the device's: swap space is part of its workspace."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class _Field:
    """A plannable field. `low` and `high` are bounds, or `choices` the values."""

    kind: Kind
    low: Number = 0
    high: Callable[[PlanBase], Number] = lambda _: 0
    choices: Callable[[PlanBase], tuple[str, ...]] = lambda _: ()


FIELDS: Mapping[str, _Field] = {
    "gpu_memory_utilization": _Field("number", MIN_UTILIZATION, lambda _: 1),
    "device_memory_bytes": _Field("bytes", 1, lambda _: MAX_DEVICE_BYTES),
    "max_model_len": _Field("integer", 1, lambda base: base.model_max_len),
    "block_size": _Field("integer", min(BLOCK_SIZES), lambda _: max(BLOCK_SIZES)),
    "kv_cache_dtype": _Field("choice", choices=lambda _: ("auto", *KV_DTYPE_BYTES)),
    "max_num_seqs": _Field("integer", 1, lambda _: MAX_BATCHED_TOKENS),
    "max_num_batched_tokens": _Field("integer", 1, lambda _: MAX_BATCHED_TOKENS),
    "tensor_parallel_size": _Field("integer", 1, lambda _: MAX_RANKS),
    "pipeline_parallel_size": _Field("integer", 1, lambda base: base.num_layers),
    "swap_space_bytes": _Field("bytes", 0, lambda _: MAX_DEVICE_BYTES),
}


def plan_memory(base: PlanBase, asked: object) -> tuple[int, Json]:
    """Return HTTP status and body. `asked` is a flat object of FIELDS; missing fields keep their current value."""
    if not isinstance(asked, dict) or any(isinstance(value, dict | list) for value in asked.values()):
        return 400, {"message": 'the body must be a flat JSON object, such as {"gpu_memory_utilization": 0.95}'}
    values = _present(base)
    for name, value in asked.items():
        wanted = _read(base, str(name), value)
        if isinstance(wanted, FieldError):
            return 422, wanted.to_json()
        values[str(name)] = wanted
    refusal = _contradiction(base, values)
    return (422, refusal.to_json()) if refusal else (200, _answer(base, values))


def _present(base: PlanBase) -> dict[str, Value]:
    formula = base.formula
    return {
        "gpu_memory_utilization": float(formula.gpu_memory_utilization),
        "device_memory_bytes": formula.device_bytes,
        "max_model_len": formula.max_model_len,
        "block_size": formula.block_size,
        "kv_cache_dtype": base.kv_cache_dtype,
        "max_num_seqs": base.max_num_seqs,
        "max_num_batched_tokens": base.max_num_batched_tokens,
        "tensor_parallel_size": base.tensor_parallel_size,
        "pipeline_parallel_size": base.pipeline_parallel_size,
        "swap_space_bytes": base.swap_space_bytes,
    }


def _read(base: PlanBase, name: str, value: object) -> Value | FieldError:
    field = FIELDS.get(name)
    if field is None:
        shown = name[:100]
        return FieldError(shown, value, f"{shown} cannot be planned; plannable fields: {', '.join(FIELDS)}")
    if name == "max_model_len" and value == "auto":
        return "auto"
    if field.kind == "choice":
        wanted = read(field.kind, name, value, choices=field.choices(base))
        return (
            FieldError(name, value, wanted.message, nearest=wanted.nearest)
            if isinstance(wanted, InvalidValue)
            else wanted
        )
    low, high = field.low, field.high(base)
    bounds: Bounds = (Bound(low, ""), Bound(high, ""))
    wanted = read(field.kind, name, value, bounds=bounds)
    if isinstance(wanted, InvalidValue):
        return FieldError(name, value, wanted.message, low, high, wanted.nearest)
    assert not isinstance(wanted, str)
    if not low <= wanted <= high:
        message = f"{name} is {in_words(wanted)}; it must be between {low} and {high}"
        return FieldError(name, value, message, low, high, clamp(wanted, low, high))
    return wanted


def _contradiction(base: PlanBase, values: Mapping[str, Value]) -> FieldError | None:
    """Return an error for values that could not start with any memory. None if there is none."""
    block_size, seqs, tokens = (_int(values, name) for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"))
    if block_size not in BLOCK_SIZES:
        nearest = min(BLOCK_SIZES, key=lambda size: abs(size - block_size))
        sizes = ", ".join(map(str, BLOCK_SIZES))
        message = f"block_size is {block_size}; it must be one of {sizes}"
        return FieldError("block_size", block_size, message, min(BLOCK_SIZES), max(BLOCK_SIZES), nearest)
    if tokens < seqs:
        message = f"max_num_batched_tokens is {tokens}: it must be at least max_num_seqs, {seqs}; lower that as well"
        return FieldError("max_num_batched_tokens", tokens, message, seqs, MAX_BATCHED_TOKENS, seqs)
    ranks, heads, kv_heads = _int(values, "tensor_parallel_size"), base.num_attention_heads, base.num_kv_heads
    allowed = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if ranks not in allowed:
        nearest = min(allowed, key=lambda n: abs(n - ranks))
        message = (
            f"tensor_parallel_size is {ranks}: it must divide the model's {heads} attention heads, and divide its "
            f"{kv_heads} key and value heads or be a multiple of them"
        )
        return FieldError("tensor_parallel_size", ranks, message, 1, max(allowed), nearest)
    return None


def _answer(base: PlanBase, values: Mapping[str, Value]) -> Json:
    formula, sources = _planned(base, values)
    if values["max_model_len"] == "auto":
        formula = replace(formula, max_model_len=max(1, formula.longest_model_len(formula.num_blocks)))
    try:
        swap_space_bytes = _int(values, "swap_space_bytes") if base.swap_is_on_device else 0
        check_one_request_fits(formula, {"swap_space_bytes": swap_space_bytes})
        message = f"{formula.num_tokens} tokens of KV cache: {formula.max_concurrency:.2f} requests of max_model_len"
    except ConfigError as error:
        message = str(error)
    kinds = {
        "other": formula.other_bytes,
        "weights": formula.weights_bytes,
        "kv_mapped": formula.num_blocks * formula.bytes_per_block,
        "activations_peak": formula.activations_peak_bytes,
        "workspace": formula.workspace_bytes,
        "graphs": formula.graphs_bytes,
        "communicator": formula.communicator_bytes,
    }
    least = formula.min_utilization
    return {
        "num_blocks": formula.num_blocks,
        "num_tokens": formula.num_tokens,
        "max_concurrency": formula.max_concurrency,
        "min_utilization": None if least is None else float(least),
        "fits": formula.num_blocks >= formula.blocks_per_request,
        "message": message,
        "bytes_per_block": formula.bytes_per_block,
        "requested_bytes": formula.requested_bytes,
        "kinds": {**kinds, "free": max(0, formula.device_bytes - sum(kinds.values()))},
        "sources": sources,
        "planned": {**values, "max_model_len": formula.max_model_len},
    }


def _planned(base: PlanBase, values: Mapping[str, Value]) -> tuple[MemoryFormula, dict[str, str]]:
    """Return the formula under these values and the source of each kind of memory. In the current layout every rank is
    planned; in another one, the rank with the most memory.
    """
    ranks = (replace(base.formula, other_ranks=()), *base.formula.other_ranks)
    layout = _int(values, "tensor_parallel_size"), _int(values, "pipeline_parallel_size")
    if layout == (base.tensor_parallel_size, base.pipeline_parallel_size):
        own, *others = (_with_values(base, rank, values) for rank in ranks)
        return replace(own, other_ranks=tuple(others)), _sources(base, values)
    fullest = max(ranks, key=lambda rank: rank.weights_bytes / _num_layers(rank))
    tensor, pipeline = layout
    layers = -(-base.num_layers // pipeline)
    weights = math.ceil(fullest.weights_bytes * base.tensor_parallel_size * layers / (tensor * _num_layers(fullest)))
    stages = layers_of_stages(base.num_layers, pipeline, None)
    held = [tuple(group.on_rank(stage, tensor) for group in base.kv_groups) for stage in stages]
    widest = max((replace(fullest, kv_groups=groups) for groups in held), key=lambda rank: rank.bytes_per_block)
    rank = replace(widest, weights_bytes=weights)
    return _with_values(base, rank, values), _sources(base, values) | {
        "weights": "scaled",
        "communicator": "unmeasured",
    }


def _num_layers(rank: MemoryFormula) -> int:
    return sum(group.num_layers for group in rank.kv_groups)


def _with_values(base: PlanBase, rank: MemoryFormula, values: Mapping[str, Value]) -> MemoryFormula:
    """Return one rank's formula under all requested values except the layout."""
    workspace = _int(values, "swap_space_bytes") - base.swap_space_bytes if base.swap_is_on_device else 0
    length, kv_dtype = values["max_model_len"], str(values["kv_cache_dtype"])
    return replace(
        rank,
        device_bytes=_int(values, "device_memory_bytes"),
        gpu_memory_utilization=format(Decimal(repr(values["gpu_memory_utilization"])), "f"),
        activations_peak_bytes=_activations(base, rank, values),
        workspace_bytes=rank.workspace_bytes + workspace,
        kv_dtype_bytes=KV_DTYPE_BYTES[base.dtype if kv_dtype == "auto" else kv_dtype],
        block_size=_int(values, "block_size"),
        max_num_batched_tokens=_int(values, "max_num_batched_tokens"),
        max_model_len=base.model_max_len if length == "auto" else _int(values, "max_model_len"),
    )


def _sources(base: PlanBase, values: Mapping[str, Value]) -> dict[str, str]:
    sources = dict.fromkeys(("other", "weights", "activations_peak", "workspace", "graphs", "communicator"), "measured")
    if _activations(base, base.formula, values) != base.formula.activations_peak_bytes:
        sources["activations_peak"] = "scaled"
    if base.swap_is_on_device:
        sources["workspace"] = "computed"
    return sources | {"kv_mapped": "computed"}


def _activations(base: PlanBase, rank: MemoryFormula, values: Mapping[str, Value]) -> int:
    """Return the peak at another token budget: in proportion, but never below what sampling max_num_seqs
    tokens takes.
    """
    num_tokens, num_seqs = _int(values, "max_num_batched_tokens"), _int(values, "max_num_seqs")
    if (num_tokens, num_seqs) == (base.max_num_batched_tokens, base.max_num_seqs):
        return rank.activations_peak_bytes
    in_proportion = -(-rank.activations_peak_bytes * num_tokens // base.max_num_batched_tokens)
    return max(in_proportion, num_seqs * base.vocab_size * 4 * LOGITS_COPIES)


def _int(values: Mapping[str, Value], name: str) -> int:
    value = values[name]
    assert isinstance(value, int)  # the fields' kinds see to it
    return value
