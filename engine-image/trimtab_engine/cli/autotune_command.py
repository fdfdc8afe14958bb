"""`trimtab-engine autotune MODEL_OR_URL`: the knobs by which an engine does most under latency limits."""

import argparse
import math
from typing import Any

from trimtab_engine.cli import bench_serve_arguments
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags import parser as types

DEFAULT_PROMPTS = 100
PROMPTS_PER_SEAT = 2  # at least, so that seats fill and empty
PROMPTS_IN_WORDS = f"{DEFAULT_PROMPTS}, and {PROMPTS_PER_SEAT} for each seat of --num-seqs-list"
EXAMPLES = """examples:
  a model on this machine, by a server of its own; p99 of the time to first token within 2 s:
    trimtab-engine autotune MODEL --serve-flags="--device cpu --device-memory-bytes 2Gi" \\
      --input-len 64 --output-len 16 --num-prompts 32 --limits ttft:2000
  a server that runs and serves nobody else (it was started with --admin-port 8001 and room in its caps):
    trimtab-engine autotune http://127.0.0.1:8000 --admin-url http://127.0.0.1:8001 \\
      --num-seqs-list 64,128,256 --num-batched-tokens-list 1024,2048,4096,8192 --limits ttft:p95:500 itl:80
  the best for an InferenceDeployment, as a patch for it:
    trimtab-engine autotune MODEL --limits e2el:10000 --name chat --namespace prod
    kubectl patch infd chat -n prod --type merge --patch-file autotune/patch.yaml

Ctrl-C ends it at any moment; the same command goes on where it was. The start values are put back unless --keep.

exit codes: 0 found and confirmed by a final run, 1 nothing keeps the limits or the engine ended, 2 not possible as
asked, 130 Ctrl-C. docs/benchmark/autotune.md has what it does step by step."""
NOT_BUILT = {
    "--trace-path": "a recorded load has its own rate; use --dataset-name custom or sharegpt",
    "--request-rate": "the rate is what is searched; bound it by --limits",
    "--data-parallel-size-list": "engine cores are chosen by trimtab plan",
    "--max-num-seqs": "write --num-seqs-list",
    "--max-num-batched-tokens": "write --num-batched-tokens-list",
    "--gpu-memory-utilization": "write --min-utilization and --max-utilization",
}


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "autotune",
        help="find the knobs by which an engine does most under latency limits",
        usage="%(prog)s MODEL_OR_URL [FLAG ...]",
        description="Find the largest gpu_memory_utilization that works, then the max_num_seqs and "
        "max_num_batched_tokens with the highest request rate within the limits, by live changes of one engine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_engine(parser.add_argument_group("the engine"))
    _add_search(parser.add_argument_group("what is searched"))
    group = parser.add_argument_group("what is sent")
    bench_serve_arguments.add_dataset_choice(group, with_trace=False, default_prompts=PROMPTS_IN_WORDS)
    group.add_argument(
        "--seed", type=types.not_negative, default=0, metavar="N", help="of all that is random (default: 0)"
    )
    bench_serve_arguments.add_dataset_flags(parser)
    bench_serve_arguments.add_sampling_flags(
        parser.add_argument_group("sampling (not sent unless given: the server's defaults)")
    )
    _add_result(parser.add_argument_group("what comes of it"))
    for flag in NOT_BUILT:
        parser.add_argument(flag, action=_NotHere, nargs="?", help=argparse.SUPPRESS, default=argparse.SUPPRESS)
    parser.set_defaults(run=_run, **_OF_BENCH_SERVE)


_OF_BENCH_SERVE: dict[str, Any] = {
    "endpoint": "/v1/completions",
    "skip_tokenizer_init": False,
    "max_concurrency": None,
    "burstiness": 1.0,
    "ramp_up_strategy": None,
}
"""What `bench serve` has flags for, and a search does not."""


class _NotHere(types.RefusedFlag):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string} is no flag of autotune: {NOT_BUILT[str(option_string)]}")


def _add_engine(group: Any) -> None:
    group.add_argument("model", metavar="MODEL_OR_URL", help="a model to serve here, or the URL of a server that runs")
    group.add_argument(
        "--serve-flags",
        metavar='"FLAGS"',
        help='flags of serve for MODEL, as one word after =: --serve-flags="--device cpu"; caps are added',
    )
    group.add_argument("--admin-url", metavar="URL", help="the admin port of a server that runs")
    group.add_argument("--admin-token", metavar="TOKEN", help="its bearer token")
    bench_serve_arguments.add_client_flags(
        group, backends=("openai", "openai-chat"), name="which served model (default: the server's first)"
    )


def _add_search(group: Any) -> None:
    group.add_argument(
        "--limits",
        nargs="+",
        metavar="NAME[:pN]:MS",
        help="percentiles that must hold, in ms, such as ttft:500 itl:p95:80 (default percentile: p99); names: ttft, "
        "itl (every gap), tpot, e2el. Without: the highest throughput",
    )
    group.add_argument(
        "--min-cache-hit",
        type=types.fraction,
        default=0.0,
        metavar="SHARE",
        help="share of prompt tokens that the prefix cache must know; random prompts share so much (default: 0)",
    )
    group.add_argument("--num-seqs-list", type=_counts, metavar="N,N", help="seats (default: the cap and its halves)")
    group.add_argument(
        "--num-batched-tokens-list", type=_counts, metavar="N,N", help="budgets (default: the cap and its halves)"
    )
    group.add_argument(
        "--min-utilization", type=_utilization, metavar="SHARE", help="lowest (default: the start value)"
    )
    group.add_argument("--max-utilization", type=_utilization, metavar="SHARE", help="highest (default: the cap)")
    group.add_argument("--all-candidates", action="store_true", help="every pair, not those that a climb meets")
    group.add_argument(
        "--max-seconds", type=types.seconds, metavar="SECONDS", help="begin no run after that, and report"
    )


def _add_result(group: Any) -> None:
    group.add_argument(
        "--result-dir",
        default="autotune",
        metavar="DIR",
        help="for state.json, report.json, report.html, patch.yaml (default: autotune)",
    )
    group.add_argument("--restart", action="store_true", help="forget the runs that are there")
    group.add_argument("--keep", action="store_true", help="leave the engine at what was found")
    group.add_argument("--name", metavar="NAME", help="the InferenceDeployment that the patch is for")
    group.add_argument("--namespace", "-n", metavar="NAMESPACE", help="its namespace")
    group.add_argument("-o", "--output", choices=("table", "json"), default="table", help="on stdout (default: table)")


def _run(arguments: argparse.Namespace) -> int:
    from trimtab_engine.bench.autotune.run import is_url, run_autotune

    if arguments.namespace and not arguments.name:
        raise ConfigError("--namespace is of the resource that the patch is for; give --name, too")
    if arguments.keep and not is_url(arguments.model):
        raise ConfigError("--keep leaves a running server changed, and the one of MODEL ends; leave it out")
    arguments.dataset_name = bench_serve_arguments.chosen_dataset(arguments)
    arguments.num_prompts = arguments.num_prompts or max(
        DEFAULT_PROMPTS, PROMPTS_PER_SEAT * max(arguments.num_seqs_list or [0])
    )
    arguments.num_prompts_given = True
    return run_autotune(arguments)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(types.positive(word) for word in text.split(","))


def _utilization(text: str) -> float:
    number = types.fraction(text)
    if number < 0.01 or not math.isclose(number * 100, round(number * 100), abs_tol=1e-6):
        raise argparse.ArgumentTypeError(f"{text} is not in hundredths; write 0.01 to 1, such as 0.92")
    return number
