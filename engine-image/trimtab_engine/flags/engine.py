"""The flags of the engine itself, served or not, and the configuration that they become."""

import argparse
from collections.abc import Mapping
from typing import Any

from trimtab_engine.config.auto_block_size import auto_block_size
from trimtab_engine.config.engine import BLOCK_SIZES, EngineConfig, first_visible_gpu
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags import parser as types
from trimtab_engine.flags.adapters import adapter_config, add_adapter_flags
from trimtab_engine.flags.experts import eplb_fields
from trimtab_engine.flags.graphs import add_graph_flags, graph_fields
from trimtab_engine.flags.live import add_scheduling_flags, live_values
from trimtab_engine.flags.media import add_media_flags, media_fields
from trimtab_engine.flags.not_built import add_not_built
from trimtab_engine.flags.parallel import add_parallel_flags, parallel_fields
from trimtab_engine.flags.pooling import add_pooling_flags, pooling_fields
from trimtab_engine.flags.sources import add_source_flags
from trimtab_engine.flags.speculation import add_speculative_flags, speculative_fields
from trimtab_engine.models.registry import longest_request, open_model, sees_images, sees_on_cuda
from trimtab_engine.sources.name import SCHEMES
from trimtab_engine.weights.open import not_loaded_from

LARGE_GPU_BYTES = 70 << 30  # from here on vLLM's larger defaults hold
DEFAULT_LIMITS = {"cpu": (128, 2048), "cuda": (256, 2048), "large": (1024, 8192)}
"""max_num_seqs and max_num_batched_tokens by kind of device."""


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """What the engine itself is configured with, served or not: what engine_config() reads."""
    _add_model_flags(parser.add_argument_group("model"))
    add_pooling_flags(parser.add_argument_group("tokens or vectors"))
    add_source_flags(parser.add_argument_group("models that are fetched (hf://…, s3://…, oci://…)"))
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
        help="allow profiles (POST /start_profile and /stop_profile on the admin port), written there as Chrome traces",
    )
    add_not_built(parser)


def _add_model_flags(group: Any) -> None:
    group.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same as the argument MODEL")
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="name(s) that clients use (default: the last part of MODEL)",
    )
    group.add_argument(
        "--tokenizer", metavar="PATH", help="folder with the tokenizer, when it is not beside the weights"
    )
    group.add_argument(
        "--load-format",
        choices=("auto", "safetensors", "gguf", "dummy"),
        default="auto",
        help="dummy: random weights from config.json alone (default: auto)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="auto: float32 on the CPU, the checkpoint's on CUDA (default: auto)",
    )
    group.add_argument(
        "--quantization",
        "-q",
        type=types.quantization,
        metavar="METHOD",
        help="fp8: quantise the layers' projections as they load (default: as the checkpoint has them)",
    )
    group.add_argument(
        "--max-model-len",
        type=types.model_len,
        metavar="TOKENS",
        help="longest prompt plus output, such as 8192, 8k or auto, the longest that fits (default: the model's)",
    )
    group.add_argument(
        "--seed",
        type=types.not_negative,
        default=0,
        help="seed of dummy weights and of requests that bring none (default: 0)",
    )


def _add_device_flags(group: Any) -> None:
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA when there is one (default: auto)"
    )
    group.add_argument(
        "--device-memory-bytes",
        type=types.quantity,
        metavar="SIZE",
        help="how large the device is, such as 1500Mi (default: the container's limit; on CUDA the device's)",
    )
    group.add_argument(
        "--cpu-threads",
        type=types.threads,
        metavar="N",
        help="threads of CPU operators (default: the CPUs that the container may use)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        default="0.9",
        metavar="SHARE",
        help="share of the device to use; live (default: 0.9)",
    )
    group.add_argument(
        "--gpu-memory-utilization-cap", metavar="SHARE", help="how far it may be raised live (default: the start value)"
    )
    group.add_argument(
        "--kv-cache-memory-bytes",
        "--kv-cache-memory",
        type=types.quantity,
        metavar="SIZE",
        help="fix the KV cache's size; the utilisation is then not live",
    )
    group.add_argument(
        "--num-gpu-blocks-override", type=types.positive, metavar="N", help="fix the number of KV blocks, likewise"
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
        help="tokens in a KV block: a power of two from 8 to 256, or auto, by the longest request (default: 16)",
    )


def _add_scheduler_flags(group: Any) -> None:
    group.add_argument(
        "--max-num-seqs",
        type=types.positive,
        metavar="N",
        help="how many requests run at once; live (default: 128 on the CPU, 256 or 1024 on CUDA)",
    )
    group.add_argument(
        "--max-num-seqs-cap",
        type=types.positive,
        metavar="N",
        help="how far it may be raised live (default: the start value)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=types.positive,
        metavar="N",
        help="token budget of a step; live (default: 2048, on a large GPU 8192)",
    )
    group.add_argument(
        "--max-num-batched-tokens-cap",
        type=types.positive,
        metavar="N",
        help="how far it may be raised live (default: the start value)",
    )
    group.add_argument(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="off: only whole prompts are admitted (default: on)",
    )
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="schedule the next step while the device works on one (default: on with CUDA; on the CPU both want the "
        "same cores)",
    )
    add_scheduling_flags(group)


def engine_config(
    arguments: argparse.Namespace, limits: Mapping[str, tuple[int, int]] = DEFAULT_LIMITS
) -> EngineConfig:
    """The core's configuration. Raises ConfigError where values contradict each other. `limits`: as DEFAULT_LIMITS."""
    model = named_model(arguments)
    device = _device(arguments.device)
    kind, gpu_bytes = device
    defaults = limits["large" if gpu_bytes >= LARGE_GPU_BYTES else kind]
    num_seqs, num_tokens = _limits(arguments, defaults)
    utilization, speculation = arguments.gpu_memory_utilization, speculative_fields(arguments)
    speculative = speculation["speculative"]
    is_with_text = speculative is not None and speculative.reads_hidden_states
    sees_built = not is_with_text and (kind == "cpu" or sees_on_cuda(model))
    return EngineConfig(
        model=model,
        tokenizer=arguments.tokenizer,
        load_format=arguments.load_format,
        dtype=arguments.dtype,
        device="cuda" if kind == "cuda" else "cpu",
        device_memory_bytes=arguments.device_memory_bytes,
        cpu_threads=arguments.cpu_threads,
        max_model_len=arguments.max_model_len,
        kv_cache_dtype=arguments.kv_cache_dtype,
        quantization=arguments.quantization,
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
        **media_fields(arguments, sees_images=sees_images(model), is_built=sees_built),
        profiler_dir=arguments.profiler_dir,
    )


def _limits(arguments: argparse.Namespace, defaults: tuple[int, int]) -> tuple[int, int]:
    """Defaults give way to what was written: fewer tokens than the default seats means fewer seats, and so on."""
    num_seqs, num_tokens = arguments.max_num_seqs, arguments.max_num_batched_tokens
    if num_tokens is None:
        cap = arguments.max_num_batched_tokens_cap
        num_tokens = max(min(defaults[1], cap or defaults[1]), num_seqs or 1)
    if num_seqs is None:
        cap = arguments.max_num_seqs_cap
        num_seqs = min(defaults[0], cap or defaults[0], num_tokens)
    return num_seqs, num_tokens


def _block_size(arguments: argparse.Namespace, model: str, num_seqs: int) -> int:
    """auto: from the longest request and the most requests at once. Raises ModelError where the model is needed and
    cannot be read."""
    if arguments.block_size != "auto":
        return int(arguments.block_size)
    longest = arguments.max_model_len
    if not isinstance(longest, int):
        source = open_model(model, arguments.load_format)
        longest = longest_request(source.config, source.generation_config, source.where)
    chosen = auto_block_size(longest, max_num_seqs=arguments.max_num_seqs_cap or num_seqs)
    return min(chosen, max(BLOCK_SIZES))


def named_model(arguments: argparse.Namespace) -> str:
    """The path, or model that is fetched, that the command line or its file names. Raises ConfigError for none, two,
    or what is neither."""
    model = arguments.model or arguments.model_flag or getattr(arguments, "model_of_file", None)
    if not model:
        raise ConfigError("no model; name its folder or .gguf file with --model, or as MODEL of serve")
    if arguments.model and arguments.model_flag and arguments.model != arguments.model_flag:
        raise ConfigError(f"two models, {arguments.model} and --model {arguments.model_flag}; give one")
    path: str = model
    if path.startswith("file://"):
        return path.removeprefix("file://")
    if "://" in path and not path.startswith(SCHEMES):
        raise ConfigError(not_loaded_from(path))
    return path


def _device(asked: str) -> tuple[str, int]:
    """("cpu" or "cuda", bytes of the first GPU). NVML answers without torch, which this process never imports."""
    gpu_bytes = 0 if asked == "cpu" else _first_gpu_bytes()
    if asked == "cuda" and not gpu_bytes:
        raise ConfigError("--device is cuda, but no NVIDIA GPU is visible here; use --device cpu")
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
