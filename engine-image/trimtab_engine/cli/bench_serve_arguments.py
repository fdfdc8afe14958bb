"""Arguments of `trimtab-engine bench serve`, and the dataset arguments that `bench throughput` shares."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.flags import parser as types

DATASETS = ("random", "prefix_repetition", "sharegpt", "custom", "trace")
EXAMPLES = """examples:
  100 random prompts, Poisson arrivals at 4 per second:
    trimtab-engine bench serve --port 8000 --dataset-name random --input-len 512 --output-len 64 \\
      --num-prompts 100 --request-rate 4
  goodput, chosen percentiles, a result file and a plot:
    trimtab-engine bench serve --goodput ttft:500 itl:100 --metric-percentiles 50,95,99 --request-rate 4 \\
      --save-result --result-dir results --plot results/run.svg
  the first five minutes of a trace at 10 × speed, lengths scaled to the model's maximum:
    trimtab-engine bench serve --trace-path mooncake.jsonl.gz --trace-speedup 10 --trace-duration 300
  a profile of the server during the run (started with --admin-port 8001 --profiler-dir DIR):
    trimtab-engine bench serve --num-prompts 10 --profile --admin-url http://127.0.0.1:8001

exit codes: 0 all requests succeeded, 1 some failed, 2 invalid arguments, 130 Ctrl-C (partial results
are printed)."""
UNSUPPORTED = (
    "--use-beam-search", "--lora-modules", "--insecure", "--plot-timeline", "--plot-dataset-stats",
    "--probe-request-rate", "--self-timed", "--no-self-timed", "--hf-subset", "--hf-split", "--hf-name",
)  # fmt: skip


def add_to(kinds: Any) -> None:
    parser = kinds.add_parser(
        "serve",
        usage="%(prog)s [FLAG ...]",
        help="load test of a running server: TTFT, ITL, throughput, goodput",
        description="Send requests to an OpenAI-compatible server and report client-side latencies.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_server(parser.add_argument_group("server"))
    add_dataset_choice(parser.add_argument_group("requests"), with_trace=True)
    add_dataset_flags(parser)
    _add_trace(parser.add_argument_group("traces (--dataset-name trace)"))
    _add_traffic(parser.add_argument_group("traffic"))
    add_sampling_flags(parser.add_argument_group("sampling (unset fields are not sent and use the server's defaults)"))
    _add_result(parser.add_argument_group("results"))
    for flag in UNSUPPORTED:
        parser.add_argument(flag, action=_UnsupportedFlag, nargs="?", help=argparse.SUPPRESS, default=argparse.SUPPRESS)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from trimtab_engine.bench.serving.run import run_serve

    arguments.dataset_name = chosen_dataset(arguments)
    arguments.num_prompts_given = arguments.num_prompts is not None
    arguments.num_prompts = arguments.num_prompts or DEFAULT_PROMPTS
    return run_serve(arguments)


def chosen_dataset(arguments: argparse.Namespace) -> str:
    """Return --dataset-name, or the dataset that the given files imply.

    Raises:
        ConfigError: The arguments contradict each other.
    """
    name: str | None = arguments.dataset_name
    trace_path, dataset_path = getattr(arguments, "trace_path", None), arguments.dataset_path
    if trace_path is not None and name not in (None, "trace"):
        raise ConfigError(f"--trace-path {trace_path} requires --dataset-name trace, not {name}; set only one")
    if dataset_path is not None and name in ("random", "prefix_repetition"):
        raise ConfigError(f"--dataset-name {name} generates its prompts and ignores --dataset-path; remove one")
    if name is None and trace_path is None and dataset_path is not None:
        recorded = "; for a trace use --trace-path FILE" if hasattr(arguments, "trace_path") else ""
        raise ConfigError(
            f"--dataset-path {dataset_path}: unknown dataset type; add --dataset-name sharegpt or custom{recorded}"
        )
    return name or ("random" if trace_path is None else "trace")


class _UnsupportedFlag(types.UnsupportedFlag):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        parser.error(str(NotSupportedError(f"{option_string} is not supported yet; remove it")))


def _add_server(group: Any) -> None:
    group.add_argument(
        "--base-url", metavar="URL", help="server URL, such as https://host:8443 (default: from --host and --port)"
    )
    group.add_argument("--host", default="127.0.0.1", help="server host (default: 127.0.0.1)")
    group.add_argument("--port", type=types.port, default=8000, help="server port (default: 8000)")
    group.add_argument(
        "--endpoint", default="/v1/completions", metavar="PATH", help="API path (default: /v1/completions)"
    )
    group.add_argument(
        "--model", metavar="NAME", help="name or local path of the served model (default: the server's first)"
    )
    add_client_flags(
        group, backends=("openai", "vllm", "openai-chat"), name="name of the served model if --model is a path"
    )
    group.add_argument("--skip-tokenizer-init", action="store_true", help="do not load a tokenizer")


def add_client_flags(group: Any, *, backends: Sequence[str], name: str) -> None:
    """Add the flags of the client. `name` is the help of --served-model-name."""
    group.add_argument("--served-model-name", metavar="NAME", help=name)
    group.add_argument(
        "--tokenizer", metavar="PATH", help="folder with the model's tokenizer, used to count and generate text"
    )
    group.add_argument(
        "--backend",
        choices=backends,
        default="openai",
        help="API of the server; openai-chat: chat completions (default: openai)",
    )
    group.add_argument("--api-key", metavar="KEY", help="API key, sent as Authorization: Bearer KEY")
    group.add_argument("--header", nargs="*", metavar="NAME=VALUE", help="headers added to every request")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=types.seconds,
        default=0.0,
        metavar="SECONDS",
        help="seconds to wait for the server to become ready (default: 0)",
    )


DEFAULT_PROMPTS = 1000


def add_dataset_choice(group: Any, *, with_trace: bool, default_prompts: str | None = None) -> None:
    """Add the dataset flags. `default_prompts` is the text of the default number of requests."""
    names = DATASETS if with_trace else DATASETS[:-1]
    default = "default: random; with --trace-path trace" if with_trace else "default: random"
    group.add_argument("--dataset-name", choices=names, help=default)
    group.add_argument(
        "--dataset-path", type=Path, metavar="FILE", help="dataset file: sharegpt (JSON) or custom (JSON lines)"
    )
    group.add_argument(
        "--num-prompts",
        type=types.positive,
        metavar="N",
        help=f"number of requests (default: {default_prompts or f'{DEFAULT_PROMPTS}; of a trace: all'})",
    )
    group.add_argument("--input-len", type=types.positive, metavar="TOKENS", help="same as --random-input-len")
    group.add_argument("--output-len", type=types.positive, metavar="TOKENS", help="output tokens for every dataset")
    if with_trace:
        group.add_argument(
            "--seed",
            type=types.not_negative,
            metavar="N",
            help="random seed (default: 0 for lengths and arrival times; prompts differ in every run, so "
            "that the prefix cache has no hits from the last run)",
        )


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("datasets")
    group.add_argument(
        "--random-input-len", type=types.positive, default=1024, metavar="TOKENS", help="prompt tokens (default: 1024)"
    )
    group.add_argument(
        "--random-output-len", type=types.positive, default=128, metavar="TOKENS", help="output tokens (default: 128)"
    )
    group.add_argument(
        "--random-prefix-len",
        "--prefix-len",
        type=types.not_negative,
        default=0,
        metavar="TOKENS",
        help="shared prefix tokens, added before the input (default: 0)",
    )
    group.add_argument(
        "--random-range-ratio",
        type=_ratio,
        default=0.0,
        metavar="R",
        help="random variation of lengths by ± R (default: 0)",
    )
    for name, default in (("prefix-len", 256), ("suffix-len", 256), ("num-prefixes", 10), ("output-len", 128)):
        flag = f"--prefix-repetition-{name}"
        group.add_argument(flag, type=types.positive, default=default, metavar="N", help=f"default: {default}")
    group.add_argument(
        "--sharegpt-output-len",
        type=types.positive,
        metavar="TOKENS",
        help="output tokens (default: as in the dataset)",
    )
    group.add_argument(
        "--custom-output-len", type=types.positive, default=256, metavar="TOKENS", help="output tokens (default: 256)"
    )


def _add_trace(group: Any) -> None:
    group.add_argument(
        "--trace-path",
        type=Path,
        metavar="FILE",
        help="Azure (TIMESTAMP,ContextTokens,GeneratedTokens), Mooncake (JSON lines with hash_ids: equal blocks become "
        "shared prefixes) or ServeGen (rates); may be gzipped",
    )
    group.add_argument("--trace-lengths", type=Path, metavar="FILE", help="lengths of a ServeGen trace (JSON lines)")
    group.add_argument("--trace-speedup", type=_above_zero, default=1.0, metavar="X", help="speed factor (default: 1)")
    group.add_argument(
        "--trace-start", type=types.seconds, default=0.0, metavar="SECONDS", help="start time in the trace (default: 0)"
    )
    group.add_argument(
        "--trace-duration", type=_above_zero, metavar="SECONDS", help="duration of the trace to replay (default: all)"
    )
    group.add_argument(
        "--trace-sample",
        type=share,
        default=1.0,
        metavar="FRACTION",
        help="fraction of requests to replay (default: 1)",
    )
    group.add_argument(
        "--trace-length-scale",
        type=_above_zero,
        metavar="X",
        help="length factor (default: scaled so that the longest request fits the model)",
    )
    group.add_argument(
        "--trace-max-model-len",
        type=types.positive,
        metavar="TOKENS",
        help="maximum request length (default: as the server reports)",
    )


def _add_traffic(group: Any) -> None:
    group.add_argument(
        "--request-rate",
        type=_above_zero_or_inf,
        default=math.inf,
        metavar="RATE",
        help="requests per second; inf: all at once, or the trace's rate (default: inf)",
    )
    group.add_argument(
        "--burstiness",
        type=_above_zero_or_inf,
        default=1.0,
        metavar="B",
        help="burstiness of arrivals; 1: Poisson; below 1: bursts; above 1: more even; inf: constant gaps (default: 1)",
    )
    group.add_argument(
        "--max-concurrency",
        type=types.positive,
        metavar="N",
        help="maximum number of concurrent requests (default: no limit)",
    )
    group.add_argument(
        "--ramp-up-strategy", choices=("linear", "exponential"), help="change of the request rate over the run"
    )
    group.add_argument("--ramp-up-start-rps", type=types.seconds, metavar="RATE", help="from")
    group.add_argument("--ramp-up-end-rps", type=types.seconds, metavar="RATE", help="to")
    group.add_argument(
        "--num-warmups", type=types.not_negative, default=0, metavar="N", help="warmup requests (default: 0)"
    )


def add_sampling_flags(group: Any) -> None:
    group.add_argument("--temperature", type=float, metavar="T", help="sampling temperature; 0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling: cumulative probability")
    group.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    group.add_argument("--min-p", type=float, metavar="P", help="minimum probability relative to the most likely token")
    for name in ("frequency", "presence", "repetition"):
        group.add_argument(f"--{name}-penalty", type=float, metavar="X", help="penalty, as in the OpenAI API")
    group.add_argument("--logprobs", type=types.not_negative, metavar="N", help="number of log-probabilities per token")
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="ignore the end-of-sequence token; always set for random and trace datasets",
    )
    group.add_argument("--extra-body", type=_json_object, metavar="JSON", help="additional fields of every request")


def _add_result(group: Any) -> None:
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el",
        metavar="NAMES",
        help="metrics to report: ttft, tpot, itl, e2el, client_queue_time (default: the first four)",
    )
    group.add_argument(
        "--metric-percentiles", default="99", metavar="P", help="percentiles to report, such as 50,95,99 (default: 99)"
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="latency objectives in ms for goodput, such as ttft:500 tpot:50; names: ttft, tpot, itl (every gap), e2el",
    )
    group.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="output format on stdout (default: table)"
    )
    group.add_argument("--save-result", action="store_true", help="write the results to a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="include every request in the file")
    group.add_argument("--append-result", action="store_true", help="append to an existing file")
    group.add_argument("--result-dir", metavar="DIR", help="folder of the result file (default: the current folder)")
    group.add_argument(
        "--result-filename", metavar="NAME", help="name of the result file (default: from label, rate, model and time)"
    )
    group.add_argument("--label", metavar="TEXT", help="label in the file and its name (default: the backend)")
    group.add_argument("--metadata", nargs="*", metavar="NAME=VALUE", help="additional fields of the file")
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.svg",
        help="plot TTFT and ITL over time and their distributions (requires matplotlib)",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="disable the progress bar")
    group.add_argument("--profile", action="store_true", help="profile the server during the run")
    group.add_argument("--admin-url", metavar="URL", help="URL of the server's admin API, used by --profile")
    group.add_argument("--admin-token", metavar="TOKEN", help="bearer token of the admin API")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _above_zero_or_inf(text: str) -> float:
    if not (number := _number(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _above_zero(text: str) -> float:
    if not 0 < (number := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def share(text: str) -> float:
    """Parse a fraction above 0, up to 1."""
    if not 0 < (number := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction above 0, up to 1")
    return number


def _ratio(text: str) -> float:
    if not 0 <= (number := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a ratio from 0 to less than 1")
    return number


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"invalid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object; use an object such as '{\"top_k\": 5}'")
    return value
