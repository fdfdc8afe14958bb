"""`trimtab-engine autotune MODEL_OR_URL`: find the parameters with the highest throughput under latency limits."""

import argparse
import math
from typing import Any

from trimtab_engine.cli import bench_serve_arguments
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags import parser as types

DEFAULT_PROMPTS = 100
MIN_PROMPTS_PER_SLOT = 2  # at least, so that sequence slots fill and empty
DEFAULT_PROMPTS_TEXT = f"{DEFAULT_PROMPTS}, and {MIN_PROMPTS_PER_SLOT} per sequence slot of --num-seqs-list"
EXAMPLES = """examples:
  a local model in a dedicated server; p99 of TTFT within 2 s:
    trimtab-engine autotune MODEL --serve-flags="--device cpu --device-memory-bytes 2Gi" \\
      --input-len 64 --output-len 16 --num-prompts 32 --limits ttft:2000
  a running server without other clients (started with --admin-port 8001 and headroom in its caps):
    trimtab-engine autotune http://127.0.0.1:8000 --admin-url http://127.0.0.1:8001 \\
      --num-seqs-list 64,128,256 --num-batched-tokens-list 1024,2048,4096,8192 --limits ttft:p95:500 itl:80
  the best values for an InferenceDeployment, as a patch:
    trimtab-engine autotune MODEL --limits e2el:10000 --name chat --namespace prod
    kubectl patch infd chat -n prod --type merge --patch-file autotune/patch.yaml

Ctrl-C stops the search; the same command resumes it. The start values are restored unless --keep is set.

exit codes: 0 found and confirmed by a final run, 1 no candidate meets the limits or the engine ended, 2 invalid
arguments, 130 Ctrl-C. docs/benchmark/autotune.md describes the search."""
UNSUPPORTED = {
    "--trace-path": "a trace has a fixed rate; use --dataset-name custom or sharegpt",
    "--request-rate": "the search determines the rate; set --limits",
    "--data-parallel-size-list": "use trimtab plan to choose engine cores",
    "--max-num-seqs": "use --num-seqs-list",
    "--max-num-batched-tokens": "use --num-batched-tokens-list",
    "--gpu-memory-utilization": "use --min-utilization and --max-utilization",
}


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "autotune",
        help="find the parameters with the highest throughput under latency limits",
        usage="%(prog)s MODEL_OR_URL [FLAG ...]",
        description="Find the largest working gpu_memory_utilization, then the max_num_seqs and "
        "max_num_batched_tokens with the highest request rate within the limits, by live changes of one engine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_engine(parser.add_argument_group("engine"))
    _add_search(parser.add_argument_group("search"))
    group = parser.add_argument_group("requests")
    bench_serve_arguments.add_dataset_choice(group, with_trace=False, default_prompts=DEFAULT_PROMPTS_TEXT)
    group.add_argument("--seed", type=types.not_negative, default=0, metavar="N", help="random seed (default: 0)")
    bench_serve_arguments.add_dataset_flags(parser)
    bench_serve_arguments.add_sampling_flags(
        parser.add_argument_group("sampling (unset fields are not sent and use the server's defaults)")
    )
    _add_result(parser.add_argument_group("results"))
    for flag in UNSUPPORTED:
        parser.add_argument(flag, action=_UnsupportedFlag, nargs="?", help=argparse.SUPPRESS, default=argparse.SUPPRESS)
    parser.set_defaults(run=_run, **_BENCH_SERVE_DEFAULTS)


_BENCH_SERVE_DEFAULTS: dict[str, Any] = {
    "endpoint": "/v1/completions",
    "skip_tokenizer_init": False,
    "max_concurrency": None,
    "burstiness": 1.0,
    "ramp_up_strategy": None,
}
"""Values for flags of `bench serve` that autotune does not have."""


class _UnsupportedFlag(types.UnsupportedFlag):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string} is not supported by autotune; {UNSUPPORTED[str(option_string)]}")


def _add_engine(group: Any) -> None:
    group.add_argument("model", metavar="MODEL_OR_URL", help="a model to serve, or the URL of a running server")
    group.add_argument(
        "--serve-flags",
        metavar='"FLAGS"',
        help='flags of serve for MODEL, as one quoted argument: --serve-flags="--device cpu"; caps are added',
    )
    group.add_argument("--admin-url", metavar="URL", help="admin API of a running server")
    group.add_argument("--admin-token", metavar="TOKEN", help="bearer token of the admin API")
    bench_serve_arguments.add_client_flags(
        group, backends=("openai", "openai-chat"), name="name of the served model (default: the server's first)"
    )


def _add_search(group: Any) -> None:
    group.add_argument(
        "--limits",
        nargs="+",
        metavar="NAME[:pN]:MS",
        help="latency limits in ms, such as ttft:500 itl:p95:80 (default percentile: p99); names: ttft, "
        "itl (every gap), tpot, e2el (default: none, maximize throughput)",
    )
    group.add_argument(
        "--min-cache-hit",
        type=types.fraction,
        default=0.0,
        metavar="FRACTION",
        help="fraction of prompt tokens that must hit the prefix cache; sets the shared prefix of random prompts "
        "(default: 0)",
    )
    group.add_argument(
        "--num-seqs-list",
        type=_counts,
        metavar="N,N",
        help="max_num_seqs candidates (default: the cap, halved repeatedly)",
    )
    group.add_argument(
        "--num-batched-tokens-list",
        type=_counts,
        metavar="N,N",
        help="max_num_batched_tokens candidates (default: the cap, halved repeatedly)",
    )
    group.add_argument(
        "--min-utilization",
        type=_utilization,
        metavar="FRACTION",
        help="lowest gpu_memory_utilization (default: the start value)",
    )
    group.add_argument(
        "--max-utilization",
        type=_utilization,
        metavar="FRACTION",
        help="highest gpu_memory_utilization (default: the cap)",
    )
    group.add_argument("--all-candidates", action="store_true", help="measure every pair instead of a hill climb")
    group.add_argument(
        "--max-seconds", type=types.seconds, metavar="SECONDS", help="start no run after this time, then report"
    )


def _add_result(group: Any) -> None:
    group.add_argument(
        "--result-dir",
        default="autotune",
        metavar="DIR",
        help="folder for state.json, report.json, report.html, patch.yaml (default: autotune)",
    )
    group.add_argument("--restart", action="store_true", help="discard the recorded runs")
    group.add_argument("--keep", action="store_true", help="keep the best values in the engine")
    group.add_argument("--name", metavar="NAME", help="InferenceDeployment of the patch")
    group.add_argument("--namespace", "-n", metavar="NAMESPACE", help="namespace of the InferenceDeployment")
    group.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="output format on stdout (default: table)"
    )


def _run(arguments: argparse.Namespace) -> int:
    from trimtab_engine.bench.autotune.run import is_url, run_autotune

    if arguments.namespace and not arguments.name:
        raise ConfigError("--namespace requires --name; set both")
    if arguments.keep and not is_url(arguments.model):
        raise ConfigError("--keep requires the URL of a running server; remove it")
    arguments.dataset_name = bench_serve_arguments.chosen_dataset(arguments)
    arguments.num_prompts = arguments.num_prompts or max(
        DEFAULT_PROMPTS, MIN_PROMPTS_PER_SLOT * max(arguments.num_seqs_list or [0])
    )
    arguments.num_prompts_given = True
    return run_autotune(arguments)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(types.positive(word) for word in text.split(","))


def _utilization(text: str) -> float:
    number = types.fraction(text)
    if number < 0.01 or not math.isclose(number * 100, round(number * 100), abs_tol=1e-6):
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 0.01; use 0.01 to 1, such as 0.92")
    return number
