"""Flags that configure the engine itself, with or without a server, and their conversion to `EngineConfig`."""

import argparse
from collections.abc import Mapping
from typing import Any, Literal

from trimtab_engine.config.auto_block_size import auto_block_size
from trimtab_engine.config.engine import BLOCK_SIZES, EngineConfig, first_visible_gpu
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags import parser as types
from trimtab_engine.flags.adapters import adapter_config, add_adapter_flags
from trimtab_engine.flags.experts import eplb_fields
from trimtab_engine.flags.graphs import add_graph_flags, graph_fields
from trimtab_engine.flags.live import add_scheduling_flags, live_values
from trimtab_engine.flags.media import add_media_flags, media_fields
from trimtab_engine.flags.parallel import add_parallel_flags, parallel_fields
from trimtab_engine.flags.pooling import add_pooling_flags, pooling_fields
from trimtab_engine.flags.sources import add_source_flags
from trimtab_engine.flags.speculation import add_speculative_flags, speculative_fields
from trimtab_engine.models.registry import longest_request, open_model, takes_images, takes_images_on_cuda
from trimtab_engine.sources.name import SCHEMES
from trimtab_engine.weights.open import not_loaded_from

DTYPE_ALIASES = {"half": "float16", "float": "float32"}
LARGE_GPU_BYTES = 70 << 30  # vLLM's larger defaults apply from this size
DEFAULT_LIMITS = {"cpu": (128, 2048), "cuda": (256, 2048), "large": (1024, 8192)}
"""Default (max_num_seqs, max_num_batched_tokens) by device class."""


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `engine_config()` reads."""
    _add_model_flags(parser.add_argument_group("model"))
    add_pooling_flags(parser.add_argument_group("generation or pooling"))
    add_source_flags(parser.add_argument_group("remote models (hf://…, s3://…, oci://…)"))
    _add_device_flags(parser.add_argument_group("device and memory"))
    add_parallel_flags(parser.add_argument_group("parallel layout"))
    _add_scheduler_flags(parser.add_argument_group("scheduler"))
    add_speculative_flags(parser.add_argument_group("speculative decoding"))
    add_adapter_flags(parser.add_argument_group("adapters (LoRA)"))
    add_media_flags(parser.add_argument_group("images and videos"))
    add_graph_flags(parser.add_argument_group("CUDA graphs"))
    parser.add_argument_group("profiling").add_argument(
        "--profiler-dir",
        metavar="DIR",
        help="directory for Chrome traces; enables POST /start_profile and /stop_profile on the admin port (default: "
        "off)",
    )


def _add_model_flags(group: Any) -> None:
    group.add_argument("--model", dest="model_flag", metavar="MODEL", help="same as the positional argument MODEL")
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="model name(s) that clients use (default: the last part of MODEL)",
    )
    group.add_argument("--tokenizer", metavar="PATH", help="folder with the tokenizer (default: the model's folder)")
    group.add_argument(
        "--load-format",
        choices=("auto", "safetensors", "gguf", "dummy"),
        default="auto",
        help="weight format; dummy: random weights, only config.json is needed (default: auto)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16", *DTYPE_ALIASES),
        default="auto",
        help="dtype of weights and activations; auto: float32 on the CPU, the checkpoint's on CUDA; half and float: "
        "float16 and float32 (default: auto)",
    )
    group.add_argument(
        "--quantization",
        "-q",
        type=types.quantization,
        metavar="METHOD",
        help="quantization method; fp8: quantize the layers' projections while loading; the checkpoint's own method is "
        "accepted (default: the checkpoint's)",
    )
    group.add_argument(
        "--max-model-len",
        type=types.model_len,
        metavar="TOKENS",
        help="maximum prompt plus output length in tokens, such as 8192, 8k or auto (the longest that fits) "
        "(default: the model's)",
    )
    group.add_argument(
        "--seed",
        type=types.not_negative,
        default=0,
        help="random seed of dummy weights and of requests without a seed (default: 0)",
    )


def _add_device_flags(group: Any) -> None:
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device; auto: CUDA if available (default: auto)",
    )
    group.add_argument(
        "--device-memory-bytes",
        type=types.quantity,
        metavar="SIZE",
        help="device memory size, such as 1500Mi (default: the container's limit; on CUDA the device's)",
    )
    group.add_argument(
        "--cpu-threads",
        type=types.threads,
        metavar="N",
        help="number of CPU operator threads (default: the container's CPU limit)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        "--device-memory-utilization",
        default="0.9",
        metavar="FRACTION",
        help="fraction of device memory to use; live (default: 0.9)",
    )
    group.add_argument(
        "--gpu-memory-utilization-cap",
        metavar="FRACTION",
        help="upper bound for live changes (default: the start value)",
    )
    group.add_argument(
        "--kv-cache-memory-bytes",
        "--kv-cache-memory",
        type=types.quantity,
        metavar="SIZE",
        help="fixed KV cache size, such as 4Gi; disables live changes of the utilization",
    )
    group.add_argument(
        "--num-gpu-blocks-override",
        type=types.positive,
        metavar="N",
        help="fixed number of KV blocks; disables live changes of the utilization",
    )
    group.add_argument(
        "--kv-cache-dtype",
        type=types.kv_cache_dtype,
        default="auto",
        metavar="DTYPE",
        help="dtype of the KV cache: auto (the model's), float32, bfloat16, float16, fp8 (fp8_e4m3) or fp8_e5m2 "
        "(default: auto)",
    )
    group.add_argument(
        "--block-size",
        type=types.block_size,
        default=16,
        metavar="TOKENS",
        help="tokens per KV block: a power of two from 8 to 256, or auto, by the longest request (default: 16)",
    )


def _add_scheduler_flags(group: Any) -> None:
    group.add_argument(
        "--max-num-seqs",
        type=types.positive,
        metavar="N",
        help="maximum number of running requests; live (default: 128 on the CPU, 256 or 1024 on CUDA)",
    )
    group.add_argument(
        "--max-num-seqs-cap",
        type=types.positive,
        metavar="N",
        help="upper bound for live changes (default: the start value)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=types.positive,
        metavar="N",
        help="maximum number of tokens per step; live (default: 2048, on a large GPU 8192)",
    )
    group.add_argument(
        "--max-num-batched-tokens-cap",
        type=types.positive,
        metavar="N",
        help="upper bound for live changes (default: the start value)",
    )
    group.add_argument(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="split prompts over several steps; off: only whole prompts are scheduled (default: on)",
    )
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="schedule the next step while the device runs the current one (default: on with CUDA, off on the CPU, "
        "where both would compete for the same cores)",
    )
    add_scheduling_flags(group)


def engine_config(
    arguments: argparse.Namespace, limits: Mapping[str, tuple[int, int]] = DEFAULT_LIMITS
) -> EngineConfig:
    """Return the engine core's configuration. `limits` has the structure of DEFAULT_LIMITS.

    Raises:
        ConfigError: Flags contradict each other.
    """
    model = named_model(arguments)
    device = _device(arguments.device)
    kind, gpu_bytes = device
    defaults = limits["large" if gpu_bytes >= LARGE_GPU_BYTES else kind]
    num_seqs, num_tokens = _limits(arguments, defaults)
    utilization, speculation = arguments.gpu_memory_utilization, speculative_fields(arguments)
    speculative = speculation["speculative"]
    is_with_text = speculative is not None and speculative.reads_hidden_states
    sees_built = not is_with_text and (kind == "cpu" or takes_images_on_cuda(model))
    return EngineConfig(
        model=model,
        tokenizer=arguments.tokenizer,
        load_format=arguments.load_format,
        dtype=DTYPE_ALIASES.get(arguments.dtype, arguments.dtype),
        device="cuda" if kind == "cuda" else "cpu",
        device_memory_bytes=arguments.device_memory_bytes,
        cpu_threads=arguments.cpu_threads,
        max_model_len=arguments.max_model_len,
        kv_cache_dtype=arguments.kv_cache_dtype,
        quantization=_quantization(arguments, model),
        block_size=_block_size(arguments, model, num_seqs),
        gpu_memory_utilization=utilization,
        gpu_memory_utilization_cap=arguments.gpu_memory_utilization_cap or utilization,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
        num_gpu_blocks_override=arguments.num_gpu_blocks_override,
        max_num_seqs=num_seqs,
        max_num_seqs_cap=arguments.max_num_seqs_cap or num_seqs,
        max_num_batched_tokens=num_tokens,
        max_num_batched_tokens_cap=arguments.max_num_batched_tokens_cap or num_tokens,
        enable_chunked_prefill=arguments.enable_chunked_prefill,
        async_scheduling=arguments.async_scheduling,
        **live_values(arguments, kind),
        seed=arguments.seed,
        **pooling_fields(arguments),
        **speculation,
        **parallel_fields(arguments),
        **eplb_fields(arguments),
        adapters=adapter_config(arguments),
        **graph_fields(arguments),
        **media_fields(arguments, takes_images=takes_images(model), is_built=sees_built),
        profiler_dir=arguments.profiler_dir,
    )


def _quantization(arguments: argparse.Namespace, model: str) -> Literal["fp8"] | None:
    """Return the method to quantize with while loading. None if the flag names the method of the checkpoint.

    Raises:
        ConfigError: The checkpoint is stored in another method.
    """
    method = arguments.quantization
    if method is None or method == "fp8":
        return method  # type: ignore[no-any-return]
    scheme = open_model(model, arguments.load_format).config.get("quantization_config")
    stored = "gguf" if model.endswith(".gguf") else scheme.get("quant_method") if isinstance(scheme, Mapping) else None
    if stored != types.STORED_METHODS[method]:
        raise ConfigError(f"--quantization {method}: the checkpoint is {stored or 'not quantized'}; remove the flag")
    return None


def _limits(arguments: argparse.Namespace, defaults: tuple[int, int]) -> tuple[int, int]:
    """Return (max_num_seqs, max_num_batched_tokens), lowering a default so that it fits the value that was set."""
    num_seqs, num_tokens = arguments.max_num_seqs, arguments.max_num_batched_tokens
    if num_tokens is None:
        cap = arguments.max_num_batched_tokens_cap
        num_tokens = max(min(defaults[1], cap or defaults[1]), num_seqs or 1)
    if num_seqs is None:
        cap = arguments.max_num_seqs_cap
        num_seqs = min(defaults[0], cap or defaults[0], num_tokens)
    return num_seqs, num_tokens


def _block_size(arguments: argparse.Namespace, model: str, num_seqs: int) -> int:
    """Return the block size; auto derives it from the longest request and max_num_seqs.

    Raises:
        ModelError: The model is needed but cannot be read.
    """
    if arguments.block_size != "auto":
        return int(arguments.block_size)
    longest = arguments.max_model_len
    if not isinstance(longest, int):
        source = open_model(model, arguments.load_format)
        longest = longest_request(source.config, source.generation_config, source.where)
    chosen = auto_block_size(longest, max_num_seqs=arguments.max_num_seqs_cap or num_seqs)
    return min(chosen, max(BLOCK_SIZES))


def named_model(arguments: argparse.Namespace) -> str:
    """Return the model's path or remote name from the command line or its config file.

    Raises:
        ConfigError: No model or two models are given, or the name is invalid.
    """
    model = arguments.model or arguments.model_flag or getattr(arguments, "model_of_file", None)
    if not model:
        raise ConfigError("no model; give its folder or .gguf file with --model, or as the argument MODEL of serve")
    if arguments.model and arguments.model_flag and arguments.model != arguments.model_flag:
        raise ConfigError(f"conflicting models {arguments.model} and --model {arguments.model_flag}; set only one")
    path: str = model
    if path.startswith("file://"):
        return path.removeprefix("file://")
    if "://" in path and not path.startswith(SCHEMES):
        raise ConfigError(not_loaded_from(path))
    return path


def _device(requested: str) -> tuple[str, int]:
    """Return "cpu" or "cuda", and the first GPU's memory in bytes. Uses NVML, because this process must not import
    torch.
    """
    gpu_bytes = 0 if requested == "cpu" else _first_gpu_bytes()
    if requested == "cuda" and not gpu_bytes:
        raise ConfigError("--device: no NVIDIA GPU is visible (cuda); use --device cpu")
    return ("cuda" if gpu_bytes else "cpu"), gpu_bytes


def _first_gpu_bytes() -> int:
    import pynvml

    gpu = first_visible_gpu()
    if gpu is None:
        return 0
    try:
        pynvml.nvmlInit()
        find = pynvml.nvmlDeviceGetHandleByIndex if isinstance(gpu, int) else pynvml.nvmlDeviceGetHandleByUUID
        total = int(pynvml.nvmlDeviceGetMemoryInfo(find(gpu)).total)
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0
    return total
