"""Flags of `trimtab-engine serve` (docs/reference/contract.md section 1): engine, server and admin API."""

import argparse
from typing import Any

from trimtab_engine.flags import parser as types
from trimtab_engine.flags.engine import add_engine_flags
from trimtab_engine.flags.live import add_log_flags, add_queue_flags
from trimtab_engine.flags.media import add_media_source_flags
from trimtab_engine.flags.vllm import add_vllm_flags

SERVER_GROUPS = ("server", "admin API")
"""Groups of --help with server flags, which do not apply to an in-process engine."""


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of serve and its argument MODEL."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder with safetensors, a .gguf file, hf://ORG/NAME[@REVISION] of the Hugging Face hub, "
        "s3://BUCKET/PREFIX, or oci://REGISTRY/REPOSITORY:TAG",
    )
    add_engine_flags(parser)
    server, admin = (parser.add_argument_group(title) for title in SERVER_GROUPS)
    _add_server_flags(server)
    _add_admin_flags(admin)
    add_vllm_flags(parser)


def _add_server_flags(group: Any) -> None:
    group.add_argument(
        "--config", metavar="FILE", help="YAML file with flags as keys; the command line takes precedence"
    )
    group.add_argument("--host", help="listen address of the API (default: 0.0.0.0; :: on an IPv6-only machine)")
    group.add_argument(
        "--port", type=types.port, default=8000, help="port of the API, the probes and /metrics (default: 8000)"
    )
    group.add_argument(
        "--api-server-count",
        "-asc",
        type=types.api_servers,
        default=1,
        metavar="N",
        help="number of API server processes that share one engine (default: 1)",
    )
    group.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        metavar="KEY",
        help="API key(s) required by all routes but probes and metrics (default: none)",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file with API keys, one per line; keys are also read from the environment variable VLLM_API_KEY",
    )
    group.add_argument(
        "--allowed-origins",
        type=types.text_list("--allowed-origins"),
        default=["*"],
        metavar="JSON",
        help='origins of web pages that may call the API (CORS): ["https://chat.example"]; [] for none '
        '(default: ["*"], any)',
    )
    group.add_argument(
        "--allowed-methods",
        type=types.text_list("--allowed-methods"),
        default=["*"],
        metavar="JSON",
        help='HTTP methods that such pages may use (default: ["*"], any)',
    )
    group.add_argument(
        "--allowed-headers",
        type=types.text_list("--allowed-headers"),
        default=["*"],
        metavar="JSON",
        help='request headers that such pages may send (default: ["*"], any)',
    )
    group.add_argument(
        "--allow-credentials",
        action="store_true",
        help="let browsers send credentials of their users; requires origins by name in --allowed-origins",
    )
    group.add_argument(
        "--api-key-for-metrics", action="store_true", help="require the API key for /metrics and /load too"
    )
    group.add_argument(
        "--batch-dir",
        metavar="DIR",
        help="directory for OpenAI's Files and Batches APIs (/v1/files, /v1/batches). It outlives the engine: the next "
        "one resumes unfinished batches. Engines may share it; one at a time runs batches. Requires one API server "
        "(default: none)",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="replaces the model's chat template: a Jinja file; the template itself, on one line; or hermes: "
        "tool calls in ChatML, as in Qwen's template",
    )
    group.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="enable tool_choice auto; requires --tool-call-parser",
    )
    group.add_argument(
        "--tool-call-parser", metavar="NAME", help="tool call format of the model: hermes, llama3_json or pythonic"
    )
    group.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="reasoning format of the model; responses get the field reasoning: deepseek_r1, openai_gptoss or qwen3",
    )
    group.add_argument(
        "--generation-config",
        default="auto",
        metavar="SOURCE",
        help="source of sampling defaults for requests that do not set them: auto (the model's "
        "generation_config.json), vllm (none), or a folder or file (default: auto)",
    )
    group.add_argument(
        "--override-generation-config",
        metavar="JSON",
        help='sampling defaults with priority over the file: {"temperature": 0.6, "top_p": 0.9, "top_k": 20, '
        '"min_p": 0, "repetition_penalty": 1, "max_new_tokens": 4096}',
    )
    group.add_argument(
        "--max-logprobs",
        type=types.not_negative,
        default=20,
        metavar="N",
        help="maximum number of logprobs per token (default: 20)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=types.seconds,
        default=30.0,
        metavar="SECONDS",
        help="seconds for running requests to finish after SIGTERM (default: 30)",
    )
    group.add_argument(
        "--core-silence-timeout",
        type=types.seconds,
        default=30.0,
        metavar="SECONDS",
        help="seconds without a heartbeat from an engine core (and three of its longest steps) until /readyz returns "
        "503, and twice that until /livez does (default: 30; 0: never)",
    )
    group.add_argument(
        "--stream-interval",
        type=types.positive,
        default=1,
        metavar="TOKENS",
        help="tokens per streamed chunk, except the first and the last; more tokens reduce CPU load (default: 1)",
    )
    group.add_argument(
        "--enable-log-requests",
        action="store_true",
        help="log each request's ID, lengths and parameters, but not its text",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="OTLP endpoint for one span per request, such as http://collector:4318/v1/traces (requires the extra "
        "tracing)",
    )
    group.add_argument(
        "--custom-histogram-buckets",
        type=types.buckets,
        metavar="JSON",
        help='histogram buckets that replace the defaults: {"vllm:time_to_first_token_seconds": [0.1, 1, 10]}',
    )
    add_media_source_flags(group)
    add_queue_flags(group)
    add_log_flags(group)


def _add_admin_flags(group: Any) -> None:
    group.add_argument("--admin-port", type=types.port, help="port of the admin API (default: off)")
    group.add_argument(
        "--admin-token-sha256",
        type=types.sha256,
        metavar="HEX",
        help="SHA-256 of the bearer token; without it the admin port listens only on loopback",
    )
    group.add_argument(
        "--state-token-sha256",
        type=types.sha256,
        metavar="HEX",
        help="SHA-256 of a second bearer token, for routers: it opens only the state stream; requires "
        "--admin-token-sha256 (default: none)",
    )
