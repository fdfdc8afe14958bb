"""`trimtab-engine bench latency | throughput | serve`, with vLLM's arguments, and `bench start`."""

import argparse
from typing import Any

import msgspec

from trimtab_engine.cli import bench_serve_arguments
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.flags import parser as types
from trimtab_engine.flags.engine import add_engine_flags
from trimtab_engine.flags.vllm import add_vllm_flags

LATENCY_EXAMPLES = """examples:
  one request at a time, 32 tokens in and 128 out:
    trimtab-engine bench latency --model MODEL --batch-size 1
  a batch of 8, 5 iterations, results in a file:
    trimtab-engine bench latency --model MODEL --batch-size 8 --num-iters 5 --output-json latency.json"""
THROUGHPUT_EXAMPLES = """examples:
  200 random prompts of 256 tokens, 64 tokens out, without a rate limit:
    trimtab-engine bench throughput --model MODEL --input-len 256 --output-len 64 --num-prompts 200
  the effect of a flag (any flag of serve):
    trimtab-engine bench throughput --model MODEL --input-len 256 --output-len 64 --max-num-batched-tokens 512"""
START_EXAMPLES = """stages, in order: process (until its program begins), imports, starting, weights, profile,
kv_cache, graphs (CUDA), ready (tokenizer); every engine exports them as trimtab_start_seconds{stage}
(docs/guides/start-time.md)

examples:
  ten starts on the CPU; the table shows median and p95 of each stage:
    trimtab-engine bench start MODEL --serve-flags="--device cpu"
  with the weights on the disk instead of in the page cache, results in a file:
    trimtab-engine bench start MODEL --cold-page-cache --output-json start.json"""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure batch latency, throughput, a server under load, or a start",
        description="Measure the engine in this process (latency, throughput), a running server (serve) or starts.",
    )
    kinds = parser.add_subparsers(title="commands", metavar="KIND", required=True)
    _add_latency(kinds)
    _add_throughput(kinds)
    bench_serve_arguments.add_to(kinds)
    _add_start(kinds)


def _add_latency(kinds: Any) -> None:
    parser = kinds.add_parser(
        "latency",
        usage="%(prog)s --model MODEL [FLAG ...]",
        help="latency of one batch, in this process",
        description="Measure the time from sending a batch of requests to its last token, repeatedly.",
        epilog=LATENCY_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--input-len", type=types.positive, default=32, metavar="TOKENS", help="prompt tokens (default: 32)"
    )
    group.add_argument(
        "--output-len", type=types.positive, default=128, metavar="TOKENS", help="output tokens (default: 128)"
    )
    group.add_argument(
        "--batch-size", type=types.positive, default=8, metavar="N", help="requests per batch (default: 8)"
    )
    group.add_argument("--n", type=types.positive, default=1, metavar="N", help="sequences per request (default: 1)")
    group.add_argument(
        "--num-iters-warmup", type=types.not_negative, default=10, metavar="N", help="warmup iterations (default: 10)"
    )
    group.add_argument(
        "--num-iters", type=types.positive, default=30, metavar="N", help="measured iterations (default: 30)"
    )
    _add_common(group)
    _add_engine(parser)
    # Every iteration sends the same prompts: with prefix caching only the first one would be measured.
    parser.set_defaults(run=_run_latency, enable_prefix_caching=False)


def _add_throughput(kinds: Any) -> None:
    parser = kinds.add_parser(
        "throughput",
        usage="%(prog)s --model MODEL [FLAG ...]",
        help="throughput of many requests, in this process",
        description="Measure requests and tokens per second with all requests sent at once.",
        epilog=THROUGHPUT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("workload")
    bench_serve_arguments.add_dataset_choice(group, with_trace=False)
    group.add_argument("--n", type=types.positive, default=1, metavar="N", help="sequences per request (default: 1)")
    _add_common(group)
    bench_serve_arguments.add_dataset_flags(parser)
    _add_engine(parser)
    parser.set_defaults(run=_run_throughput)


def _add_start(kinds: Any) -> None:
    parser = kinds.add_parser(
        "start",
        usage="%(prog)s MODEL [FLAG ...]",
        help="duration of a server's start, by stage",
        description="Start a server repeatedly and measure each stage until it is ready, and its first token.",
        epilog=START_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="folder or GGUF file of a model")
    parser.add_argument(
        "--serve-flags", metavar='"FLAGS"', help='flags of serve, as one quoted argument: --serve-flags="--device cpu"'
    )
    parser.add_argument("--runs", type=types.positive, default=10, metavar="N", help="measured starts (default: 10)")
    parser.add_argument(
        "--cold-page-cache", action="store_true", help="remove the model's files from the page cache before each start"
    )
    parser.add_argument("--output-json", metavar="FILE", help="also write the results to this file")
    parser.set_defaults(run=_run_start)


def _add_common(group: Any) -> None:
    group.add_argument("--disable-detokenize", action="store_true", help="do not measure detokenization")
    group.add_argument("--output-json", metavar="FILE", help="also write the results to this file")
    group.add_argument(
        "--profile",
        action="store_true",
        help="profile one iteration with torch.profiler instead; requires --profiler-dir",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the engine flags of serve; flags that only the server uses keep their defaults."""
    add_engine_flags(parser)
    add_vllm_flags(parser)
    flags = {action.dest for action in parser._actions}
    fields = [field for field in msgspec.structs.fields(EngineConfig) if field.name not in flags]
    parser.set_defaults(**{field.name: field.default for field in fields if field.default is not msgspec.NODEFAULT})
    parser.set_defaults(model=None, disable_log_stats=True)


def _run_latency(arguments: argparse.Namespace) -> int:
    from trimtab_engine.bench.latency_bench import run_latency

    return run_latency(arguments)


def _run_start(arguments: argparse.Namespace) -> int:
    from trimtab_engine.bench.start_bench import run_start

    return run_start(arguments)


def _run_throughput(arguments: argparse.Namespace) -> int:
    arguments.dataset_name = bench_serve_arguments.chosen_dataset(arguments)
    arguments.num_prompts = arguments.num_prompts or bench_serve_arguments.DEFAULT_PROMPTS
    from trimtab_engine.bench.throughput_bench import run_throughput

    return run_throughput(arguments)
