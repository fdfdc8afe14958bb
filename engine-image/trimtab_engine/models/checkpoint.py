"""What a checkpoint must hold: names and shapes by the configuration, checked before any weight is read."""

from trimtab_engine.config.model import ModelConfig
from trimtab_engine.config.quantization import BLOCK, SCALE_SUFFIX, stored_quantization
from trimtab_engine.errors import ModelError
from trimtab_engine.weights.source import WeightSource

IGNORED_SUFFIX = "rotary_emb.inv_freq"  # old checkpoints store what the configuration says
KV_SCALE_SUFFIXES = (".k_scale", ".v_scale")  # of keys and values in a float8 KV cache
Shapes = dict[str, tuple[int, ...]]


def expected_shapes(config: ModelConfig) -> Shapes:
    """Name and shape of every tensor of a checkpoint with this configuration."""
    hidden = config.hidden_size
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes |= _attention(config, prefix + "self_attn.")
        shapes |= (_mixture if config.is_moe_layer(layer) else _dense)(config, prefix + "mlp.")
    return shapes


def _attention(config: ModelConfig, prefix: str) -> Shapes:
    hidden, size = config.hidden_size, config.head_size
    heads, kv = config.num_attention_heads * size, config.num_kv_heads * size
    shapes = _projection(prefix + "q_proj", heads, hidden, config.qkv_bias)
    shapes |= _projection(prefix + "k_proj", kv, hidden, config.qkv_bias)
    shapes |= _projection(prefix + "v_proj", kv, hidden, config.qkv_bias)
    shapes |= _projection(prefix + "o_proj", hidden, heads, config.output_bias)
    if config.qk_norm:
        shapes |= {prefix + "q_norm.weight": (size,), prefix + "k_norm.weight": (size,)}
    return shapes


def _dense(config: ModelConfig, prefix: str) -> Shapes:
    hidden, wide = config.hidden_size, config.intermediate_size
    return {
        **_projection(prefix + "gate_proj", wide, hidden, config.mlp_bias),
        **_projection(prefix + "up_proj", wide, hidden, config.mlp_bias),
        **_projection(prefix + "down_proj", hidden, wide, config.mlp_bias),
    }


def _mixture(config: ModelConfig, prefix: str) -> Shapes:
    assert config.moe is not None
    hidden, wide = config.hidden_size, config.moe.intermediate_size
    shapes: Shapes = {prefix + "gate.weight": (config.moe.num_experts, hidden)}
    for expert in range(config.moe.num_experts):
        of_expert = f"{prefix}experts.{expert}."
        shapes |= {of_expert + "gate_proj.weight": (wide, hidden), of_expert + "up_proj.weight": (wide, hidden)}
        shapes[of_expert + "down_proj.weight"] = (hidden, wide)
    return shapes


def _projection(name: str, rows: int, columns: int, has_bias: bool) -> Shapes:
    weight: Shapes = {name + ".weight": (rows, columns)}
    return {**weight, name + ".bias": (rows,)} if has_bias else weight


def _scale_shapes(expected: Shapes) -> Shapes:
    """Of the projections that may be stored as fp8 in blocks."""
    return {
        name + SCALE_SUFFIX: (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        for name, shape in expected.items()
        if name.endswith("_proj.weight")
    }


def check_tensors(config: ModelConfig, source: WeightSource) -> None:
    """Raise ModelError unless the checkpoint has exactly the tensors that this architecture uses."""
    found = source.shapes()
    num_experts = 0 if config.moe is None else config.moe.num_experts
    if max(config.num_layers, num_experts) > len(found):  # before the names of so many are listed
        raise ModelError(
            f"{source.where}: implies {config.num_layers} layers{f' and {num_experts} experts' * bool(num_experts)}, "
            f"but there are {len(found)} tensors in all"
        )
    expected = expected_shapes(config)
    scales = _scale_shapes(expected) if stored_quantization(source.config, source.where) else {}
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(
        name
        for name in found.keys() - expected.keys()
        if not name.endswith((IGNORED_SUFFIX, *KV_SCALE_SUFFIXES))
        and name not in scales
        and not (name == "lm_head.weight" and config.tie_word_embeddings)
    )
    if missing:
        raise ModelError(f"{source.where}: the weights lack {len(missing)} tensors, first {missing[0]}")
    if extra:
        raise ModelError(
            f"{source.where}: the weights hold {len(extra)} tensors that {config.architecture} does not use, first "
            f"{extra[0]}; this variant is not built"
        )
    for name, shape in (expected | {name: scales[name] for name in scales.keys() & found.keys()}).items():
        if found[name] != shape:
            raise ModelError(f"{source.where}: tensor {name} is {list(found[name])}, config.json implies {list(shape)}")
