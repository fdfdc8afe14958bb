"""Reader of config.json, with errors that name the file and the key.

It reads keys common to nearly all decoders; each family's file reads its own keys. No tensors, no files. Unsupported
values are rejected by name, before any weight is read.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_modelspec.config import ModelConfig, MoeConfig, RopeConfig
from trimtab_modelspec.errors import ModelError
from trimtab_modelspec.quantization import check_not_mxfp4

MAX_LAYERS = 10_000  # of which a set is made; ten times the deepest model there is
MAX_VISION_LAYERS = 1000
MAX_POSITIONS = 1 << 31  # limits a product of two numbers in a configuration
DTYPES = ("float32", "bfloat16", "float16")
FULL, SLIDING = "full_attention", "sliding_attention"  # entries of layer_types
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Reader of one checkpoint's config.json, and generation_config.json ({} if absent). `where` names the file in
    messages.

    Raises:
        ModelError: Every method, for missing, malformed or unsupported values.
    """

    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    where: str

    @property
    def architecture(self) -> str | None:
        """The first entry of `architectures`; None when there is none."""
        names = self.config.get("architectures")
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None

    def decoder(
        self,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        moe: MoeConfig | None = None,
        is_gelu: bool = False,
    ) -> ModelConfig:
        """Return a decoder configuration from the common keys; the family passes the rest."""
        where, architecture = self.where, str(self.architecture)
        key, built = ("hidden_activation", "gelu_pytorch_tanh") if is_gelu else ("hidden_act", "silu")
        activation = self.config.get(key, built)
        if activation != built:
            raise ModelError(f"{where}: {key} {activation!r} is not supported for {architecture}; only {built!r} is")
        if moe is None or not moe.is_stacked:
            check_not_mxfp4(self.config, architecture, where)
        heads, hidden = self.positive("num_attention_heads"), self.positive("hidden_size")
        kv_heads = self.positive("num_key_value_heads", default=heads)
        head_size = self.positive("head_dim", default=hidden // heads)
        if heads % kv_heads or head_size % 2:
            raise ModelError(
                f"{where}: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}, "
                f"and head_dim {head_size} even"
            )
        positions = self.positive("max_position_embeddings")
        rope = self.rope(positions)
        max_len = max(positions, self.extended_positions(rope))
        if self.config.get("use_sliding_window"):
            raise ModelError(
                f"{where}: use_sliding_window is not supported for {architecture}; every layer sees all tokens"
            )
        return ModelConfig(
            architecture=architecture,
            hidden_size=hidden,
            intermediate_size=self.positive("intermediate_size"),
            num_layers=self.positive("num_hidden_layers"),
            num_attention_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head_size,
            vocab_size=self.positive("vocab_size"),
            max_model_len=max_len,
            rms_norm_eps=self.number("rms_norm_eps", default=1e-6),
            rope=rope,
            tie_word_embeddings=self.flag("tie_word_embeddings"),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            moe=moe,
            is_gelu=is_gelu,
            dtype=self.dtype(),
            eos_token_ids=self.eos_token_ids(),
        )

    def rope(self, max_len: int) -> RopeConfig:
        """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
        parameters = dict(self.config.get("rope_scaling") or {}) | dict(self.config.get("rope_parameters") or {})
        words = ConfigReader(parameters, {}, self.where)
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            raise ModelError(
                f"{self.where}: rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        if words.number("partial_rotary_factor", default=self.number("partial_rotary_factor", default=1.0)) != 1:
            raise ModelError(f"{self.where}: partial_rotary_factor is not supported; every head is rotated whole")
        original = words.count("original_max_position_embeddings") or max_len
        factor = words.above_zero("factor", default=max_len / original)
        return RopeConfig(
            theta=words.above_zero("rope_theta", default=self.above_zero("rope_theta", default=10_000.0)),
            rope_type=rope_type,
            factor=factor,
            low_freq_factor=words.number("low_freq_factor", default=1.0),
            high_freq_factor=words.number("high_freq_factor", default=4.0),
            original_max_position_embeddings=original,
            beta_fast=words.number("beta_fast", default=32.0),
            beta_slow=words.number("beta_slow", default=1.0),
            truncate=bool(parameters.get("truncate", True)),
            divisors=tuple(float(divisor) for divisor in parameters.get("frequency_divisors") or ()),
            attention_factor=words.attention_factor(factor) if rope_type == "yarn" else 1.0,
        )

    def extended_positions(self, rope: RopeConfig) -> int:
        """Return the positions that YaRN reaches, 0 without it. Model cards add it to `rope_scaling` and leave
        `max_position_embeddings` as it was.
        """
        scaling = dict(self.config.get("rope_scaling") or {}) | dict(self.config.get("rope_parameters") or {})
        if rope.rope_type != "yarn" or not scaling.get("original_max_position_embeddings"):
            return 0
        return int(min(rope.original_max_position_embeddings * rope.factor, MAX_POSITIONS))

    def attention_factor(self, factor: float) -> float:
        """Return YaRN's attention factor (arXiv:2309.00071, section 3.4); by default 0.1 ln(factor) + 1, or a ratio of
        two such terms.
        """
        if self.config.get("attention_factor") is not None:
            return self.number("attention_factor", default=1.0)
        growth = 0.1 * math.log(max(1.0, factor))
        first, second = (self.number(key, default=0.0) for key in ("mscale", "mscale_all_dim"))
        return (first * growth + 1.0) / (second * growth + 1.0) if first and second else growth + 1.0

    def dtype(self) -> str:
        """Return the checkpoint's."""
        dtype = str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in DTYPES:
            raise ModelError(f"{self.where}: dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
        return dtype

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return end-of-sequence ids; the generation config's first, as in vLLM."""
        ids: list[int] = []
        for source in (self.generation, self.config):
            value = source.get("eos_token_id")
            ids += value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise ModelError(f"{self.where}: eos_token_id is {ids!r:.100}; whole numbers of 0 or more are needed")
        return tuple(dict.fromkeys(ids))

    def window(self, *, default: int | None = None) -> int | None:
        """Return `sliding_window`: visible tokens including itself. None, which may be explicit: all."""
        value = self.config.get("sliding_window", default)
        return None if value is None else self.positive("sliding_window", default=default)

    def windows(self, is_sliding: Callable[[int], bool], *, default_window: int) -> tuple[int | None, ...]:
        """Return each layer's window, by `layer_types`; without them by `is_sliding`. `default_window` is the
        default window.
        """
        window, num_layers = self.window(default=default_window), self.num_layers()
        types = self.config.get("layer_types")
        if types is None:
            types = [SLIDING if is_sliding(layer) else FULL for layer in range(num_layers)]
        if len(types) != num_layers or not {*types} <= {SLIDING, FULL}:
            raise ModelError(
                f"{self.where}: layer_types has {len(types)} entries, of {', '.join(sorted(map(str, {*types})))}; "
                f"supported are {num_layers}, of {FULL} and {SLIDING}"
            )
        return tuple(window if kind == SLIDING else None for kind in types)

    def num_layers(self) -> int:
        """`num_hidden_layers`, where something is listed for each. More than MAX_LAYERS are cut: configurations of
        absurdly many layers are refused later, by the number of tensors.
        """
        return min(self.positive("num_hidden_layers"), MAX_LAYERS)

    def vision_layers(self, key: str, *, default: int | None = None) -> int:
        """Return the number of vision encoder layers, limited because tensors are listed before reading."""
        value = self.positive(key, default=default)
        if value > MAX_VISION_LAYERS:
            raise ModelError(
                f"{self.where}: {key} is {value}; vision encoders of at most {MAX_VISION_LAYERS} layers are supported"
            )
        return value

    def listed(self, key: str, length: int | None = None) -> list[int]:
        """Return a list of whole numbers, of `length` if given. [] if the key is absent."""
        value = self.config.get(key) or []
        if not isinstance(value, list) or not all(isinstance(number, int) and number >= 0 for number in value):
            raise ModelError(f"{self.where}: {key} is {value!r:.100}; a list of whole numbers is needed")
        if value and length is not None and len(value) != length:
            raise ModelError(f"{self.where}: {key} has {len(value)} entries; {length} are needed")
        return value

    def flag(self, key: str) -> bool:
        """False where the key is absent."""
        return bool(self.config.get(key, False))

    def positive(self, key: str, *, default: int | None = None) -> int:
        """Return a whole number of 1 or more."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.where}: {key} is {value!r}; a positive whole number is needed")
        return value

    def count(self, key: str) -> int:
        """Return a whole number of 0 or more; 0 where the key is absent."""
        value = self.config.get(key)
        return 0 if value in (None, 0) else self.positive(key)

    def number(self, key: str, *, default: float) -> float:
        """Any number."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise ModelError(f"{self.where}: {key} is {value!r}; a number is needed")
        return float(value)

    def above_zero(self, key: str, *, default: float) -> float:
        """Return a number above 0."""
        value = self.number(key, default=default)
        if value <= 0:
            raise ModelError(f"{self.where}: {key} is {value!r}; a number above 0 is needed")
        return value
