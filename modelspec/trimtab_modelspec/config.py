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
    divisors: tuple[float, ...] = ()
    """What each frequency is divided by, as GGUF files have it; none: nothing."""
    attention_factor: float = 1.0
    """Factor that rotated queries and keys are both multiplied by."""
    sections: tuple[int, ...] = ()
    """How many frequencies turn by a token's position over time, then by those over height and width; none: all turn by
    one position."""


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """An expert's gate that is cut off at `limit`: (up + 1) * gate * sigmoid(alpha * gate), after gate and up are."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """Experts are chosen by the sigmoid of the router's logits, each on its own, not by a softmax over all."""

    weighs_inputs: bool = False
    """What an expert gets is weighted, not what it yields."""
    has_bias: bool = False
    """Each expert has a number that is added to its score for the choice, not for its weight."""
    num_groups: int = 1
    """Into so many groups experts are divided; of the best `num_top_groups` those of a token are chosen."""
    num_top_groups: int = 1
    factor: float = 1.0
    """By what the weights are multiplied."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The mixtures of experts. `dense_layers` have a plain MLP instead; `renormalize`: the top weights sum to 1."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    renormalize: bool
    dense_layers: frozenset[int]
    is_stacked: bool = False
    """Whether a layer's experts lie in one tensor per projection."""
    clamped_gate: ClampedGate | None = None
    """None: silu of the gate, times up."""
    sigmoid: SigmoidRouting | None = None
    """None: experts are chosen by a softmax."""
    shared_size: int = 0
    """Width of the expert that every token passes beside those that are chosen for it; 0: there is none."""


@dataclass(frozen=True, slots=True)
class Temperature:
    """A query at position p is multiplied by 1 + scale * ln(1 + floor((p + 1) / floor)) (arXiv:2501.19399), so that
    attention over long contexts stays as sharp."""

    floor: float
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Keys and values of all heads as one latent vector per token (multi-head latent attention, arXiv:2405.04434). A
    head's query and key have a part without positions, of `plain_size`, and one that is rotated."""

    query_rank: int | None
    """Size of the queries' own latent vector; None: queries come from the hidden state."""
    kv_rank: int
    plain_size: int
    rotary_size: int
    value_size: int

    @property
    def kept_size(self) -> int:
        """What is kept of a token: the latent vector, and the rotated part of a key, which all heads share."""
        return self.kv_rank + self.rotary_size


@dataclass(frozen=True, slots=True)
class Division:
    """Over how many tensor-parallel ranks transformers' own code of a model can be divided."""

    degrees: tuple[int, ...]
    """Ascending; the first is 1."""
    reason: str
    """Why it is divided over no other number."""


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
    windows: tuple[int | None, ...] = ()
    """Per layer: how many tokens a token sees, itself included; None: all before it. Empty: no layer has a window."""
    is_chunked: bool = False
    """Windows are chunks of positions, of which a token sees its own."""
    unturned: frozenset[int] = frozenset()
    """Layers whose queries and keys are not rotated, so that they know no positions."""
    temperature: Temperature | None = None
    """How queries grow with their positions in layers that do not rotate them; None: they do not."""
    local_rope: RopeConfig | None = None
    """The rotation in layers that have a window; None: the same as in the others."""
    attention_scale: float | None = None
    """By what scores are multiplied; None: 1 / sqrt(head_size)."""
    has_sinks: bool = False
    """Each head has a weight in its softmax that no value has."""
    embedding_scale: float = 1.0
    """By what embeddings are multiplied."""
    norm_offset: float = 0.0
    """What is added to the stored weight of every norm."""
    latent: LatentAttention | None = None
    """None: keys and values per head."""
    num_draft_layers: int = 0
    """Layers behind the last that predict further tokens: they draft, or are neither run nor read."""
    has_join_bias: bool = False
    """Of a head that drafts: whether the product that joins embedding and hidden state has a bias."""
    is_gelu: bool = False
    """The MLP's gate goes through gelu, approximated by tanh, not through silu."""
    transformers_config: str | None = None
    """config.json as text, of a model that transformers' own code computes; None: it has a family of its own."""
    division: Division | None = None
    """Of such a model; None: it has a family of its own."""
    has_transformers_tower: bool = False
    """Whether images are computed by transformers' own code, for this text half."""

    @property
    def rotary_size(self) -> int:
        """How much of each head is rotated."""
        return self.head_size if self.latent is None else self.latent.rotary_size

    def window(self, layer: int) -> int | None:
        """The layer's window."""
        return self.windows[layer] if self.windows else None

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def has_dense_layers(self) -> bool:
        return self.moe is None or bool(self.moe.dense_layers)
