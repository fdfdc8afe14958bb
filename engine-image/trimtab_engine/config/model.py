"""A checkpoint's config.json as a typed value. Reads dictionaries, knows no tensor and no file.

What the architecture's code does not build is refused by name here, before any weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_engine.config.quantization import stored_quantization
from trimtab_engine.errors import ModelError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Those that models/llama.py computes."""
MAX_LAYERS = 10_000  # of which a set is made; ten times the deepest model there is
QK_NORM_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `rope_type` default, linear (factor) or llama3 (all fields)."""

    theta: float = 10_000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The mixtures of experts. `dense_layers` have a plain MLP instead; `renormalize`: the top weights sum to 1."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    renormalize: bool
    dense_layers: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the model's code needs. `dtype` is the checkpoint's. `intermediate_size` is that of dense layers."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Each head of q and k is normalised before it is rotated."""
    moe: MoeConfig | None
    dtype: str
    eos_token_ids: tuple[int, ...]

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def has_dense_layers(self) -> bool:
        return self.moe is None or bool(self.moe.dense_layers)

    @property
    def num_linear_parameters(self) -> int:
        """Of num_parameters, those of the layers' projections, which quantization makes smaller."""
        heads = self.num_attention_heads * self.head_size + self.num_kv_heads * self.head_size
        count = self.num_layers * 2 * self.hidden_size * heads
        if self.moe is None:
            return count + self.num_layers * 3 * self.hidden_size * self.intermediate_size
        num_dense = len(self.moe.dense_layers)
        widths = num_dense * self.intermediate_size
        widths += (self.num_layers - num_dense) * self.moe.num_experts * self.moe.intermediate_size
        return count + 3 * self.hidden_size * widths

    @property
    def num_parameters(self) -> int:
        """Weights of the model; tied embeddings count once."""
        heads = self.num_attention_heads * self.head_size
        kv = 2 * self.num_kv_heads * self.head_size
        attention = self.hidden_size * (2 * heads + kv) + (heads + kv) * self.qkv_bias
        attention += self.hidden_size * self.output_bias + 2 * self.head_size * self.qk_norm
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        mixtures = 0
        num_dense = self.num_layers
        if self.moe is not None:
            num_dense = len(self.moe.dense_layers)
            mixture = self.moe.num_experts * (3 * self.hidden_size * self.moe.intermediate_size + self.hidden_size)
            mixtures = (self.num_layers - num_dense) * mixture
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        layers = self.num_layers * (attention + 2 * self.hidden_size) + num_dense * mlp + mixtures
        return embeddings + self.hidden_size + layers


def parse_model_config(config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Read config.json (and generation_config.json, {} when absent). `where` names the file in messages.

    Raises ModelError for what is missing, malformed or not built.
    """
    architecture = architecture_of(config, where)
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"{where}: architecture {architecture} is not built; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{where}: hidden_act {activation!r} is not built for {architecture}; only 'silu' is")
    stored_quantization(config, where)
    heads = _positive(config, "num_attention_heads", where)
    hidden = _positive(config, "hidden_size", where)
    kv_heads = _positive(config, "num_key_value_heads", where, default=heads)
    head_size = _positive(config, "head_dim", where, default=hidden // heads)
    if heads % kv_heads or head_size % 2:
        raise ModelError(
            f"{where}: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}, "
            f"and head_dim {head_size} even"
        )
    max_len = _positive(config, "max_position_embeddings", where)
    if config.get("use_sliding_window"):
        raise ModelError(f"{where}: use_sliding_window is not built for {architecture}; every layer sees all tokens")
    attention_bias = bool(config.get("attention_bias", False))
    num_layers = _positive(config, "num_hidden_layers", where)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=_positive(config, "intermediate_size", where),
        num_layers=num_layers,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=_positive(config, "vocab_size", where),
        max_model_len=max_len,
        rms_norm_eps=_number(config, "rms_norm_eps", where, default=1e-6),
        rope=_rope(config, max_len, where),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",  # Qwen2 has these, and says nothing
        output_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture in QK_NORM_ARCHITECTURES,
        moe=_moe(config, num_layers, where) if architecture == "Qwen3MoeForCausalLM" else None,
        dtype=_dtype(config, where),
        eos_token_ids=_eos(config, generation),
    )


def _moe(config: Mapping[str, Any], num_layers: int, where: str) -> MoeConfig:
    """Qwen3-MoE's words; transformers 5 writes num_local_experts."""
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    num_experts = _positive(config, key, where)
    per_token = _positive(config, "num_experts_per_tok", where)
    if per_token > num_experts:
        raise ModelError(f"{where}: num_experts_per_tok {per_token} is above {key} {num_experts}")
    step = _positive(config, "decoder_sparse_step", where, default=1)
    listed = {int(layer) for layer in config.get("mlp_only_layers") or ()}
    # A configuration of absurdly many layers is refused later, by the number of tensors: no set of that size here.
    dense = listed if step == 1 else listed | {n for n in range(min(num_layers, MAX_LAYERS)) if (n + 1) % step}
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        intermediate_size=_positive(config, "moe_intermediate_size", where),
        renormalize=bool(config.get("norm_topk_prob", False)),
        dense_layers=frozenset(n for n in dense if n < num_layers),
    )


def architecture_of(config: Mapping[str, Any], where: str) -> str:
    """The first entry of `architectures`. Raises ModelError when there is none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f"{where}: no architectures; expected one of {', '.join(SUPPORTED_ARCHITECTURES)}")
    return names[0]


def _rope(config: Mapping[str, Any], max_len: int, where: str) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    parameters: dict[str, Any] = dict(config.get("rope_scaling") or {})
    parameters.update(config.get("rope_parameters") or {})
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"{where}: rope type {rope_type!r} is not built; supported: {', '.join(ROPE_TYPES)}")
    theta = _number(parameters, "rope_theta", where, default=_number(config, "rope_theta", where, default=10_000.0))
    original = parameters.get("original_max_position_embeddings", max_len)
    return RopeConfig(
        theta=theta,
        rope_type=rope_type,
        factor=_number(parameters, "factor", where, default=1.0),
        low_freq_factor=_number(parameters, "low_freq_factor", where, default=1.0),
        high_freq_factor=_number(parameters, "high_freq_factor", where, default=4.0),
        original_max_position_embeddings=int(original),
    )


def _dtype(config: Mapping[str, Any], where: str) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"{where}: dtype {dtype!r} is not built; supported: {', '.join(DTYPES)}")
    return dtype


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids; the generation config's come first, as in vLLM."""
    ids: list[int] = []
    for source in (generation, config):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(int(i) for i in ids))


def _positive(config: Mapping[str, Any], key: str, where: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{where}: {key} is {value!r}; a positive whole number is needed")
    return value


def _number(config: Mapping[str, Any], key: str, where: str, *, default: float) -> float:
    value = config.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ModelError(f"{where}: {key} is {value!r}; a number is needed")
    return float(value)
