"""A GGUF file's metadata in config.json's words. Reads dictionaries, knows no tensor and no file.

Keys are llama.cpp's (gguf-py's constants), behind the architecture's name. What would be computed otherwise than
llama.cpp does is refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_engine.errors import ModelError

UNSCALED = ("none", "", "linear")
"""Types of rope scaling beside which frequencies may have divisors of their own."""
UNBUILT_FACTORS = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
"""By what rotated heads are multiplied, beyond what yarn says; 1 in what was published of the families here."""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of tokens that end an answer: of a text, of a turn, of a message."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a file says of its model. Every method raises ModelError for what is missing or malformed."""

    fields: Mapping[str, Any]
    architecture: str
    where: str

    def find(self, key: str) -> Any:
        """One value, None where there is none. A list is read where it says the same of every layer."""
        name = f"{self.architecture}.{key}"
        value = self.fields.get(name)
        if isinstance(value, list):
            if len({*value}) != 1:
                raise ModelError(f"{self.where}: {name} differs from layer to layer ({str(value)[:60]}), not built")
            return value[0]
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more."""
        value = int(self.number(key, default))
        if value < 1:
            raise ModelError(f"{self.where}: {self.architecture}.{key} is {value}; a number of 1 or more is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Any number."""
        value = self.find(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.where}: has no metadata {self.architecture}.{key}")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{self.where}: {self.architecture}.{key} is {str(value)[:60]!r}; a number is needed")
        return value


def decoder_words(metadata: Metadata, divisors: Sequence[float]) -> dict[str, Any]:
    """What decoders share. `divisors`: of each frequency of the rope; none where the file has none."""
    heads, hidden = metadata.positive("attention.head_count"), metadata.positive("embedding_length")
    head_size = metadata.positive("attention.key_length", metadata.find("rope.dimension_count") or hidden // heads)
    return {
        "hidden_size": hidden,
        "intermediate_size": metadata.positive("feed_forward_length"),
        "num_hidden_layers": metadata.positive("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.positive("attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": metadata.positive("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(metadata, divisors, head_size),
        "partial_rotary_factor": metadata.positive("rope.dimension_count", head_size) / head_size,
        "dtype": "float32",
    }


def _rope_scaling(metadata: Metadata, divisors: Sequence[float], head_size: int) -> dict[str, Any]:
    kind = str(metadata.find("rope.scaling.type") or "none")
    linear = metadata.number("rope.scale_linear", 1.0)  # of files of 2023, which say no type
    if kind == "none" and linear != 1.0:
        kind = "linear"
    for key in UNBUILT_FACTORS:
        if kind not in UNSCALED and metadata.number(key, 1.0) != 1.0:
            raise ModelError(f"{metadata.where}: {metadata.architecture}.{key} {metadata.find(key)} is not built")
    words: dict[str, Any] = {"rope_type": "default"}
    if kind not in ("none", ""):
        words = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor", linear)}
    if kind == "yarn":
        words |= _yarn(metadata)
    if divisors:
        _check_divisors(metadata, divisors, head_size, kind)
        words["frequency_divisors"] = list(divisors)
    return words


def _yarn(metadata: Metadata) -> dict[str, Any]:
    keys = {
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    said = {ours: metadata.find(f"rope.scaling.{theirs}") for ours, theirs in keys.items()}
    return {ours: value for ours, value in said.items() if value is not None}


def _check_divisors(metadata: Metadata, divisors: Sequence[float], head_size: int, kind: str) -> None:
    """Raise ModelError unless there is one for each frequency, beside a scaling that says nothing of them itself."""
    if len(divisors) != head_size // 2 or not all(0 < divisor < float("inf") for divisor in divisors):
        raise ModelError(
            f"{metadata.where}: rope_freqs.weight has {len(divisors)} numbers, first {divisors[0]}; {head_size // 2} "
            f"above 0 are needed"
        )
    if kind not in UNSCALED:
        raise ModelError(f"{metadata.where}: rope_freqs.weight beside rope scaling {kind} is not built")


def end_tokens(fields: Mapping[str, Any]) -> list[int]:
    """All that end an answer, as the tokenizer's metadata says; the first is the end of a text."""
    ids = (fields.get(f"tokenizer.ggml.{key}") for key in ENDS)
    return list(dict.fromkeys(int(token) for token in ids if token is not None))
