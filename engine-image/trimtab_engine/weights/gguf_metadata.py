"""Conversion of GGUF metadata to config.json's fields. Reads dictionaries only; opens neither files nor tensors.

Keys are llama.cpp's (gguf-py's constants), after the architecture's name. Metadata with which llama.cpp would compute
other results is rejected.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_engine.errors import ModelError

UNSCALED = ("none", "", "linear")
"""Types of rope scaling that can be combined with a divisor per frequency."""
UNBUILT_FACTORS = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
"""Factor of rotated heads in addition to yarn's; 1 in all published models of these families."""
POOLING_TYPES: dict[int, str | None] = {0: None, 1: "MEAN", 2: "CLS", 3: "LAST", 4: "RANK"}
"""llama.cpp's numbers for how hidden states are pooled; 0: not at all."""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of tokens that end an answer: end of text, of turn, of message."""


@dataclass(frozen=True, slots=True)
class Need:
    """A type of values: its description and its check."""

    words: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and value == int(value)


TEXT = Need("text", lambda value: isinstance(value, str))
NUMBER = Need("a number", _is_number)
NOT_NEGATIVE = Need("a number of 0 or more", lambda value: _is_number(value) and value >= 0)
ABOVE_ZERO = Need("a number above 0", lambda value: _is_number(value) and value > 0)
COUNT = Need("a whole number of 0 or more", lambda value: _is_whole(value) and value >= 0)
POSITIVE = Need("a whole number of 1 or more", lambda value: _is_whole(value) and value >= 1)


def checked(value: Any, name: str, need: Need, where: str) -> Any:
    """Return a value of the file, or None if it is absent.

    Raises:
        ModelError: the value has the wrong type.
    """
    if value is None or need.holds(value):
        return value
    raise ModelError(f"{where}: {name} is {value!r:.60}; {need.words} is needed")


@dataclass(frozen=True, slots=True)
class Metadata:
    """A file's metadata. Every method raises ModelError for missing or malformed values."""

    fields: Mapping[str, Any]
    architecture: str
    where: str

    def find(self, key: str, need: Need) -> Any:
        """Return one value, or None if absent. A list is accepted if all layers have the same value."""
        name = f"{self.architecture}.{key}"
        value = self.fields.get(name)
        if isinstance(value, list) and value:
            if any(one != value[0] for one in value):
                raise ModelError(f"{self.where}: {name} differs from layer to layer ({str(value)[:60]}), not supported")
            value = value[0]
        return checked(value, name, need, self.where)

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more."""
        return int(self.number(key, default, POSITIVE))

    def number(self, key: str, default: float | None = None, need: Need = NUMBER) -> float:
        """Any number, or one of a narrower need."""
        value = self.find(key, need)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.where}: has no metadata {self.architecture}.{key}")
        number: float = value
        return number


def decoder_words(metadata: Metadata, divisors: Sequence[float]) -> dict[str, Any]:
    """Return the fields that all decoders share. `divisors`: one per rope frequency; empty if the file has none."""
    heads, hidden = metadata.positive("attention.head_count"), metadata.positive("embedding_length")
    rotated = metadata.find("rope.dimension_count", POSITIVE)
    head_size = metadata.positive("attention.key_length", rotated or hidden // heads)
    return {
        "hidden_size": hidden,
        "intermediate_size": metadata.positive("feed_forward_length"),
        "num_hidden_layers": metadata.positive("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.positive("attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": metadata.positive("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", need=NOT_NEGATIVE),
        "rope_theta": metadata.number("rope.freq_base", 10_000.0, ABOVE_ZERO),
        "rope_scaling": _rope_scaling(metadata, divisors, head_size),
        "partial_rotary_factor": (rotated or head_size) / head_size,
        "dtype": "float32",
    }


def pooling_type(metadata: Metadata) -> str | None:
    """Return the pooling method of an embedding model, by vLLM's name where there is one, or None if the file has
    none.
    """
    number = int(metadata.number("pooling_type", 0, COUNT))
    if number not in POOLING_TYPES:
        known = ", ".join(map(str, POOLING_TYPES))
        raise ModelError(f"{metadata.where}: {metadata.architecture}.pooling_type is {number}; it is one of {known}")
    return POOLING_TYPES[number]


def _rope_scaling(metadata: Metadata, divisors: Sequence[float], head_size: int) -> dict[str, Any]:
    kind = str(metadata.find("rope.scaling.type", TEXT) or "none")
    linear = metadata.number("rope.scale_linear", 1.0, ABOVE_ZERO)  # files from 2023 have no type
    if kind == "none" and linear != 1.0:
        kind = "linear"
    for key in UNBUILT_FACTORS:
        said = metadata.number(key, 1.0)
        if kind not in UNSCALED and said != 1.0:
            raise ModelError(f"{metadata.where}: {metadata.architecture}.{key} ({said}) is not supported")
    words: dict[str, Any] = {"rope_type": "default"}
    if kind not in ("none", ""):
        words = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor", linear, ABOVE_ZERO)}
    if kind == "yarn":
        words |= _yarn(metadata)
    if divisors:
        _check_divisors(metadata, divisors, head_size, kind)
        words["frequency_divisors"] = list(divisors)
    return words


def _yarn(metadata: Metadata) -> dict[str, Any]:
    keys = {
        "original_max_position_embeddings": ("original_context_length", POSITIVE),
        "beta_fast": ("yarn_beta_fast", ABOVE_ZERO),
        "beta_slow": ("yarn_beta_slow", ABOVE_ZERO),
    }
    said = {ours: metadata.find(f"rope.scaling.{theirs}", need) for ours, (theirs, need) in keys.items()}
    return {ours: value for ours, value in said.items() if value is not None}


def _check_divisors(metadata: Metadata, divisors: Sequence[float], head_size: int, kind: str) -> None:
    """Raise ModelError unless there is one divisor per frequency and the scaling type allows divisors."""
    if len(divisors) != head_size // 2 or not all(0 < divisor < float("inf") for divisor in divisors):
        raise ModelError(
            f"{metadata.where}: rope_freqs.weight has {len(divisors)} numbers, first {divisors[0]}; {head_size // 2} "
            f"above 0 are needed"
        )
    if kind not in UNSCALED:
        raise ModelError(f"{metadata.where}: rope_freqs.weight with rope scaling {kind} is not supported")


def end_tokens(fields: Mapping[str, Any], where: str) -> list[int]:
    """Return all tokens that end an answer, from the tokenizer's metadata; end of text comes first.

    Raises:
        ModelError: an id is invalid.
    """
    names = [f"tokenizer.ggml.{key}" for key in ENDS]
    ids = [checked(fields.get(name), name, COUNT, where) for name in names]
    return list(dict.fromkeys(int(token) for token in ids if token is not None))
