"""Model configuration: a checkpoint's config.json as a typed value. config_reader.py and each family's file map the
keys.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `rope_type` default, linear (factor), llama3 (with the frequency factors) or yarn (with the
    betas). Up to max_position_embeddings, which is as far as is served, dynamic scaling is the default.
    """

    theta: float = 10_000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """True if yarn's frequency range is rounded to whole frequencies."""
    divisors: tuple[float, ...] = ()
    """Divisor of each frequency, as stored in GGUF files. Empty: none."""
    attention_factor: float = 1.0
    """Factor that rotated queries and keys are both multiplied by."""
    sections: tuple[int, ...] = ()
    """Number of frequencies rotated by the position over time, then height and width. Empty: all rotate by one
    position.
    """


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """An expert's gate that is cut off at `limit`: (up + 1) * gate * sigmoid(alpha * gate), after gate and up are."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """Experts are chosen by the sigmoid of the router's logits, each on its own, not by a softmax over all."""

    weighs_inputs: bool = False
    """True if expert inputs are weighted instead of outputs."""
    has_bias: bool = False
    """True if each expert has a bias added to its score for selection, not for its weight."""
    num_groups: int = 1
    """Number of expert groups; a token's experts are chosen within its best `num_top_groups` groups."""
    num_top_groups: int = 1
    factor: float = 1.0
    """Factor of the weights."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The MoE layers. `dense_layers` have a plain MLP instead; `renormalize`: the top weights sum to 1."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    renormalize: bool
    dense_layers: frozenset[int]
    is_stacked: bool = False
    """True if a layer's experts are stored in one tensor per projection."""
    clamped_gate: ClampedGate | None = None
    """Clamped activation. None means silu(gate) * up."""
    sigmoid: SigmoidRouting | None = None
    """Sigmoid routing. None means softmax routing."""
    shared_size: int = 0
    """Intermediate size of the shared expert. 0 without one."""


@dataclass(frozen=True, slots=True)
class Temperature:
    """A query at position p is multiplied by 1 + scale * ln(1 + floor((p + 1) / floor)) (arXiv:2501.19399), so that
    attention over long contexts stays as sharp.
    """

    floor: float
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Keys and values of all heads as one latent vector per token (multi-head latent attention, arXiv:2405.04434). A
    head's query and key have a part without positions, of `plain_size`, and one that is rotated.
    """

    query_rank: int | None
    """Rank of the queries' latent vector. None means queries are projected from the hidden state."""
    kv_rank: int
    plain_size: int
    rotary_size: int
    value_size: int

    @property
    def kept_size(self) -> int:
        """Elements cached per token: the latent vector, and the rotated part of a key, shared by all heads."""
        return self.kv_rank + self.rotary_size


@dataclass(frozen=True, slots=True)
class Division:
    """Over how many tensor-parallel ranks transformers' own code of a model can be divided."""

    degrees: tuple[int, ...]
    """Ascending; the first is 1."""
    reason: str
    """Reason why no other degree is possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Values that the model code needs. `dtype` is the checkpoint's. `intermediate_size` is that of dense layers."""

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
    """True if each head of q and k is normalized before RoPE."""
    moe: MoeConfig | None
    dtype: str
    eos_token_ids: tuple[int, ...]
    windows: tuple[int | None, ...] = ()
    """Per layer: number of visible tokens, including itself; None means all preceding ones. Empty: no layer has a
    window.
    """
    is_chunked: bool = False
    """Windows are chunks of positions, of which a token sees its own."""
    nope_layers: frozenset[int] = frozenset()
    """Layers without position encoding (NoPE)."""
    temperature: Temperature | None = None
    """Scaling of queries by position in NoPE layers. None means no scaling."""
    local_rope: RopeConfig | None = None
    """RoPE of windowed layers. None means the same as in other layers."""
    attention_scale: float | None = None
    """Factor of attention scores. None: 1 / sqrt(head_size)."""
    has_sinks: bool = False
    """True if each head has an attention sink: a softmax weight without a value."""
    embedding_scale: float = 1.0
    """Factor of embeddings."""
    norm_offset: float = 0.0
    """Offset added to the stored weight of every norm."""
    latent: LatentAttention | None = None
    """Latent attention (MLA). None means keys and values per head."""
    num_draft_layers: int = 0
    """Layers after the last that predict further tokens: used for drafts, or neither run nor read."""
    has_join_bias: bool = False
    """For a draft head: True if the projection that joins embedding and hidden state has a bias."""
    is_gelu: bool = False
    """True if the MLP uses tanh-approximated GELU instead of SiLU."""
    transformers_config: str | None = None
    """config.json as text, for a model that runs on transformers' code. None for built-in families."""
    division: Division | None = None
    """Tensor-parallel degrees of such a model. None for built-in families."""
    has_transformers_vision: bool = False
    """True if transformers' code computes the images for this language model."""

    @property
    def rotary_size(self) -> int:
        """Rotated elements of each head."""
        return self.head_size if self.latent is None else self.latent.rotary_size

    def window(self, layer: int) -> int | None:
        """Return the layer's window."""
        return self.windows[layer] if self.windows else None

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def has_dense_layers(self) -> bool:
        return self.moe is None or bool(self.moe.dense_layers)
