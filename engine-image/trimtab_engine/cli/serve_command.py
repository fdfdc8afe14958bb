"""`trimtab-engine serve MODEL`: start a server of the configured engine, or a worker node of its ranks."""

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from trimtab_engine.config.engine import EngineConfig, set_log_level
from trimtab_engine.config.json_flags import read_json_object
from trimtab_engine.config.sampling_defaults import EXAMPLE, OVERRIDE_FLAG, SamplingDefaults, read_sampling_defaults
from trimtab_engine.device.host_memory import with_device_memory
from trimtab_engine.device.profiler import check_profiler_dir
from trimtab_engine.errors import ConfigError, ModelError, NotSupportedError
from trimtab_engine.flags.engine import engine_config, named_model
from trimtab_engine.flags.local_model import is_remote_model, local_model
from trimtab_engine.flags.media import media_sources
from trimtab_engine.flags.serve import add_serve_flags
from trimtab_engine.ipc.network import any_address
from trimtab_engine.ipc.process_exit import freeze_gc_before_exit
from trimtab_engine.ipc.shared_secret import SharedSecret
from trimtab_engine.sources.fetch import Fetched
from trimtab_engine.sources.progress import Downloaded
from trimtab_engine.text.builtin_templates import BUILTIN_TEMPLATES, builtin_template
from trimtab_engine.weights.adapter_files import PeftAdapter
from trimtab_engine.weights.open import check_is_there, model_path

EXAMPLES = """flags marked live can be changed while serving, through the admin API
(docs/concepts/live-configuration.md)

examples:
  on the CPU, in 4 GiB, reachable only from this machine:
    trimtab-engine serve MODEL --device cpu --device-memory-bytes 4Gi --host 127.0.0.1
  on a GPU, with another model name and an API key:
    trimtab-engine serve MODEL --served-model-name chat --api-key KEY
  on four GPUs, with requests of at most 8,192 tokens:
    trimtab-engine serve MODEL --tensor-parallel-size 4 --max-model-len 8192
  with headroom for live changes:
    trimtab-engine serve MODEL --admin-port 8001 --gpu-memory-utilization-cap 0.95 --max-num-seqs-cap 512
  flags from a file, with one override:
    trimtab-engine serve --config serve.yaml --port 9000"""
JINJA_MARKS = ("{{", "{%", "{#")
LOOPBACK = "127.0.0.1"
API_KEY_VARIABLE = "VLLM_API_KEY"

logger = logging.getLogger("trimtab_engine.api")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model with an OpenAI-compatible API",
        usage="%(prog)s MODEL [FLAG ...]",
        description="Serve MODEL. SIGTERM and Ctrl-C drain: running requests finish within --shutdown-timeout.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_serve_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    # Default handling until the server installs its own: PID 1 of a container ignores signals without a handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    set_log_level(arguments.log_level)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # so that the last log line is the reason of an exit
    for message in getattr(arguments, "ignored_flags", ()):
        logging.getLogger("trimtab_engine").warning(message)
    arguments, fetched = _with_model(arguments)
    try:
        return _serve(arguments, None if fetched is None else fetched.downloaded)
    finally:
        if fetched is not None:
            fetched.close()


def _with_model(arguments: argparse.Namespace) -> tuple[argparse.Namespace, Fetched | None]:
    """Return the arguments with a local path as MODEL. During a download, the API port of the serving node answers
    probes.
    """
    if not is_remote_model(arguments):
        return arguments, None
    from trimtab_engine.api.serving.download_server import serve_probes
    from trimtab_engine.sources.lookup import silence_library_logs

    silence_library_logs()
    if arguments.node_rank or arguments.headless:
        return local_model(arguments)
    with serve_probes(arguments.host or any_address(), arguments.port) as (state, _):
        return local_model(arguments, state.update)


def _serve(arguments: argparse.Namespace, downloaded: Downloaded | None) -> int:
    """Serve a local model. `downloaded` describes a download that this start has made."""
    from trimtab_engine.api.serving.lifecycle import Listen, run_server

    config, names = _served_config(arguments), served_names(arguments)
    if arguments.device == "auto" and config.device == "cpu":
        logger.info("device: no CUDA GPU was found, so the CPU is used; --device cuda makes this an error")
    _check_paths_and_ports(arguments, config)
    _check_adapters(config, names)
    SharedSecret.read(config.rendezvous_secret_file)  # fails here, before any process starts
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prompts are tokenized in our own threads
    config = with_device_memory(config)
    if config.node_rank > 0 and config.data_parallel_size > 1:
        from trimtab_engine.engine_client.nodes.member import run_member

        return run_member(config, arguments.shutdown_timeout)
    if config.node_rank > 0:
        from trimtab_engine.executor.node import run_node

        return run_node(config)
    from trimtab_engine.api.openai.state import ServerOptions

    options = ServerOptions(
        served_model_names=names,
        api_keys=api_keys(arguments),
        admin_token_sha256=arguments.admin_token_sha256,
        state_token_sha256=arguments.state_token_sha256,
        max_logprobs=arguments.max_logprobs,
        chat_template=chat_template(arguments.chat_template),
        enable_auto_tool_choice=arguments.enable_auto_tool_choice,
        tool_call_parser=tool_call_parser(arguments),
        reasoning_parser=reasoning_parser(arguments),
        api_server_count=arguments.api_server_count,
        stream_interval=arguments.stream_interval,
        log_requests=arguments.enable_log_requests,
        otlp_traces_endpoint=arguments.otlp_traces_endpoint,
        custom_histogram_buckets=arguments.custom_histogram_buckets,
        core_silence_timeout=arguments.core_silence_timeout,
        api_key_for_metrics=arguments.api_key_for_metrics,
        media_sources=media_sources(arguments),
        allow_runtime_lora_updating=config.adapters is not None and config.adapters.is_updatable,
        downloaded=downloaded,
        sampling_defaults=sampling_defaults(arguments, config.model),
        batch_dir=arguments.batch_dir,
        allowed_origins=tuple(arguments.allowed_origins),
        allowed_methods=tuple(arguments.allowed_methods),
        allowed_headers=tuple(arguments.allowed_headers),
        allow_credentials=arguments.allow_credentials,
    )
    host = arguments.host or any_address()
    admin_host = host if arguments.admin_token_sha256 else LOOPBACK
    listen = Listen(host, arguments.port, admin_host, arguments.admin_port)
    exit_code = run_server(config, options, listen, arguments.shutdown_timeout)
    freeze_gc_before_exit()
    return exit_code


def _served_config(arguments: argparse.Namespace) -> EngineConfig:
    """Return the engine core's configuration for a server."""
    return msgspec.structs.replace(engine_config(arguments), api_server_count=arguments.api_server_count)


def sampling_defaults(arguments: argparse.Namespace, model: str) -> SamplingDefaults:
    """Return the sampling defaults, and log them: they change the answers of requests that set no parameters.

    Raises:
        ConfigError: A file or value is invalid.
    """
    text = arguments.override_generation_config
    override = {} if text is None else read_json_object(OVERRIDE_FLAG, text, EXAMPLE)
    found = read_sampling_defaults(Path(model), arguments.generation_config, override)
    if found.values:
        shown = ", ".join(f"{name} {value:g}" for name, value in found.values.items())
        logger.info("sampling defaults of the model: %s (--generation-config vllm: none)", shown)
    return found


def api_keys(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the API keys of the command line, the key file and the environment. Keys on the command line are visible
    to all users of the machine.

    Raises:
        ConfigError: The file cannot be read or has no key.
    """
    keys = list(arguments.api_key or ())
    if arguments.api_key_file is not None:
        try:
            lines = Path(arguments.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
            raise ConfigError(
                f"--api-key-file: {arguments.api_key_file} cannot be read ({reason}); give a file with one key per line"
            ) from None
        stored = [line.strip() for line in lines if line.strip()]
        if not stored:
            raise ConfigError(f"--api-key-file: {arguments.api_key_file} has no key; write one per line")
        keys += stored
    if os.environ.get(API_KEY_VARIABLE):
        keys.append(os.environ[API_KEY_VARIABLE])
    return tuple(dict.fromkeys(keys))


def tool_call_parser(arguments: argparse.Namespace) -> str | None:
    """Return the tool-call parser's name.

    Raises:
        NotSupportedError: The parser is unknown.
        ConfigError: --enable-auto-tool-choice is set without a parser.
    """
    from trimtab_engine.api.openai.tool_parsers import PARSERS

    name: str | None = arguments.tool_call_parser
    if name is not None and name not in PARSERS:
        raise NotSupportedError(f"--tool-call-parser {name} is not supported; choose one of {', '.join(PARSERS)}")
    if arguments.enable_auto_tool_choice and name is None:
        raise ConfigError("--enable-auto-tool-choice requires --tool-call-parser; give both")
    return name


def reasoning_parser(arguments: argparse.Namespace) -> str | None:
    """Return the reasoning parser's name.

    Raises:
        NotSupportedError: The parser is unknown.
    """
    from trimtab_engine.api.openai.reasoning_parsers import PARSERS

    name: str | None = arguments.reasoning_parser
    if name is not None and name not in PARSERS:
        raise NotSupportedError(f"--reasoning-parser {name} is not supported; choose one of {', '.join(PARSERS)}")
    return name


def chat_template(given: str | None) -> str | None:
    """Return the template's text: a built-in template, a file's content, or the argument itself if it contains Jinja
    markup.

    Raises:
        ConfigError: The file cannot be read.
    """
    if given is None or any(mark in given for mark in JINJA_MARKS):
        return given
    shipped = builtin_template(given)
    if shipped is not None:
        return shipped
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError(
            f"--chat-template {given}: {reason}; use the path of a Jinja file, or {' or '.join(BUILTIN_TEMPLATES)}"
        ) from None


def served_names(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.served_model_name:
        return tuple(arguments.served_model_name)
    return (Path(named_model(arguments)).resolve().name.removesuffix(".gguf"),)


def _check_paths_and_ports(arguments: argparse.Namespace, config: EngineConfig) -> None:
    """Check that all named files exist and that ports differ, before any process starts.

    Raises:
        ConfigError, ModelError: A path is missing or not writable, or a port is used twice.
    """
    check_is_there(Path(config.model))
    if config.speculative is not None and config.speculative.model is not None:
        _check_draft_model(config.speculative.model)
    if arguments.allow_credentials and "*" in arguments.allowed_origins:
        raise ConfigError(
            """--allow-credentials: browsers reject it for any origin (*); name them: --allowed-origins """
            """'["https://chat.example"]'"""
        )
    if arguments.batch_dir is not None and arguments.api_server_count > 1:
        raise ConfigError(
            f"--batch-dir: requires one API server ({arguments.api_server_count}); set --api-server-count 1"
        )
    if arguments.port == arguments.admin_port != 0:
        raise ConfigError(f"--admin-port: equals --port ({arguments.port}); set another port")
    if arguments.state_token_sha256 and not arguments.admin_token_sha256:
        raise ConfigError("--state-token-sha256: requires --admin-token-sha256; set both")
    if config.profiler_dir is not None:
        check_profiler_dir(Path(config.profiler_dir))
    endpoint = arguments.otlp_traces_endpoint
    if endpoint is not None:
        from trimtab_engine.api.metrics.tracing import check_endpoint, check_tracing_is_installed

        check_endpoint(endpoint)
        check_tracing_is_installed()


def _check_adapters(config: EngineConfig, names: tuple[str, ...]) -> None:
    """Check that adapters exist and do not use the model's name, before any process starts.

    Raises:
        ConfigError: An adapter is missing or its name is taken.
    """
    for module in () if config.adapters is None else config.adapters.modules:
        if module.name in names:
            raise ConfigError(f"--lora-modules: {module.name} is the name of the base model; rename the adapter")
        if module.base_model_name is not None and module.base_model_name not in names:
            raise ConfigError(
                f"--lora-modules: base_model_name {module.base_model_name} of {module.name} does not match the served "
                f"names {', '.join(names)}; remove it"
            )
        PeftAdapter(Path(module.folder))


def _check_draft_model(model: str) -> None:
    """Check that the draft model exists.

    Raises:
        ModelError: It cannot be read; the message names the flag.
    """
    try:
        model_path(model)
    except ModelError as error:
        raise ModelError(f"--speculative-config: {error}") from None
