"""Load one rank's model: checks, weights, vision encoder and adapters. Logs how the weights are held."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.kv_groups import KVGroup
from trimtab_modelspec.quantization import Quantization, stored_quantization, wanted_quantization
from trimtab_modelspec.tensors import num_elements

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.pooling import CheckpointPooling, Tasks, tasks_of
from trimtab_engine.config.vision import VisionConfig
from trimtab_engine.device.device import Device
from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.memory.sizing import Unmeasured, check_weights_fit, reserved_for_processes
from trimtab_engine.models.adapter_fit import bytes_of_adapters
from trimtab_engine.models.checkpoint import (
    KV_SCALE_SUFFIXES,
    check_tensors,
    check_vision_encoder,
    expected_shapes,
    expected_tensors,
)
from trimtab_engine.models.family import VisionEncoder
from trimtab_engine.models.loading import Loader, packed_source
from trimtab_engine.models.pooler import pooling_of
from trimtab_engine.models.registry import (
    architecture_of,
    family_of,
    has_output_layer,
    kv_groups_of,
    open_model,
    open_vision_encoder,
    parse_model_config,
    parse_vision_config,
    vision_encoder_of,
)
from trimtab_engine.models.vision_shard import VisionEncoderShard
from trimtab_engine.models.weight_memory import weight_memory_bytes
from trimtab_engine.parallel.groups import SINGLE_RANK, RankGroups
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.parallel.shard import ModelShard, shard_model
from trimtab_engine.runner.adapters import AdapterSlots, reads_slots
from trimtab_engine.runner.model_runner import DTYPES, KV_DTYPES, ONE_RANK, ModelFacts, ModelRunner, Progress, ReadModel
from trimtab_engine.text.end_of_sequence import tokenizer_eos_id
from trimtab_engine.weights.dummy import DummySource
from trimtab_engine.weights.four_bits import FourBitsSource
from trimtab_engine.weights.mxfp4 import Mxfp4Source
from trimtab_engine.weights.open import model_path
from trimtab_engine.weights.scaled import ScaledSource
from trimtab_engine.weights.source import WeightSource

MIN_MODEL_LEN = 2  # a token of a prompt and one of its answer
logger = logging.getLogger("trimtab_engine.core")
FLOAT8_E4M3_CAPABILITY = (8, 9)  # minimum compute capability for which Triton converts this format
Runner = TypeVar("Runner", bound=ModelRunner)


def load_model_runner(
    kind: type[Runner],
    config: EngineConfig,
    device: Device,
    progress: Progress,
    *,
    layout: Layout = ONE_RANK,
    rank: int = 0,
    groups: RankGroups = SINGLE_RANK,
) -> Runner:
    """Read one rank's weights and build its runner. `progress` receives ("weights", percent of them). Raises ModelError
    or ConfigError.
    """
    torch.manual_seed(config.seed)  # the generator of requests without a seed
    source, model_config = _open_checkpoint(config)
    tasks = _tasks(config, source, model_config)
    vision = _vision(config, source, model_config)
    max_model_len = _max_model_len(config, model_config)
    shard = shard_model(
        model_config,
        layout,
        rank,
        placement=config.expert_placement_strategy,
        layer_partition=config.pipeline_layer_partition,
        num_redundant_experts=config.num_redundant_experts,
    )
    _check_device(model_config, device)
    kv_groups = _kv_groups(model_config, shard, layout)
    dtype = DTYPES[_dtype_name(config, model_config, device)]
    kv_dtype_name = _kv_dtype_name(config, dtype, device)
    kv_dtype = KV_DTYPES[kv_dtype_name]
    stored = stored_quantization(source.config, source.where)
    quantization = wanted_quantization(stored, config.quantization, has_weights=not isinstance(source, DummySource))
    tensors = expected_tensors(model_config)
    shares = layout.tensor if config.mm_encoder_tp_mode == "weights" else 1
    if vision is not None and shares > 1:
        VisionEncoderShard.of(vision, groups.tensor)  # raises before any weight is read
    tower_bytes = _vision_encoder_bytes(vision, model_config, dtype) // shares if shard.is_first_stage else 0
    num_parameters = -(-num_elements(tensors.values()) // layout.ranks_per_engine)  # about: ranks are not quite equal
    adapters_bytes = 0
    if config.adapters is not None:
        are_of_one_rank = reads_slots(device.torch)
        adapters_bytes = bytes_of_adapters(config.adapters, tensors, dtype.itemsize, are_of_one_rank=are_of_one_rank)
    unmeasured = Unmeasured(
        device_bytes=device.total_bytes,
        other_bytes=(
            reserved_for_processes(config, model_config.vocab_size) if device.kind == "cpu" else device.used_bytes()
        ),
        limit_bytes=device.limit_bytes,
        weights_bytes=(
            weight_memory_bytes(source, tensors, quantization, dtype, device.torch, config=model_config, shard=shard)
            + adapters_bytes
        )
        // layout.ranks_per_engine,
        tower_bytes=tower_bytes,
        kv_groups=kv_groups,
        kv_dtype_bytes=kv_dtype.itemsize,
        max_model_len=max_model_len,
    )
    check_weights_fit(config, unmeasured)
    adapters = None
    if config.adapters is not None:
        adapters = AdapterSlots(config.adapters, tensors, shard, dtype=dtype, device=device.torch)

    def build(source: WeightSource, report: Callable[[int], None]) -> ReadModel:
        device.before_weights()
        with torch.inference_mode():
            load = Loader(source, dtype, device.torch, report, quantization, adapters)
            model = family_of(model_config.architecture).build(model_config, load, shard, groups)
            if adapters is not None:
                adapters.open(model_config.architecture)
            tower = _load_vision_encoder(config, model_config, vision, load, groups) if shard.is_first_stage else None
        device.after_weights()
        log_restored_weights(load)
        return model, tower

    _log_weight_format(source, quantization, dtype, device.torch)
    _log_unused_kv_scales(source, kv_dtype)
    progress("weights", 0.0)
    source.map_files()  # before measuring, so that only the model's memory is counted
    with device.measure() as growth:
        loaded = build(source, _percent_reporter("weights", num_parameters, progress))
    facts = ModelFacts(
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(config, model_config),
        num_attention_heads=shard.num_heads,
        head_size=model_config.head_size,
        kv_groups=kv_groups,
        dtype=str(dtype).removeprefix("torch."),
        kv_cache_dtype=kv_dtype_name,
        kv_dtype_bytes=kv_dtype.itemsize,
        quantization=_quantization_name(source, quantization),
        weights_bytes=max(0, growth.kept),
        whole=model_config,
        tasks=tasks,
        vision=vision,
    )
    rebuild = lambda: build(_open_checkpoint(config)[0], lambda count: None)  # noqa: E731
    return kind(
        loaded,
        rebuild,
        facts,
        shard,
        groups,
        device,
        config.block_size,
        dtype,
        kv_dtype,
        config.eplb,
        divides_items=config.mm_encoder_tp_mode == "data",
        adapters=adapters,
    )


def _open_checkpoint(config: EngineConfig) -> tuple[WeightSource, ModelConfig]:
    """Open the checkpoint and check that it is complete.

    Raises:
        ModelError: If it is incomplete or unreadable.
    """
    source = open_model(config.model, config.load_format, seed=config.seed)
    model_config = parse_model_config(source.config, source.generation_config, source.where)
    if isinstance(source, DummySource):
        source.device = config.device
        source.expect(expected_shapes(model_config))
    check_tensors(model_config, source)
    return source, model_config


def _tasks(config: EngineConfig, source: WeightSource, model: ModelConfig) -> Tasks:
    """Return the supported tasks.

    Raises:
        ModelError, ConfigError: If the pooling configuration is invalid.
        NotSupportedError: If the checkpoint has unsupported modules after the model.
    """
    said = CheckpointPooling()
    if config.runner != "generate":
        said = pooling_of(model_path(config.model), source, config.pooler.pooling_type)
    return tasks_of(config.runner, config.pooler, said, model.hidden_size, has_output_layer=has_output_layer(source))


def _vision(config: EngineConfig, source: WeightSource, model: ModelConfig) -> VisionConfig | None:
    """Return the vision encoder's configuration. None if there is none or none is wanted.

    Raises:
        ModelError: If the configuration is invalid.
        NotSupportedError: If the encoder is not supported on this device.
    """
    kind = vision_encoder_of(model)
    if kind is None or not config.modalities or "vision_config" not in source.config:
        return None
    if config.device == "cuda" and kind.not_on_cuda:
        name = architecture_of(source.config, source.where)
        raise NotSupportedError(
            f"images and videos are not supported on CUDA for {name}: {kind.not_on_cuda}; serve text "
            f"""only, with --limit-mm-per-prompt '{{"image": 0, "video": 0}}', or use --device cpu"""
        )
    return parse_vision_config(source, model)


def _vision_encoder_bytes(vision: VisionConfig | None, model: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a whole vision encoder."""
    kind = vision_encoder_of(model)
    return 0 if kind is None or vision is None else num_elements(kind.tensors(vision).values()) * dtype.itemsize


def _load_vision_encoder(
    config: EngineConfig, model: ModelConfig, vision: VisionConfig | None, text: Loader, groups: RankGroups
) -> VisionEncoder | None:
    """Load the vision encoder, or this rank's share, in the dtype of the language model and never quantized."""
    kind = vision_encoder_of(model)
    if kind is None or vision is None:
        return None
    source = open_vision_encoder(config.model, config.load_format, seed=config.seed)
    shapes = {name: tensor.shape for name, tensor in kind.tensors(vision).items()}
    if isinstance(source, DummySource):
        source.device = config.device
        source.expect(shapes)
    if not kind.renames_tensors:
        check_vision_encoder(shapes, source)
    group = groups.tensor if config.mm_encoder_tp_mode == "weights" else None
    return kind.build(vision, Loader(source, text.dtype, text.device, lambda count: None), group)


def _check_device(model: ModelConfig, device: Device) -> None:
    """Raise NotSupportedError for a family without kernels for this device."""
    if device.kind == "cuda" and (lacking := family_of(model.architecture).not_on_cuda):
        raise NotSupportedError(f"{model.architecture} is not supported on CUDA: {lacking}; use --device cpu")


def _kv_groups(model: ModelConfig, shard: ModelShard, layout: Layout) -> tuple[KVGroup, ...]:
    """Return the KV groups of this rank.

    Raises:
        NotSupportedError: For unsupported KV geometry: supported are keys and values of one size in all groups, or
        latent vectors.
    """
    groups = kv_groups_of(model)
    described = ", ".join(map(_describe_kv_group, groups))
    if len({replace(group.each, window=None, is_chunked=False) for group in groups}) > 1 or any(
        group.each.value_size not in (group.each.key_size, 0) for group in groups
    ):
        raise NotSupportedError(
            f"the KV cache of {model.architecture} is not supported ({described}); supported: keys and values of one "
            f"size, or "
            f"latent vectors"
        )
    return tuple(group.on_rank(shard.layers, layout.tensor) for group in groups)


def _describe_kv_group(group: KVGroup) -> str:
    each = group.each
    attention_window = "with full attention"
    if each.window is not None:
        attention_window = f"with {'chunked attention' if each.is_chunked else 'a sliding window'} of {each.window}"
    return f"{group.num_layers} layers {attention_window}, key size {each.key_size}, value size {each.value_size}"


def _quantization_name(source: WeightSource, quantization: Quantization | None) -> str | None:
    """Return the display name of the weights' quantization."""
    if quantization is not None:
        return quantization.name
    return source.form.name if isinstance(source, FourBitsSource | ScaledSource | Mxfp4Source) else None


def _log_weight_format(
    source: WeightSource, quantization: Quantization | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Log how quantized weights are used: restored, or multiplied in their stored format."""
    if not isinstance(source, FourBitsSource | ScaledSource | Mxfp4Source):
        return
    if packed_source(source, dtype, device, quantization) is None:
        how = f"restored to {str(dtype).removeprefix('torch.')} while loading"
    else:
        how = "multiplied in their stored format; unsupported tensors are restored while loading and logged"
    logger.info("weights: %s, %s, %s", source.form.name, source.form.words, how)


def _log_unused_kv_scales(source: WeightSource, kv_dtype: torch.dtype) -> None:
    """Log that the checkpoint has KV scales that are not used."""
    if kv_dtype.itemsize > 1 and any(name.endswith(KV_SCALE_SUFFIXES) for name in source.shapes()):
        logger.info("KV cache: the checkpoint's key and value scales apply only to --kv-cache-dtype fp8; ignored")


def log_restored_weights(load: Loader) -> None:
    """Log which weights are held in a larger format than stored."""
    if load.restored:
        dtype = str(load.dtype).removeprefix("torch.")
        logger.info("weights restored to %s while loading: %s", dtype, ", ".join(load.restored))


def _eos_token_ids(config: EngineConfig, model: ModelConfig) -> tuple[int, ...]:
    """Return the end-of-sequence IDs of the configuration and, as vLLM does, of the tokenizer."""
    own = tokenizer_eos_id(config.tokenizer or config.model)
    known = (*model.eos_token_ids, *(() if own is None or own >= model.vocab_size else (own,)))
    return tuple(dict.fromkeys(known))


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Return the maximum request length, before memory is known.

    Raises:
        ConfigError: If it is out of range. No weight has been read.
    """
    if config.max_model_len == "auto":  # reduced to the available memory later (startup.py)
        return model.max_model_len
    longest = model.max_model_len if config.max_model_len is None else config.max_model_len
    if not MIN_MODEL_LEN <= longest <= model.max_model_len:
        raise ConfigError(
            f"--max-model-len is {longest}; set {MIN_MODEL_LEN} (one token of a prompt and one of an answer) to "
            f"{model.max_model_len}, the model's positions"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < longest:
        raise ConfigError(
            f"--no-enable-chunked-prefill admits whole prompts only, but --max-num-batched-tokens "
            f"{config.max_num_batched_tokens} is below max_model_len {longest}; raise it to {longest} or more, or "
            f"lower --max-model-len"
        )
    return longest


def _kv_dtype_name(config: EngineConfig, dtype: torch.dtype, device: Device) -> str:
    """Return the KV cache dtype by its flag value: auto is the model's, fp8 is fp8_e4m3."""
    name: str = config.kv_cache_dtype
    if name == "auto":
        return str(dtype).removeprefix("torch.")
    name = "fp8_e4m3" if name == "fp8" else name
    if name == "fp8_e4m3" and device.kind == "cuda":
        capability = torch.cuda.get_device_capability(device.torch)
        if capability < FLOAT8_E4M3_CAPABILITY:
            raise ConfigError(
                f"--kv-cache-dtype {config.kv_cache_dtype} needs a GPU of compute capability 8.9 or later, this one "
                f"has {capability[0]}.{capability[1]}; use fp8_e5m2, or auto"
            )
    return name


def _dtype_name(config: EngineConfig, model: ModelConfig, device: Device) -> str:
    """Return the dtype name. For auto: float32 on the CPU, where it multiplies fastest; the checkpoint's on CUDA."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device.kind == "cpu" else model.dtype


def _percent_reporter(stage: str, total: int, progress: Progress) -> Callable[[int], None]:
    """Return a callback that converts element counts to percent of a stage and reports each full percent."""
    done, reported = 0, 0

    def add(count: int) -> None:
        nonlocal done, reported
        done += count
        percent = min(100, 100 * done // total)
        if percent > reported:
            reported = percent
            progress(stage, float(percent))

    return add
