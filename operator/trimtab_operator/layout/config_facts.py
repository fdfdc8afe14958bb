"""Model facts from a config.json alone, without a checkpoint and without the engine.

For planning: `trimtab plan` takes a folder that holds nothing but its config.json, and architectures that the engine
does not run (Mixtral). What the engine runs has the same facts here as from
`trimtab-engine inspect`; tests/golden/model_facts.json holds both to it. Vision towers are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_operator.layout.facts import DTYPE_BYTES, RUN_BY_THE_ENGINE, ModelFacts, WeightsByPart
from trimtab_operator.layout.kv_groups import latent_groups, windowed_groups
from trimtab_operator.layout.projections import Sizes, projections
from trimtab_operator.layout.scaled_weights import (
    FP8_BY_TENSOR,
    SCALED_METHODS,
    Stored,
    bytes_of,
    mxfp4_bytes,
    scaled_weights,
)
from trimtab_operator.layout.stored_weights import FP8_BLOCK, INTEGER_METHODS, MXFP4, UNQUANTISED_ALONE

PLANNED_ONLY = ("MixtralForCausalLM",)
MAX_COUNT = 1 << 40  # products of several such numbers stay floats
LLAMA4: Mapping[str, Any] = {
    "head_dim": 128, "max_position_embeddings": 131072, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_local_experts": 16, "num_experts_per_tok": 1, "attention_chunk_size": 8192, "no_rope_layer_interval": 4,
}  # fmt: skip
GEMMA3: Mapping[str, Any] = {
    "head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 131072, "sliding_window": 4096,
    "sliding_window_pattern": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208,
}  # fmt: skip
UNSAID: Mapping[str, Mapping[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": 4096},
    "Qwen2_5_VLForConditionalGeneration": {"max_position_embeddings": 32768},
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "GptOssForCausalLM": {
        "head_dim": 64, "attention_bias": True, "sliding_window": 128, "sliding_window_pattern": 2,
        "num_experts_per_tok": 4,
    },
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4,
    "DeepseekV3ForCausalLM": {
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "max_position_embeddings": 4096,
    },
}  # fmt: skip
"""What config.json leaves out where it is this, by architecture."""
MAX_LAYERS = 10_000  # mixtures list theirs one by one
SCALE_BYTES = 4  # of a block-quantised weight: one float32 per block
INTEGER_BITS = (2, 3, 4, 8)
BUILT_WORDS: Mapping[str, tuple[tuple[str, tuple[Any, ...]], ...]] = {
    "fp8": (("activation_scheme", ("dynamic",)), ("fmt", ("e4m3",)), ("scale_fmt", (None,))),
    "awq": (("bits", (4,)), ("version", ("gemm", "GEMM")), ("zero_point", (True,))),
    "gptq": (
        ("bits", (4,)),
        ("checkpoint_format", ("gptq", "gptq_v2")),
        ("is_marlin_format", (False,)),
        ("dynamic", (None, {})),
    ),
}
"""The forms that the engine reads, by method; the first of each is what an absent word means."""


@dataclass(frozen=True, slots=True)
class _Attention:
    """Parameters of one layer. `latent` are projections that every rank holds whole; `norms` likewise."""

    queries_and_output: int
    keys_and_values: int
    latent: int
    norms: int


@dataclass(frozen=True, slots=True)
class _Mixture:
    num_experts: int
    per_token: int
    width: int
    shared_width: int
    dense_layers: tuple[int, ...]


def facts_of_config(config: Mapping[str, Any], model: str) -> ModelFacts:
    """The facts. Raises ValueError for an architecture that is not known here, and for what is missing or malformed."""
    architecture = _architecture(config)
    inner = config.get("text_config")
    words = {**config, **inner} if isinstance(inner, Mapping) else config
    words = {**UNSAID.get(architecture, {}), **words}
    hidden, num_layers = _count(words, "hidden_size"), _count(words, "num_hidden_layers", most=MAX_LAYERS)
    heads = _count(words, "num_attention_heads")
    kv_heads = _count(words, "num_key_value_heads", default=heads)
    is_latent = words.get("kv_lora_rank") is not None
    if heads % kv_heads and not is_latent:
        raise ValueError(
            f"config.json: num_attention_heads is {heads}; a multiple of num_key_value_heads {kv_heads} is needed"
        )
    head_size = _count(words, "head_dim", default=max(1, hidden // heads))
    if is_latent:  # a query's: with and without rotation
        head_size = _count(words, "qk_nope_head_dim") + _count(words, "qk_rope_head_dim")
    latent = _count(words, "kv_lora_rank") + _count(words, "qk_rope_head_dim") if is_latent else 0
    vocabulary = _count(words, "vocab_size")
    attention = (
        _latent_attention(words, hidden, heads)
        if is_latent
        else _attention(words, architecture, hidden, heads, kv_heads, head_size)
    )
    mixture = _mixture(words, architecture, num_layers)
    if mixture is not None and mixture.per_token > mixture.num_experts:
        raise ValueError(
            f"config.json: num_experts_per_tok is {mixture.per_token}; at most {mixture.num_experts}, "
            "the number of experts, is needed"
        )
    num_dense = num_layers if mixture is None else len(mixture.dense_layers)
    num_mixtures = num_layers - num_dense
    mlp_width = _count(words, "intermediate_size_mlp", default=_count(words, "intermediate_size"))
    mlp_bias = bool(words.get("mlp_bias")) and architecture == "LlamaForCausalLM"
    tied = bool(config.get("tie_word_embeddings", words.get("tie_word_embeddings", False)))
    per_expert = 0 if mixture is None else 3 * hidden * mixture.width
    is_gpt_oss = architecture == "GptOssForCausalLM"
    if is_gpt_oss and mixture is not None:
        per_expert += 2 * mixture.width + hidden  # biases
    num_norms = 4 if architecture.startswith("Gemma3") else 2
    linear = {
        "attention": num_layers * attention.queries_and_output,
        "kv_projection": num_layers * attention.keys_and_values,
        "dense_mlp": num_dense * (3 * hidden * mlp_width + 2 * mlp_width * mlp_bias),
        "experts": 0 if mixture is None else num_mixtures * mixture.num_experts * per_expert,
        "shared_experts": 0 if mixture is None else num_mixtures * 3 * hidden * mixture.shared_width,
        "replicated": num_layers * attention.latent,
    }
    has_router_bias = architecture in ("GptOssForCausalLM", "DeepseekV3ForCausalLM")
    routers = 0 if mixture is None else num_mixtures * mixture.num_experts * (hidden + has_router_bias)
    plain = {
        "embedding": vocabulary * hidden,
        "lm_head": 0 if tied else vocabulary * hidden,
        "replicated": num_layers * (attention.norms + num_norms * hidden)
        + num_dense * hidden * mlp_bias
        + routers
        + hidden,
    }
    dtype = str(words.get("dtype") or words.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"config.json: dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    quantization, linear_bytes = _quantization(config, DTYPE_BYTES[dtype])
    parts = {
        part: round(linear.get(part, 0) * linear_bytes) + plain.get(part, 0) * DTYPE_BYTES[dtype]
        for part in (*linear, "embedding", "lm_head")
    }
    at_dtype = None
    if (stored := _stored_apart(config)) is not None:
        at_dtype = WeightsByPart(**parts)
        sizes = Sizes(
            architecture=architecture,
            num_layers=num_layers,
            hidden=hidden,
            vocabulary=vocabulary,
            is_tied=tied,
            query_rows=heads * head_size,
            kv_rows=kv_heads * head_size,
            output_columns=heads * (_count(words, "v_head_dim") if is_latent else head_size),
            mlp_width=mlp_width,
            num_experts=0 if mixture is None else mixture.num_experts,
            expert_width=0 if mixture is None else mixture.width,
            shared_width=0 if mixture is None else mixture.shared_width,
            dense_layers=frozenset(range(num_layers) if mixture is None else mixture.dense_layers),
            **(_latent_sizes(words, heads) if is_latent else {}),
        )
        for each in projections(sizes):
            num_bytes = stored(each.module, each.out, each.size)
            if num_bytes is not None:
                parts[each.part] += each.count * (num_bytes - each.out * each.size * DTYPE_BYTES[dtype])
    return ModelFacts(
        model=model,
        architecture=architecture,
        supported=architecture in RUN_BY_THE_ENGINE
        and _is_run(config.get("quantization_config"), architecture, 1 if is_latent else head_size)
        and not words.get("use_sliding_window"),
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=mlp_width,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=vocabulary,
        max_model_len=_count(words, "max_position_embeddings"),
        num_parameters=sum(linear.values()) + sum(plain.values()),
        dtype=dtype,
        quantization=quantization,
        tie_word_embeddings=tied,
        num_experts=0 if mixture is None else mixture.num_experts,
        num_experts_per_token=0 if mixture is None else mixture.per_token,
        moe_intermediate_size=0 if mixture is None else mixture.width,
        dense_layers=() if mixture is None else mixture.dense_layers,
        latent_kv_size=latent,
        kv_groups=latent_groups(num_layers, latent)
        if latent
        else windowed_groups(_windows(words, architecture, num_layers), kv_heads, head_size),
        weights=WeightsByPart(**parts),
        weights_at_dtype=at_dtype,
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name is None:
        raise ValueError('config.json: names no architecture ("architectures"); give the config.json of a model')
    if name not in RUN_BY_THE_ENGINE + PLANNED_ONLY:
        known = ", ".join(RUN_BY_THE_ENGINE + PLANNED_ONLY)
        raise ValueError(f"config.json: architecture {name!r} is not known; known are {known}")
    return str(name)


def _attention(
    words: Mapping[str, Any], architecture: str, hidden: int, heads: int, kv_heads: int, head_size: int
) -> _Attention:
    """Keys and values per KV head. Qwen2 has biases on q, k and v and does not say so."""
    q, kv = heads * head_size, 2 * kv_heads * head_size
    is_qwen2 = architecture.startswith("Qwen2")
    qkv_bias = bool(words.get("attention_bias")) or is_qwen2
    output_bias = bool(words.get("attention_bias")) and not is_qwen2
    qk_norm = architecture.startswith(("Qwen3", "Gemma3"))
    sinks = heads if architecture == "GptOssForCausalLM" else 0
    return _Attention(
        queries_and_output=2 * hidden * q + q * qkv_bias,
        keys_and_values=hidden * kv + kv * qkv_bias,
        latent=0,
        norms=hidden * output_bias + 2 * head_size * qk_norm + sinks,
    )


def _latent_attention(words: Mapping[str, Any], hidden: int, heads: int) -> _Attention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): projections down to the latents are held by every
    rank, those up from them are divided by heads.
    """
    is_direct = words.get("q_lora_rank") is None  # queries come from the hidden state
    q_rank, kv_rank = 0 if is_direct else _count(words, "q_lora_rank"), _count(words, "kv_lora_rank")
    plain, rotary = _count(words, "qk_nope_head_dim"), _count(words, "qk_rope_head_dim")
    value = _count(words, "v_head_dim")
    up = (hidden if is_direct else q_rank) * heads * (plain + rotary) + kv_rank * heads * (plain + value)
    biases = (q_rank + kv_rank + rotary + hidden) * bool(words.get("attention_bias"))
    return _Attention(
        queries_and_output=up + heads * value * hidden,
        keys_and_values=0,
        latent=hidden * (q_rank + kv_rank + rotary),
        norms=q_rank + kv_rank + biases,
    )


def _latent_sizes(words: Mapping[str, Any], heads: int) -> dict[str, int]:
    """What projections down to latent vectors and up from them have of rows and columns."""
    kv_rank, value = _count(words, "kv_lora_rank"), _count(words, "v_head_dim")
    return {
        "query_rank": 0 if words.get("q_lora_rank") is None else _count(words, "q_lora_rank"),
        "kv_rank": kv_rank,
        "kept_size": kv_rank + _count(words, "qk_rope_head_dim"),
        "unfolded_rows": heads * (_count(words, "qk_nope_head_dim") + value),
    }


def _mixture(words: Mapping[str, Any], architecture: str, num_layers: int) -> _Mixture | None:
    """Who has experts, in each family's words; None for a dense model."""
    layers = range(num_layers)
    if architecture == "Qwen3MoeForCausalLM":
        step = _count(words, "decoder_sparse_step", default=1)
        listed = _layers(words, "mlp_only_layers")
        key = "num_experts" if "num_experts" in words else "num_local_experts"
        dense = tuple(n for n in layers if n in listed or (n + 1) % step)
        return _Mixture(
            _count(words, key), _count(words, "num_experts_per_tok"), _count(words, "moe_intermediate_size"), 0, dense
        )
    if architecture in ("MixtralForCausalLM", "GptOssForCausalLM"):
        per_token, width = _count(words, "num_experts_per_tok"), _count(words, "intermediate_size")
        return _Mixture(_count(words, "num_local_experts"), per_token, width, 0, ())
    if architecture == "DeepseekV3ForCausalLM":
        width = _count(words, "moe_intermediate_size")
        shared = width * _count(words, "n_shared_experts", default=0, least=0)
        dense = tuple(n for n in layers if n < _count(words, "first_k_dense_replace", default=0, least=0))
        return _Mixture(_count(words, "n_routed_experts"), _count(words, "num_experts_per_tok"), width, shared, dense)
    if architecture.startswith("Llama4"):
        step = _count(words, "interleave_moe_layer_step", default=1)
        width = _count(words, "intermediate_size")
        per_token = _count(words, "num_experts_per_tok")
        listed = _layers(words, "moe_layers")
        is_listed = words.get("moe_layers") is not None
        dense = tuple(n for n in layers if (n not in listed if is_listed else (n + 1) % step))
        return _Mixture(_count(words, "num_local_experts"), per_token, width, width, dense)
    return None


def _quantization(config: Mapping[str, Any], dtype_bytes: int) -> tuple[str | None, float]:
    """The name of the scheme, and bytes per parameter of the linear layers: embeddings, norms and routers stay as they
    are. Raises ValueError for a scheme that is not known.
    """
    scheme = config.get("quantization_config")
    if scheme is None:
        return None, dtype_bytes
    if not isinstance(scheme, Mapping):
        raise ValueError(f"config.json: quantization_config is {scheme!r}; an object is needed")
    method = scheme.get("quant_method")
    if method in INTEGER_METHODS:
        return method, _integer_bytes(scheme)
    if method in (*SCALED_METHODS, MXFP4):
        return method, dtype_bytes  # of which what is stored otherwise is taken off, one by one
    if method != "fp8":
        known = ", ".join(map(repr, ("fp8", *INTEGER_METHODS, *SCALED_METHODS, MXFP4)))
        raise ValueError(f"config.json: quant_method {method!r} is not known; known are {known}")
    block = scheme.get("weight_block_size")
    if block is None:
        return FP8_BY_TENSOR, dtype_bytes
    if not isinstance(block, list) or len(block) != 2 or not all(_is_whole(n) and 0 < n <= MAX_COUNT for n in block):
        raise ValueError(
            f"config.json: quantization_config: weight_block_size is {block!r}; a list of two whole numbers of 1 or "
            f"more, such as [{FP8_BLOCK}, {FP8_BLOCK}], is needed"
        )
    return "fp8", 1 + SCALE_BYTES / (block[0] * block[1])


def _stored_apart(config: Mapping[str, Any]) -> Stored | None:
    """What projections take one by one where their parts are not stored alike; None: they are. Raises ValueError."""
    scheme = config.get("quantization_config")
    if scheme is None:
        return None
    method = scheme["quant_method"]
    if method == MXFP4:
        return mxfp4_bytes
    is_by_tensor = method == "fp8" and scheme.get("weight_block_size") is None
    return bytes_of(scaled_weights(scheme)) if is_by_tensor or method in SCALED_METHODS else None


def _integer_bytes(scheme: Mapping[str, Any]) -> float:
    """Bytes per parameter: its bits, and its share of a group's scale in float16 and zero point of as many bits."""
    bits, size = scheme.get("bits", 4), scheme.get("group_size", 128)
    if not _is_whole(bits) or bits not in INTEGER_BITS:
        raise ValueError(
            f"config.json: quantization_config: bits is {bits!r}; one of {', '.join(map(str, INTEGER_BITS))} is needed"
        )
    width = int(bits) / 8
    if size == -1:
        return width
    if not _is_whole(size) or not 0 < size <= MAX_COUNT:
        raise ValueError(
            f"config.json: quantization_config: group_size is {size!r}; a whole number of 1 or more is needed, or -1"
        )
    return width + (2 + width) / int(size)


def _is_run(scheme: Mapping[str, Any] | None, architecture: str, head_size: int) -> bool:
    """Whether the engine runs weights that are stored so: as they are, and of most families as fp8 in blocks of
    128 x 128 in the one form that it knows, of which a head is a whole part, as AWQ's and GPTQ's integers of 4 bits, or
    with scales as compressed-tensors, AutoFP8 and ModelOpt store them; gpt-oss in mxfp4.
    """
    if scheme is None:
        return True
    method = scheme["quant_method"]
    if method == MXFP4:
        return architecture == "GptOssForCausalLM"
    if architecture in UNQUANTISED_ALONE:
        return False
    if method in SCALED_METHODS or (method == "fp8" and scheme.get("weight_block_size") is None):
        return scaled_weights(scheme).is_built
    if not all(_is_built(scheme, *words) for words in BUILT_WORDS[method]):
        return False
    blocks = scheme.get("weight_block_size")
    return method in INTEGER_METHODS or (blocks == [FP8_BLOCK, FP8_BLOCK] and FP8_BLOCK % head_size == 0)


def _is_built(scheme: Mapping[str, Any], key: str, built: tuple[Any, ...]) -> bool:
    value = scheme.get(key, built[0])
    return value in built and isinstance(value, bool) == isinstance(built[0], bool)


def _windows(words: Mapping[str, Any], architecture: str, num_layers: int) -> list[int | None]:
    """Per layer how many tokens a token sees at most; None: all. Mistral's window is every layer's, and none where no
    request can leave it, as Llama 4's chunks are; of the others `layer_types` say which layers have one, or all but
    every so many do.
    """
    if architecture.startswith("Llama4"):
        return _chunks(words, num_layers)
    window = words.get("sliding_window") if architecture.startswith(("Mistral", "Gemma3", "GptOss")) else None
    if window is None:
        return [None] * num_layers
    window = _count(words, "sliding_window")
    if architecture == "MistralForCausalLM":
        return [window if window < _count(words, "max_position_embeddings") else None] * num_layers
    pattern = _count(words, "sliding_window_pattern")
    types = words.get("layer_types")
    if types is None:
        types = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise ValueError(f"config.json: layer_types is {types!r:.100}; a list of {num_layers} is needed")
    return [window if kind == "sliding_attention" else None for kind in types]


def _chunks(words: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """Per layer the chunk of positions of which a token sees its own; None: it sees all before it."""
    interval = _count(words, "no_rope_layer_interval")
    turned = words.get("no_rope_layers") or [(layer + 1) % interval for layer in range(num_layers)]
    types = words.get("layer_types") or ["chunked_attention" if turns else "full_attention" for turns in turned]
    if not isinstance(types, list) or len(types) != num_layers:
        raise ValueError(f"config.json: layer_types or no_rope_layers: a list of {num_layers} is needed")
    if "chunked_attention" not in types:
        return [None] * num_layers
    size = _count(words, "attention_chunk_size")
    chunk = size if size < _count(words, "max_position_embeddings") else None
    return [chunk if kind == "chunked_attention" else None for kind in types]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _layers(words: Mapping[str, Any], key: str) -> set[int]:
    value = words.get(key)
    if value is not None and not (isinstance(value, list) and all(_is_whole(n) for n in value)):
        raise ValueError(f"config.json: {key} is {value!r}; a list of whole numbers is needed")
    return set(value or ())


def _count(
    words: Mapping[str, Any], key: str, *, default: int | None = None, least: int = 1, most: int = MAX_COUNT
) -> int:
    value = words.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"config.json: {key} is {value!r}; a whole number of {least} or more is needed")
    if value > most:
        raise ValueError(f"config.json: {key} is {value}; a whole number of {least} to {most} is needed")
    return value
