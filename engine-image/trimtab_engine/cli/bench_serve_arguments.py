"""The arguments of `trimtab-engine bench serve`, and those of the datasets that `bench throughput` shares with it."""

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
  100 random prompts, 4 a second, Poisson:
    trimtab-engine bench serve --port 8000 --dataset-name random --input-len 512 --output-len 64 \\
      --num-prompts 100 --request-rate 4
  how many requests a second meet their objectives, percentiles of your choice, a file and a picture:
    trimtab-engine bench serve --goodput ttft:500 itl:100 --metric-percentiles 50,95,99 --request-rate 4 \\
      --save-result --result-dir results --plot results/run.svg
  a recorded load, ten times as fast, its first five minutes, lengths scaled to what the model takes:
    trimtab-engine bench serve --trace-path mooncake.jsonl.gz --trace-speedup 10 --trace-duration 300
  a profile of the server while it runs (it was started with --admin-port 8001 --profiler-dir DIR):
    trimtab-engine bench serve --num-prompts 10 --profile --admin-url http://127.0.0.1:8001

exit codes: 0 all requests were answered, 1 some failed, 2 not possible as asked, 130 Ctrl-C (what was measured until
then is printed)."""
NOT_BUILT = (
    "--use-beam-search", "--lora-modules", "--insecure", "--plot-timeline", "--plot-dataset-stats",
    "--probe-request-rate", "--self-timed", "--no-self-timed", "--hf-subset", "--hf-split", "--hf-name",
)  # fmt: skip


def add_to(kinds: Any) -> None:
    parser = kinds.add_parser(
        "serve",
        usage="%(prog)s [FLAG ...]",
        help="load on a running server: TTFT, ITL, throughput, goodput",
        description="Send requests to an OpenAI-compatible server and report what its clients see.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_server(parser.add_argument_group("the server"))
    add_dataset_choice(parser.add_argument_group("what is sent"), with_trace=True)
    add_dataset_flags(parser)
    _add_trace(parser.add_argument_group("recorded loads (--dataset-name trace)"))
    _add_traffic(parser.add_argument_group("when it is sent"))
    add_sampling_flags(parser.add_argument_group("sampling (not sent unless given: the server's defaults)"))
    _add_result(parser.add_argument_group("what comes of it"))
    for flag in NOT_BUILT:
        parser.add_argument(flag, action=_NotBuilt, nargs="?", help=argparse.SUPPRESS, default=argparse.SUPPRESS)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from trimtab_engine.bench.serving.run import run_serve

    arguments.dataset_name = chosen_dataset(arguments)
    arguments.num_prompts_given = arguments.num_prompts is not None
    arguments.num_prompts = arguments.num_prompts or DEFAULT_PROMPTS
    return run_serve(arguments)


def chosen_dataset(arguments: argparse.Namespace) -> str:
    """--dataset-name, or what the files that were given say. Raises ConfigError where they contradict each other."""
    name: str | None = arguments.dataset_name
    trace_path, dataset_path = getattr(arguments, "trace_path", None), arguments.dataset_path
    if trace_path is not None and name not in (None, "trace"):
        raise ConfigError(f"--trace-path {trace_path} is of --dataset-name trace, not of {name}; leave one of them out")
    if dataset_path is not None and name in ("random", "prefix_repetition"):
        raise ConfigError(f"--dataset-name {name} makes its prompts and reads no --dataset-path; leave one of them out")
    if name is None and trace_path is None and dataset_path is not None:
        recorded = "; a recorded load is --trace-path FILE" if hasattr(arguments, "trace_path") else ""
        raise ConfigError(
            f"--dataset-path {dataset_path}: of which kind is it? add --dataset-name sharegpt or custom{recorded}"
        )
    return name or ("random" if trace_path is None else "trace")


class _NotBuilt(types.RefusedFlag):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        parser.error(str(NotSupportedError(f"{option_string} is not supported yet; leave it out")))


def _add_server(group: Any) -> None:
    group.add_argument("--base-url", metavar="URL", help="such as https://host:8443 (default: from --host and --port)")
    group.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    group.add_argument("--port", type=types.port, default=8000, help="default: 8000")
    group.add_argument("--endpoint", default="/v1/completions", metavar="PATH", help="default: /v1/completions")
    group.add_argument("--model", metavar="NAME", help="which served model (default: the server's first)")
    add_client_flags(group, backends=("openai", "vllm", "openai-chat"), name="the same, where --model is a path")
    group.add_argument("--skip-tokenizer-init", action="store_true", help="use no tokenizer even where there is one")


def add_client_flags(group: Any, *, backends: Sequence[str], name: str) -> None:
    """How requests are made and for whom they are; `name` says what --served-model-name is for."""
    group.add_argument("--served-model-name", metavar="NAME", help=name)
    group.add_argument(
        "--tokenizer", metavar="PATH", help="folder with the model's tokenizer, where text is counted or made"
    )
    group.add_argument("--backend", choices=backends, default="openai", help="openai-chat: chats (default: openai)")
    group.add_argument("--api-key", metavar="KEY", help="sent as Authorization: Bearer KEY")
    group.add_argument("--header", nargs="*", metavar="NAME=VALUE", help="headers of every request")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=types.seconds,
        default=0.0,
        metavar="SECONDS",
        help="wait so long for the server (default: 0)",
    )


DEFAULT_PROMPTS = 1000


def add_dataset_choice(group: Any, *, with_trace: bool, default_prompts: str | None = None) -> None:
    """`default_prompts`: how many requests there are by default, in words."""
    names = DATASETS if with_trace else DATASETS[:-1]
    default = "default: random; with --trace-path trace" if with_trace else "default: random"
    group.add_argument("--dataset-name", choices=names, help=default)
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="of sharegpt (JSON) or custom (JSON lines)")
    group.add_argument(
        "--num-prompts",
        type=types.positive,
        metavar="N",
        help=f"requests (default: {default_prompts or f'{DEFAULT_PROMPTS}; of a trace: all'})",
    )
    group.add_argument("--input-len", type=types.positive, metavar="TOKENS", help="as --random-input-len")
    group.add_argument("--output-len", type=types.positive, metavar="TOKENS", help="tokens out, whatever the dataset")
    if with_trace:
        group.add_argument(
            "--seed",
            type=types.not_negative,
            metavar="N",
            help="of everything random here (default: lengths and times are those of 0; words are new in every run, so "
            "that the server does not know them from the last one)",
        )


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("datasets")
    group.add_argument("--random-input-len", type=types.positive, default=1024, metavar="TOKENS", help="default: 1024")
    group.add_argument("--random-output-len", type=types.positive, default=128, metavar="TOKENS", help="default: 128")
    group.add_argument(
        "--random-prefix-len",
        "--prefix-len",
        type=types.not_negative,
        default=0,
        metavar="TOKENS",
        help="tokens that all prompts begin with, before the input (default: 0)",
    )
    group.add_argument(
        "--random-range-ratio", type=_ratio, default=0.0, metavar="R", help="lengths within ± R of these (default: 0)"
    )
    for name, default in (("prefix-len", 256), ("suffix-len", 256), ("num-prefixes", 10), ("output-len", 128)):
        flag = f"--prefix-repetition-{name}"
        group.add_argument(flag, type=types.positive, default=default, metavar="N", help=f"default: {default}")
    group.add_argument("--sharegpt-output-len", type=types.positive, metavar="TOKENS", help="default: the answers' own")
    group.add_argument("--custom-output-len", type=types.positive, default=256, metavar="TOKENS", help="default: 256")


def _add_trace(group: Any) -> None:
    group.add_argument(
        "--trace-path",
        type=Path,
        metavar="FILE",
        help="Azure (TIMESTAMP,ContextTokens,GeneratedTokens), Mooncake (JSON lines with hash_ids: equal blocks become "
        "shared prefixes) or ServeGen (rates); .gz is fine",
    )
    group.add_argument("--trace-lengths", type=Path, metavar="FILE", help="ServeGen's lengths (JSON lines)")
    group.add_argument(
        "--trace-speedup", type=_above_zero, default=1.0, metavar="X", help="X times as fast (default: 1)"
    )
    group.add_argument(
        "--trace-start", type=types.seconds, default=0.0, metavar="SECONDS", help="begin there in the trace"
    )
    group.add_argument(
        "--trace-duration", type=_above_zero, metavar="SECONDS", help="as much of the trace (default: all)"
    )
    group.add_argument(
        "--trace-sample", type=share, default=1.0, metavar="SHARE", help="share of requests (default: 1)"
    )
    group.add_argument(
        "--trace-length-scale",
        type=_above_zero,
        metavar="X",
        help="multiply lengths (default: what makes the longest request fit the model)",
    )
    group.add_argument(
        "--trace-max-model-len", type=types.positive, metavar="TOKENS", help="default: what the server reports"
    )


def _add_traffic(group: Any) -> None:
    group.add_argument(
        "--request-rate",
        type=_above_zero_or_inf,
        default=math.inf,
        metavar="RATE",
        help="requests per second; inf: all at once, or as the trace has them (default: inf)",
    )
    group.add_argument(
        "--burstiness",
        type=_above_zero_or_inf,
        default=1.0,
        metavar="B",
        help="1: Poisson; below: bursts; above: even; inf: constant gaps (default: 1)",
    )
    group.add_argument("--max-concurrency", type=types.positive, metavar="N", help="requests under way at once")
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="let the rate change over the run")
    group.add_argument("--ramp-up-start-rps", type=types.seconds, metavar="RATE", help="from")
    group.add_argument("--ramp-up-end-rps", type=types.seconds, metavar="RATE", help="to")
    group.add_argument(
        "--num-warmups", type=types.not_negative, default=0, metavar="N", help="requests before (default: 0)"
    )


def add_sampling_flags(group: Any) -> None:
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P", help="most likely tokens that make up P")
    group.add_argument("--top-k", type=int, metavar="K", help="the K most likely tokens")
    group.add_argument("--min-p", type=float, metavar="P", help="tokens at least P times as likely as the likeliest")
    for name in ("frequency", "presence", "repetition"):
        group.add_argument(f"--{name}-penalty", type=float, metavar="X", help="as the API has it")
    group.add_argument("--logprobs", type=types.not_negative, metavar="N", help="log-probabilities per token")
    group.add_argument("--ignore-eos", action="store_true", help="always set for random and recorded loads")
    group.add_argument("--extra-body", type=_json_object, metavar="JSON", help="more fields for every request")


def _add_result(group: Any) -> None:
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el",
        metavar="NAMES",
        help="of ttft, tpot, itl, e2el, client_queue_time (default: the first four)",
    )
    group.add_argument("--metric-percentiles", default="99", metavar="P", help="such as 50,95,99 (default: 99)")
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="objectives of a request, such as ttft:500 tpot:50; names are ttft, tpot, itl (every gap), e2el",
    )
    group.add_argument("-o", "--output", choices=("table", "json"), default="table", help="on stdout (default: table)")
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="with every request in it")
    group.add_argument("--append-result", action="store_true", help="add to the file that is there")
    group.add_argument("--result-dir", metavar="DIR", help="where (default: here)")
    group.add_argument("--result-filename", metavar="NAME", help="default: made of label, rate, model and time")
    group.add_argument("--label", metavar="TEXT", help="in the file and its name (default: the backend)")
    group.add_argument("--metadata", nargs="*", metavar="NAME=VALUE", help="more fields for the file")
    group.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="TTFT and ITL over time and distributed (matplotlib)"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument("--profile", action="store_true", help="profile the server during the run")
    group.add_argument("--admin-url", metavar="URL", help="the server's admin port, where Trimtab's profiler is")
    group.add_argument("--admin-token", metavar="TOKEN", help="its bearer token")


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
    """Above 0 and up to 1."""
    if not 0 < (number := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, above 0 and up to 1")
    return number


def _ratio(text: str) -> float:
    if not 0 <= (number := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a ratio from 0 to below 1")
    return number


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("it must be a JSON object, such as '{\"top_k\": 5}'")
    return value
