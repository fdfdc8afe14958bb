"""The flags of `trimtab-engine serve` (docs/reference/contract.md section 1): the engine's, the server's and the
admin API's."""

import argparse
from typing import Any

from trimtab_engine.flags import parser as types
from trimtab_engine.flags.engine import add_engine_flags
from trimtab_engine.flags.live import add_log_flags, add_queue_flags
from trimtab_engine.flags.media import add_media_source_flags

SERVER_GROUPS = ("server", "admin API")
"""The groups of --help whose flags say how it is served, which an engine in its user's process has no use for."""


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of serve, and its argument MODEL."""
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
    group.add_argument(
        "--api-key", nargs="+", action="extend", metavar="KEY", help="key asked of all but probes and metrics"
    )
    group.add_argument(
        "--api-key-for-metrics", action="store_true", help="ask /metrics and /load for the API key as well"
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="takes the place of the model's chat template: a Jinja file; the template itself, on one line; or hermes: "
        "tool calls in ChatML, as in Qwen's own",
    )
    group.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="let the model choose whether to call a tool; needs --tool-call-parser",
    )
    group.add_argument(
        "--tool-call-parser", metavar="NAME", help="how the model writes tool calls: hermes, llama3_json or pythonic"
    )
    group.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="how the model writes its thoughts, which answers then have apart: deepseek_r1, openai_gptoss or qwen3",
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
        "--core-silence-timeout",
        type=types.seconds,
        default=30.0,
        metavar="SECONDS",
        help="without a sign of life from an engine core for so long, and for three of its longest steps, /readyz is "
        "503; for twice that /livez too (default: 30; 0: never)",
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
    add_media_source_flags(group)
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
