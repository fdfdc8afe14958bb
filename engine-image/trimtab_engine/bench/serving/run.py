"""One `bench serve` run from arguments to report; connects the other modules."""

import argparse
import asyncio
import json
import secrets
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from trimtab_engine.bench.inputs import check_folder, check_inputs, check_target, check_urls
from trimtab_engine.bench.serving import report, server
from trimtab_engine.bench.serving.client import RequestResult, Target
from trimtab_engine.bench.serving.load import Load, Outcome, run_load
from trimtab_engine.bench.serving.plot import check_plot, plot
from trimtab_engine.bench.serving.samples import Sample, as_text
from trimtab_engine.bench.serving.statistics import (
    Goodput,
    details,
    parse_metrics,
    parse_percentiles,
    summarize,
)
from trimtab_engine.bench.serving.workload import dataset_samples, parse_ramp, send_times
from trimtab_engine.errors import ConfigError
from trimtab_engine.offline.progress_bar import progress_bar
from trimtab_engine.text.tokenizer import Tokenizer

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
MAX_CONTENT_SEED = 1 << 31
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def run_serve(arguments: argparse.Namespace) -> int:
    """Measure and report. Exit code: 0 all requests succeeded, 1 some failed, 130 Ctrl-C."""
    goodput = Goodput.parse(arguments.goodput or [])
    percentiles = parse_percentiles(arguments.metric_percentiles)
    metrics = parse_metrics(arguments.percentile_metrics)
    _metadata(arguments)  # errors are reported before anything is measured
    request_headers(arguments)
    check_urls(arguments)
    parse_ramp(arguments)
    check_inputs(arguments)
    _check_result(arguments)
    if arguments.plot:
        check_plot(arguments.plot, made_anyway=arguments.result_dir if arguments.save_result else None)
    arguments.content_seed = secrets.randbelow(MAX_CONTENT_SEED) if arguments.seed is None else arguments.seed
    outcome, facts = asyncio.run(_measure(arguments))
    figures = summarize(outcome, metrics=metrics, percentiles=percentiles, goodput=goodput)
    result = {**_header(arguments, facts), **figures, "server": facts["server"]}
    _write(arguments, result, outcome)
    if arguments.plot:
        title = f"{facts['model'].name}: {len(outcome.complete)} requests, rate {arguments.request_rate}"
        plot(outcome.complete, arguments.plot, title=title, objectives=goodput.objectives)
        print(f"plotted {arguments.plot}", file=sys.stderr)
    if outcome.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if figures["failed"] or not outcome.results else 0


async def _measure(arguments: argparse.Namespace) -> tuple[Outcome, dict[str, Any]]:
    base, headers = base_url(arguments), request_headers(arguments)
    await server.wait_until_ready(base, headers, arguments.ready_check_timeout_sec)
    model = await server.served_model(base, headers, _model_name(arguments))
    load, notes = build_load(arguments, base, headers, model)
    admin, admin_headers = _profiler_address(arguments, base, headers)
    if arguments.profile:
        await server.profile(admin, admin_headers, "start")
    before = await server.counters(base, headers)
    count, tokens = len(load.samples), 0
    with progress_bar("Requests", count, enabled=not arguments.disable_tqdm) as advance:

        def on_done(result: RequestResult) -> None:
            nonlocal tokens
            tokens += result.output_len
            advance(1, f"{tokens} tokens")

        outcome = await run_load(load, on_done, warmups=arguments.num_warmups)
    after = await server.counters(base, headers)
    if arguments.profile:
        await server.profile(admin, admin_headers, "stop")
    return outcome, {"model": model, "count": count, "server": server.counter_changes(before, after), **notes}


def _model_name(arguments: argparse.Namespace) -> str | None:
    """Return the served name. A --model that is a local path only gives the tokenizer."""
    name: str | None = arguments.served_model_name or arguments.model
    return None if name is not None and name == arguments.model and Path(name).exists() else name


# --- requests ---------------------------------------------------------------------------------------------------------


def build_load(
    arguments: argparse.Namespace, base: str, headers: dict[str, str], model: server.ServedModel
) -> tuple[Load, dict[str, Any]]:
    """Return the load of the arguments, and notes for the result. Raises ConfigError."""
    tokenizer = _tokenizer(arguments, model)
    samples, notes = dataset_samples(arguments, tokenizer, model.max_model_len)
    if not samples:
        raise ConfigError("nothing to send: the dataset, or the selected part of the trace, is empty")
    is_chat = arguments.backend == "openai-chat" or arguments.endpoint.rstrip("/").endswith("/chat/completions")
    if is_chat:
        samples = as_text(samples, tokenizer)
    _check_lengths(samples, model)
    endpoint = arguments.endpoint
    if is_chat and endpoint == "/v1/completions":
        endpoint = "/v1/chat/completions"
    return Load(
        samples=samples,
        times=send_times(arguments, samples),
        target=Target(base + endpoint, headers),
        body=_body(arguments, model),
        is_chat=is_chat,
        max_concurrency=arguments.max_concurrency,
    ), notes


def _tokenizer(arguments: argparse.Namespace, model: server.ServedModel) -> Tokenizer | None:
    """Return the named tokenizer, or that of the model path reported by the server if it exists locally."""
    if arguments.skip_tokenizer_init:
        return None
    named = arguments.tokenizer or (arguments.model if arguments.model and Path(arguments.model).exists() else None)
    if named is None and model.root and Path(model.root).is_dir():
        named = model.root
    return None if named is None else Tokenizer(named)


def _check_lengths(samples: Sequence[Sample], model: server.ServedModel) -> None:
    """Raise ConfigError if the server would reject a request as too long, as far as known."""
    longest = max(((sample.prompt_len or 0) + (sample.output_len or 0) for sample in samples), default=0)
    if model.max_model_len and longest > model.max_model_len:
        raise ConfigError(
            f"the longest request has {longest} tokens in and out, but the maximum of {model.name} is "
            f"{model.max_model_len}; lower --input-len or --output-len, or start the server with a larger "
            "--max-model-len"
        )


def _body(arguments: argparse.Namespace, model: server.ServedModel) -> dict[str, Any]:
    body = {name: value for name in SAMPLING_FIELDS if (value := getattr(arguments, name)) is not None}
    if arguments.ignore_eos or arguments.dataset_name in ("random", "prefix_repetition", "trace"):
        body["ignore_eos"] = True  # outputs must have the planned length
    if arguments.logprobs is not None:
        is_chat = arguments.backend == "openai-chat"
        body |= {"logprobs": True, "top_logprobs": arguments.logprobs} if is_chat else {"logprobs": arguments.logprobs}
    return {"model": model.name, **body, **(arguments.extra_body or {})}


# --- destination and result
# --------------------------------------------------------------------------------------------


def base_url(arguments: argparse.Namespace) -> str:
    """Return --base-url, or the URL of --host and --port, without a trailing slash."""
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    url: str = arguments.base_url or f"http://{host}:{arguments.port}"
    return url.rstrip("/")


def request_headers(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the headers of every request, from --api-key and --header. Raises ConfigError."""
    headers = {"Content-Type": "application/json"}
    if arguments.api_key:
        headers["Authorization"] = f"Bearer {arguments.api_key}"
    for item in arguments.header or []:
        name, separator, value = item.partition("=")
        if not separator:
            raise ConfigError(f"--header {item!r}: use NAME=VALUE")
        headers[name.strip()] = value.strip()
    return headers


def _profiler_address(arguments: argparse.Namespace, base: str, headers: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return the profiler's URL: Trimtab's is on the admin port, vLLM's on its API."""
    if arguments.admin_url is None:
        return base, headers
    token = {"Authorization": f"Bearer {arguments.admin_token}"} if arguments.admin_token else {}
    return arguments.admin_url.rstrip("/"), {**headers, **token}


def _header(arguments: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the run's parameters: vLLM's fields, metadata, and the trace's."""
    rate = arguments.request_rate
    header = {
        "date": f"{datetime.now().astimezone():%Y%m%d-%H%M%S}",
        "endpoint_type": arguments.backend,
        "backend": arguments.backend,
        "label": arguments.label,
        "model_id": facts["model"].name,
        "tokenizer_id": arguments.tokenizer,
        "num_prompts": facts["count"],
        "request_rate": "inf" if rate == float("inf") else rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        "dataset_name": arguments.dataset_name,
        "seed": arguments.seed or 0,
        "content_seed": arguments.content_seed,
    }
    if arguments.dataset_name == "random" and arguments.random_prefix_len:
        input_len = arguments.input_len or arguments.random_input_len
        header["shared_prefix_share"] = arguments.random_prefix_len / (arguments.random_prefix_len + input_len)
    trace = {name: value for name, value in facts.items() if name.startswith("trace")}
    return header | trace | _metadata(arguments)


def _metadata(arguments: argparse.Namespace) -> dict[str, str]:
    """Parse --metadata NAME=VALUE …. Raises ConfigError."""
    pairs = [item.partition("=") for item in arguments.metadata or []]
    for name, separator, value in pairs:
        if not separator:
            raise ConfigError(f"--metadata {name + value!r}: use NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _write(arguments: argparse.Namespace, result: dict[str, Any], outcome: Outcome) -> None:
    failed = [one.error for one in outcome.results if not one.success and one.error != "interrupted"]
    if failed:
        print(f"{len(failed)} requests failed:\n{report.errors_line(failed)}", file=sys.stderr)
    print(json.dumps(result, indent=1) if arguments.output == "json" else report.table(result), flush=True)
    if arguments.save_result or arguments.append_result:
        _save(arguments, result, outcome)


def _check_result(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if the result cannot be saved."""
    if not (arguments.save_result or arguments.append_result):
        return
    folder = Path(arguments.result_dir or ".")
    check_folder("--result-dir", folder)
    if arguments.result_filename and folder.is_dir():
        path = folder / arguments.result_filename
        check_target("--result-filename", path)
        if arguments.append_result and path.exists():
            report.read_results(path)


def _save(arguments: argparse.Namespace, result: dict[str, Any], outcome: Outcome) -> None:
    name = arguments.result_filename or report.file_name(
        label=arguments.label or arguments.backend,
        rate=arguments.request_rate,
        max_concurrency=arguments.max_concurrency,
        model=result["model_id"],
        now=datetime.now().astimezone(),
    )
    path = Path(arguments.result_dir or ".") / name
    report.save(
        {**result, **(details(outcome) if arguments.save_detailed else {})}, path, append=arguments.append_result
    )
    print(f"saved {path}", file=sys.stderr)
