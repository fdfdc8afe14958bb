"""What a model is in numbers: a checkpoint's configuration as a typed value. Which words of config.json it comes from
is said in model_words.py and in each family's file (models/)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `rope_type` default, linear (factor), llama3 (with the frequency factors) or yarn (with the
    betas). Up to max_position_embeddings, which is as far as is served, dynamic scaling is the default."""

    theta: float = 10_000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether yarn's range of frequencies is rounded to whole ones."""
    attention_factor: float = 1.0
    """Factor that rotated queries and keys are both multiplied by."""


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
