"""`trimtab-engine serve MODEL`: the flags of docs/contract.md section 1, and what they become."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab_engine.config.engine import BLOCK_SIZES, EngineConfig, first_visible_gpu
from trimtab_engine.config.flags import parser as types
from trimtab_engine.config.flags.experts import eplb_fields
from trimtab_engine.config.flags.graphs import add_graph_flags, graph_fields
from trimtab_engine.config.flags.live import add_log_flags, add_queue_flags, add_scheduling_flags, live_values
from trimtab_engine.config.flags.not_built import add_not_built
from trimtab_engine.config.flags.parallel import add_parallel_flags, parallel_fields
from trimtab_engine.config.flags.speculation import add_speculative_flags, speculative_fields
from trimtab_engine.errors import ConfigError, ModelError, NotBuiltError
from trimtab_engine.processes.end import prepare_to_leave
from trimtab_engine.processes.network import any_address

LARGE_GPU_BYTES = 70 << 30  # from here on vLLM's larger defaults hold
DEFAULT_LIMITS = {"cpu": (128, 2048), "cuda": (256, 2048), "large": (1024, 8192)}
"""max_num_seqs and max_num_batched_tokens by kind of device."""
JINJA_MARKS = ("{{", "{%", "{#")
LOOPBACK = "127.0.0.1"


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model with an OpenAI-compatible API",
        description="Serve MODEL. SIGTERM drains: running requests finish within --shutdown-timeout.",
        epilog="What says live may change while serving, through the admin API (docs/live-configuration.md).",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="folder with safetensors, or a .gguf file")
    add_engine_flags(parser)
    _add_server_flags(parser.add_argument_group("server"))
    _add_admin_flags(parser.add_argument_group("admin API"))
    parser.set_defaults(run=run)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """What the engine itself is configured with, served or not: what engine_config() reads."""
    _add_model_flags(parser.add_argument_group("model"))
    _add_device_flags(parser.add_argument_group("device and memory"))
    add_parallel_flags(parser.add_argument_group("parallel layout"))
    _add_scheduler_flags(parser.add_argument_group("scheduler"))
    add_speculative_flags(parser.add_argument_group("speculative decoding"))
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


def _add_server_flags(group: Any) -> None:
    group.add_argument("--config", metavar="FILE", help="YAML with flags as keys; the command line wins")
    group.add_argument("--host", help="address of the API (default: 0.0.0.0; :: on a machine that has IPv6 only)")
    group.add_argument(
        "--port", type=types.port, default=8000, help="port of the API, the probes and /metrics (default: 8000)"
    )
    group.add_argument(
        "--api-server-count",
        "-asc",
        type=types.api_servers,
        default=1,
        metavar="N",
        help="API server processes on the port, before one engine (default: 1)",
    )
    group.add_argument("--api-key", nargs="+", action="extend", metavar="KEY", help="key asked of /v1/*")
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja file that takes the place of the model's chat template; or the template itself, on one line",
    )
    group.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="let the model choose whether to call a tool; needs --tool-call-parser",
    )
    group.add_argument(
        "--tool-call-parser", metavar="NAME", help="how the model writes tool calls: hermes or llama3_json"
    )
    group.add_argument(
        "--max-logprobs",
        type=types.not_negative,
        default=20,
        metavar="N",
        help="most logprobs a request may ask for (default: 20)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=types.seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long SIGTERM lets running requests finish (default: 30)",
    )
    group.add_argument(
        "--stream-interval",
        type=types.positive,
        default=1,
        metavar="TOKENS",
        help="tokens in a streamed chunk, but for the first and the last: more is less work (default: 1)",
    )
    group.add_argument(
        "--enable-log-requests", action="store_true", help="log each request's id, lengths and parameters, not its text"
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span per request there, such as http://collector:4318/v1/traces (needs the extra tracing)",
    )
    group.add_argument(
        "--custom-histogram-buckets",
        type=types.buckets,
        metavar="JSON",
        help='replace histograms\' buckets: {"vllm:time_to_first_token_seconds": [0.1, 1, 10]}',
    )
    add_queue_flags(group)
    add_log_flags(group)


def _add_admin_flags(group: Any) -> None:
    group.add_argument("--admin-port", type=types.port, help="serve the admin API there (default: off)")
    group.add_argument(
        "--admin-token-sha256",
        type=types.sha256,
        metavar="HEX",
        help="SHA-256 of the bearer token; without it the admin port listens on loopback only",
    )


def run(arguments: argparse.Namespace) -> int:
    # Until the server drains on it: a container's first process ignores what it has no handler for.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    from trimtab_engine.api.serving.engine_server import Listen, run_server

    config, names = engine_config(arguments), served_names(arguments)
    _check_model_exists(config.model)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prompts are tokenised in threads of our own
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # the last line of a log should be why it ended
    if config.node_rank > 0 and config.data_parallel_size > 1:
        from trimtab_engine.launch.nodes.member import run_member

        return run_member(config, arguments.shutdown_timeout)
    if config.node_rank > 0:
        from trimtab_engine.workers.node import run_node

        return run_node(config)
    from trimtab_engine.api.metrics.tracing import check_tracing_is_installed
    from trimtab_engine.api.serving.state import ServerOptions

    if arguments.otlp_traces_endpoint is not None:
        check_tracing_is_installed()
    options = ServerOptions(
        served_model_names=names,
        api_keys=tuple(arguments.api_key or ()),
        admin_token_sha256=arguments.admin_token_sha256,
        max_logprobs=arguments.max_logprobs,
        chat_template=chat_template(arguments.chat_template),
        enable_auto_tool_choice=arguments.enable_auto_tool_choice,
        tool_call_parser=tool_call_parser(arguments),
        api_server_count=arguments.api_server_count,
        stream_interval=arguments.stream_interval,
        log_requests=arguments.enable_log_requests,
        otlp_traces_endpoint=arguments.otlp_traces_endpoint,
        custom_histogram_buckets=arguments.custom_histogram_buckets,
    )
    host = arguments.host or any_address()
    admin_host = host if arguments.admin_token_sha256 else LOOPBACK
    listen = Listen(host, arguments.port, admin_host, arguments.admin_port)
    exit_code = run_server(config, options, listen, arguments.shutdown_timeout)
    prepare_to_leave()
    return exit_code


def engine_config(
    arguments: argparse.Namespace, limits: Mapping[str, tuple[int, int]] = DEFAULT_LIMITS
) -> EngineConfig:
    """The core's configuration. Raises ConfigError where values contradict each other. `limits`: as DEFAULT_LIMITS."""
    model = _model_path(arguments)
    device = _device(arguments.device)
    kind, gpu_bytes = device
    defaults = limits["large" if gpu_bytes >= LARGE_GPU_BYTES else kind]
    num_seqs, num_tokens = _limits(arguments, defaults)
    utilization = arguments.gpu_memory_utilization
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
        **speculative_fields(arguments),
        **parallel_fields(arguments),
        **eplb_fields(arguments),
        **graph_fields(arguments),
        profiler_dir=arguments.profiler_dir,
    )


def tool_call_parser(arguments: argparse.Namespace) -> str | None:
    """Raises ConfigError for one that is not built, and when none is given for --enable-auto-tool-choice."""
    from trimtab_engine.api.tool_parsers import PARSERS

    name: str | None = arguments.tool_call_parser
    if name is not None and name not in PARSERS:
        raise NotBuiltError(f"--tool-call-parser {name} is not built; choose one of {', '.join(PARSERS)}")
    if arguments.enable_auto_tool_choice and name is None:
        raise ConfigError("--enable-auto-tool-choice requires --tool-call-parser; give both")
    return name


def chat_template(given: str | None) -> str | None:
    """The template's text: a file's, or the argument itself when it can be nothing else. Raises ConfigError."""
    if given is None or any(mark in given for mark in JINJA_MARKS):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError(f"--chat-template {given}: {reason}; give the path of a Jinja file") from None


def served_names(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.served_model_name:
        return tuple(arguments.served_model_name)
    return (Path(_model_path(arguments)).resolve().name.removesuffix(".gguf"),)


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
    from trimtab_kernels.page_size import auto_block_size

    from trimtab_engine.config.model import parse_model_config
    from trimtab_engine.weights.source import open_source

    longest = arguments.max_model_len
    if not isinstance(longest, int):
        source = open_source(model, arguments.load_format)
        longest = parse_model_config(source.config, source.generation_config, source.where).max_model_len
    chosen = auto_block_size(longest, max_num_seqs=arguments.max_num_seqs_cap or num_seqs)
    return min(chosen, max(BLOCK_SIZES))


def _model_path(arguments: argparse.Namespace) -> str:
    model = arguments.model or arguments.model_flag or getattr(arguments, "model_of_file", None)
    if not model:
        raise ConfigError("no model; say which: trimtab-engine serve MODEL")
    if arguments.model and arguments.model_flag and arguments.model != arguments.model_flag:
        raise ConfigError(f"two models, {arguments.model} and --model {arguments.model_flag}; give one")
    path: str = model
    if path.startswith("file://"):
        return path.removeprefix("file://")
    if "://" in path:
        raise ConfigError(
            f"{path} is not a path; models are read from folders and .gguf files (file:// or a plain path)"
        )
    return path


def _check_model_exists(model: str) -> None:
    if not Path(model).exists():
        raise ModelError(f"there is no model at {model}; give the path of a folder with safetensors or of a .gguf file")


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
