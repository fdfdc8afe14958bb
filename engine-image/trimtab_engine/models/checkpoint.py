"""Expected tensors of a checkpoint: names and shapes derived from the configuration, checked before any weight is
read.
"""

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.quantization import BLOCK, SCALE_SUFFIX, stored_quantization
from trimtab_modelspec.tensors import PROJECTION, Tensors, num_elements

from trimtab_engine.errors import ModelError
from trimtab_engine.models.registry import family_of
from trimtab_engine.weights.four_bits import FourBitsSource
from trimtab_engine.weights.source import WeightSource

IGNORED_SUFFIX = "rotary_emb.inv_freq"  # old checkpoints store values that the configuration gives
KV_SCALE_SUFFIXES = (".k_scale", ".v_scale", "k_proj.output_scale", "v_proj.output_scale")
"""Scales of keys and values in a float8 KV cache."""
OTHER_SCALES = (".q_scale", ".q_proj.output_scale", ".prob_scale", ".k_zero_point", ".v_zero_point")
"""Scales of attention inputs that are not quantised here."""
Shapes = dict[str, tuple[int, ...]]


def expected_tensors(config: ModelConfig) -> Tensors:
    """Every tensor of a checkpoint with this configuration."""
    return family_of(config.architecture).tensors(config)


def expected_shapes(config: ModelConfig) -> Shapes:
    """Name and shape of every tensor of a checkpoint with this configuration."""
    return {name: tensor.shape for name, tensor in expected_tensors(config).items()}


def num_parameters(config: ModelConfig) -> int:
    """Weights of the model; tied embeddings count once."""
    return num_elements(expected_tensors(config).values())


def _scale_shapes(expected: Shapes) -> Shapes:
    """The scales of projections that are stored as fp8 in blocks."""
    return {
        name + SCALE_SUFFIX: (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        for name, shape in expected.items()
        if name.endswith(PROJECTION)
    }


def check_counts(config: ModelConfig, source: WeightSource) -> None:
    """Raise ModelError where there are fewer tensors than layers and experts: before the names of all are listed."""
    num_found, num_experts, num_mixtures = len(source.shapes()), 0, 0
    if config.moe is not None:
        num_experts = 1 if config.moe.is_stacked else config.moe.num_experts
        num_mixtures = config.num_layers - len(config.moe.dense_layers)
    if max(config.num_layers, num_mixtures * num_experts) > num_found:
        raise ModelError(
            f"{source.where}: implies {config.num_layers} layers{f' and {num_experts} experts' * bool(num_experts)}, "
            f"but there are {num_found} tensors in all"
        )


def check_tensors(config: ModelConfig, source: WeightSource) -> None:
    """Raise ModelError unless the checkpoint has exactly the tensors that this architecture uses."""
    found = source.shapes()
    check_counts(config, source)
    if family_of(config.architecture).renames_tensors:
        return
    expected = expected_shapes(config)
    drafting = tuple(f"model.layers.{config.num_layers + layer}." for layer in range(config.num_draft_layers))
    scales = _scale_shapes(expected) if stored_quantization(source.config, source.where) else {}
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(
        name
        for name in found.keys() - expected.keys()
        if not name.endswith((IGNORED_SUFFIX, *KV_SCALE_SUFFIXES, *OTHER_SCALES))
        and not name.startswith(drafting)
        and name not in scales
        and not (name == "lm_head.weight" and config.tie_word_embeddings)
        and not _is_idle_bias(source, name)
    )
    if missing:
        raise _lacking(source, missing)
    if extra:
        raise ModelError(
            f"{source.where}: the weights hold {len(extra)} tensors that {config.architecture} does not use, first "
            f"{extra[0]}; this variant is not supported"
        )
    _check_shapes(source, expected | {name: scales[name] for name in scales.keys() & found.keys()})


def _is_idle_bias(source: WeightSource, name: str) -> bool:
    """Return True if the tensor is an all-zero bias, which GPTQ's tools add to every quantised weight."""
    if not isinstance(source, FourBitsSource) or not name.endswith(".bias"):
        return False
    return source.is_in_words(f"{name.removesuffix('.bias')}.weight") and not source.tensor(name).any()


def check_vision_encoder(expected: Shapes, source: WeightSource) -> None:
    """Raise ModelError unless the vision encoders of a checkpoint are the tensors that are expected."""
    found = source.shapes()
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise _lacking(source, missing)
    if extra:
        raise ModelError(
            f"{source.where}: the vision encoder has {len(extra)} unused tensors, first {extra[0]}; this variant is "
            f"not supported"
        )
    _check_shapes(source, expected)


def check_head(expected: Shapes, source: WeightSource) -> None:
    """Raise ModelError unless a draft head's tensors are the expected ones."""
    found = source.shapes()
    scales = _scale_shapes(expected) if stored_quantization(source.config, source.where) else {}
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(name for name in found.keys() - expected.keys() - scales.keys() if not name.endswith(IGNORED_SUFFIX))
    if missing:
        raise _lacking(source, missing)
    if extra:
        raise ModelError(
            f"{source.where}: the head that drafts has {len(extra)} tensors that are not used, first {extra[0]}; this "
            f"variant is not supported"
        )
    _check_shapes(source, expected)


def _lacking(source: WeightSource, missing: list[str]) -> ModelError:
    return ModelError(f"{source.where}: the weights lack {len(missing)} tensors, first {missing[0]}")


def _check_shapes(source: WeightSource, expected: Shapes) -> None:
    found = source.shapes()
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(f"{source.where}: tensor {name} is {list(found[name])}, config.json implies {list(shape)}")
