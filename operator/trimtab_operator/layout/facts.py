"""Model facts (docs/reference/contract.md section 6), as `trimtab-engine inspect` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise

from trimtab_modelspec.errors import ModelError
from trimtab_modelspec.facts import DTYPE_BYTES
from trimtab_modelspec.facts import facts_of_config as modelspec_facts
from trimtab_modelspec.families.registry import BY_ARCHITECTURE
from trimtab_modelspec.kv_groups import KVGroup, LayerKV, covers_all_layers, uniform_group

MAX_COUNT = 1 << 62  # also the maximum of weights in bytes; larger values overflow a range
NATIVE_ARCHITECTURES = tuple(BY_ARCHITECTURE)
"""Architectures with an engine implementation."""
GPU_VISION_ARCHITECTURES = ("Qwen2_5_VLForConditionalGeneration", "Llama4ForConditionalGeneration")
"""Architectures whose images and videos the engine encodes on GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsByPart:
    """Bytes of the whole model's weights, by how they are divided over ranks."""

    embedding: int
    """Divided over the tensor ranks of the first stage, and of the last stage if the output layer is tied to it."""
    lm_head: int
    """Divided over the tensor ranks of the last stage; 0 if it is tied to the embedding."""
    attention: int
    """Queries and output, divided over the tensor ranks, equal in all layers."""
    kv_projection: int
    """Keys and values, divided over the tensor ranks into at most as many parts as there are KV heads."""
    dense_mlp: int
    """Divided over the tensor ranks, in the layers with a dense MLP."""
    experts: int
    """Divided over tensor × data ranks, in the MoE layers."""
    shared_experts: int
    """Experts used by every token, divided over the tensor ranks, in the MoE layers."""
    replicated: int
    """Norms, routers and other weights that every rank of a layer holds whole."""

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """One model's numbers. Sizes are bytes in memory at `dtype` (or at `quantization`)."""

    model: str
    architecture: str
    supported: bool
    """True if Trimtab's engine supports the model. An unsupported model can be planned but not served."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the dense MLP."""
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int
    num_parameters: int
    dtype: str
    quantization: str | None
    """Storage format of the weights; None if they are stored at `dtype`."""
    tie_word_embeddings: bool
    num_experts: int
    """Number of experts; 0 for a dense model."""
    num_experts_per_token: int
    moe_intermediate_size: int
    """Width of one expert; 0 for a dense model."""
    dense_layers: tuple[int, ...]
    """Layers of a MoE model with a dense MLP instead of experts. Empty for a dense model."""
    latent_kv_size: int
    """Elements per token and layer of the latent vector of multi-head latent attention, on every tensor rank; 0 for
    models with keys and values per KV head."""
    kv_groups: tuple[KVGroup, ...]
    """KV cache groups of the whole model."""
    weights: WeightsByPart
    weights_at_dtype: WeightsByPart | None = None
    """Bytes with all weights dequantised to `dtype`, for checkpoints with several storage formats; else None."""
    tower_bytes: int = 0
    """Bytes of the vision encoder, in addition to `weights`, whole on the first stage; 0 for text-only models."""
    is_by_transformers: bool = False
    """True if the engine has no implementation and runs transformers' code on the CPU."""
    refusal: str = ""
    """Reason why the engine does not support the model; empty if it does, or without a reason."""
    tensor_sizes: tuple[int, ...] = (1,)
    """Tensor-parallel degrees that transformers' code supports; engine implementations use `rules` instead."""

    @property
    def weights_bytes(self) -> int:
        return self.weights.total

    def is_run_on(self, device: str) -> bool:
        """Return True if Trimtab's engine supports the model on `spec.runtime.device`."""
        return self.supported and (device == "cpu" or not self.is_by_transformers)

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def has_dense_layers(self) -> bool:
        """True if any layer has a dense MLP."""
        return not self.is_moe or bool(self.dense_layers)

    @classmethod
    def parse(cls, facts: Mapping[str, object]) -> ModelFacts:
        """Parse the output of `inspect -o json`. Unknown keys of newer engines are ignored.

        Raises:
            ValueError: A key is missing or malformed; the message names it.
        """
        reader = _Reader(facts)
        weights = _weights(facts, "weights_by_part", reader.hint)
        num_experts = reader.count("num_experts")
        num_layers, num_kv_heads = reader.count("num_layers", least=1), reader.count("num_kv_heads", least=1)
        head_size, latent = reader.count("head_size", least=1), reader.count("latent_kv_size")
        found = cls(
            model=reader.text("model"),
            architecture=reader.text("architecture"),
            supported=reader.flag("supported"),
            num_layers=num_layers,
            hidden_size=reader.count("hidden_size", least=1),
            intermediate_size=reader.count("intermediate_size"),
            num_attention_heads=reader.count("num_attention_heads", least=1),
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            vocab_size=reader.count("vocab_size", least=1),
            max_model_len=reader.count("max_model_len", least=1),
            num_parameters=reader.count("num_parameters", least=1),
            dtype=reader.text("dtype"),
            quantization=None if facts.get("quantization") is None else reader.text("quantization"),
            tie_word_embeddings=reader.flag("tie_word_embeddings"),
            num_experts=num_experts,
            num_experts_per_token=reader.count("num_experts_per_token", least=min(1, num_experts)),
            moe_intermediate_size=reader.count("moe_intermediate_size", least=min(1, num_experts)),
            dense_layers=reader.counts("dense_layers"),
            latent_kv_size=latent,
            kv_groups=_kv_groups(facts, num_layers, num_kv_heads, head_size, latent),
            tower_bytes=reader.count("tower_bytes") if "tower_bytes" in facts else 0,
            is_by_transformers=facts.get("computed_by") == "transformers",
            refusal=str(facts.get("refusal") or ""),
            tensor_sizes=(reader.counts("tensor_parallel_sizes") if "tensor_parallel_sizes" in facts else ()) or (1,),
            weights=weights,
            weights_at_dtype=_weights(facts, "weights_at_dtype", reader.hint) if "weights_at_dtype" in facts else None,
        )
        if found.dtype not in DTYPE_BYTES:
            raise ValueError(f"model facts: dtype is {found.dtype!r}, not one of {', '.join(DTYPE_BYTES)}")
        if num_experts and found.num_experts_per_token > num_experts:
            raise ValueError(
                f"model facts: num_experts_per_token is {found.num_experts_per_token}; at most num_experts "
                f"{num_experts} is needed"
            )
        if found.num_attention_heads % found.num_kv_heads and not found.latent_kv_size:
            raise ValueError(
                f"model facts: num_attention_heads is {found.num_attention_heads}; a multiple of num_kv_heads "
                f"{found.num_kv_heads} is needed"
            )
        if any(low >= high for low, high in pairwise((*found.dense_layers, found.num_layers))):
            raise ValueError(f"model facts: dense_layers must ascend and stay below num_layers {found.num_layers}")
        if found.weights_bytes != reader.count("weights_bytes", least=1):
            raise ValueError(
                f"model facts: weights_by_part adds up to {found.weights_bytes}, "
                f"weights_bytes is {facts['weights_bytes']}"
            )
        return found

    def to_json(self) -> dict[str, object]:
        """Return the JSON that `parse` reads."""
        nested = (
            "weights",
            "weights_at_dtype",
            "dense_layers",
            "kv_groups",
            "tower_bytes",
            "is_by_transformers",
            "refusal",
            "tensor_sizes",
        )
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in nested}
        at_dtype = self.weights_at_dtype
        return {
            **plain,
            "dense_layers": list(self.dense_layers),
            "kv_groups": [group.to_json() for group in self.kv_groups],
            "weights_bytes": self.weights_bytes,
            "weights_by_part": asdict(self.weights),
            **({} if at_dtype is None else {"weights_at_dtype": asdict(at_dtype)}),
            **({"tower_bytes": self.tower_bytes} if self.tower_bytes else {}),
            **({"refusal": self.refusal} if self.refusal else {}),
            **(
                {"computed_by": "transformers", "tensor_parallel_sizes": list(self.tensor_sizes)}
                if self.is_by_transformers
                else {}
            ),
        }


def facts_of_config(config: Mapping[str, object], model: str) -> ModelFacts:
    """Return the facts of a model by its config.json only, for planning without a checkpoint.

    Raises:
        ValueError: The architecture is unknown, or a value is missing, malformed or implausible.
    """
    try:
        facts = modelspec_facts(config)
    except ModelError as error:
        raise ValueError(str(error)) from None
    return ModelFacts.parse({"model": model, **facts})


def _weights(facts: Mapping[str, object], key: str, hint: str) -> WeightsByPart:
    by_part = facts.get(key)
    if not isinstance(by_part, Mapping):
        raise ValueError(f"model facts: {key} is {by_part!r}{hint}")
    parts = _Reader(by_part, f"{key}.", hint)
    return WeightsByPart(**{part.name: parts.count(part.name) for part in fields(WeightsByPart)})


def _kv_groups(
    facts: Mapping[str, object], num_layers: int, num_kv_heads: int, head_size: int, latent_size: int
) -> tuple[KVGroup, ...]:
    """Parse the KV groups. Engines without groups have a single one, of whole heads or of latent vectors."""
    value = facts.get("kv_groups")
    if value is None:
        return (
            (KVGroup(((0, num_layers),), LayerKV(num_kv_heads=1, key_size=latent_size, value_size=0)),)
            if latent_size
            else (uniform_group(num_layers, num_kv_heads, head_size),)
        )
    if not isinstance(value, list) or not value or len(value) > num_layers:
        raise ValueError(f"model facts: kv_groups is {value!r:.100}; a list of 1 to num_layers {num_layers} is needed")
    groups = tuple(_kv_group(group, f"kv_groups[{index}].") for index, group in enumerate(value))
    if not covers_all_layers(groups, num_layers):
        raise ValueError(f"model facts: kv_groups must have each of the {num_layers} layers once")
    return groups


def _kv_group(value: object, prefix: str) -> KVGroup:
    if not isinstance(value, Mapping):
        raise ValueError(f"model facts: {prefix[:-1]} is {value!r:.100}; an object is needed")
    reader = _Reader(value, prefix, "")
    return KVGroup(
        reader.spans("layers"),
        LayerKV(
            num_kv_heads=reader.count("num_kv_heads", least=1),
            key_size=reader.count("key_size", least=1),
            value_size=reader.count("value_size"),
            window=None if value.get("window") is None else reader.count("window", least=1),
        ),
    )


class _Reader:
    """Typed access to a JSON object, with errors that name the key."""

    def __init__(self, values: Mapping[str, object], prefix: str = "", hint: str | None = None) -> None:
        self._values, self._prefix = values, prefix
        unsupported = f"; the engine reports few facts of {values.get('architecture')}, which it does not support"
        self.hint = (unsupported if values.get("supported") is False else "") if hint is None else hint

    def _error(self, key: str, wanted: str) -> ValueError:
        return ValueError(
            f"model facts: {self._prefix}{key} is {self._values.get(key)!r}; {wanted} is needed{self.hint}"
        )

    def text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str) or not value:
            raise self._error(key, "a text")
        return value

    def flag(self, key: str) -> bool:
        value = self._values.get(key)
        if not isinstance(value, bool):
            raise self._error(key, "true or false")
        return value

    def count(self, key: str, *, least: int = 0) -> int:
        value = self._values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._error(key, f"a whole number of {least} or more")
        if value > MAX_COUNT:
            raise self._error(key, f"a whole number of {least} to {MAX_COUNT}")
        return value

    def spans(self, key: str) -> tuple[tuple[int, int], ...]:
        """Return pairs [first, last + 1]."""
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
            raise self._error(key, "a list of pairs of whole numbers")
        if any(
            not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= MAX_COUNT for pair in value for n in pair
        ):
            raise self._error(key, "a list of pairs of whole numbers")
        return tuple((first, last) for first, last in value)

    def counts(self, key: str) -> tuple[int, ...]:
        value = self._values.get(key)
        if not isinstance(value, list) or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in value):
            raise self._error(key, "a list of whole numbers")
        return tuple(value)
