"""One `bench serve` from its arguments to its report: the only place here where things are put together."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from trimtab_engine.bench.serving import report, server
from trimtab_engine.bench.serving.arrivals import RampUp, arrival_times, recorded_times
from trimtab_engine.bench.serving.client import RequestResult, Target
from trimtab_engine.bench.serving.load import Load, Outcome, run_load
from trimtab_engine.bench.serving.plot import check_plot, plot
from trimtab_engine.bench.serving.samples import (
    RandomLengths,
    Sample,
    Words,
    as_text,
    custom_samples,
    prefix_repetition_samples,
    random_samples,
    sharegpt_samples,
)
from trimtab_engine.bench.serving.statistics import (
    Goodput,
    details,
    parse_metrics,
    parse_percentiles,
    summarize,
)
from trimtab_engine.bench.serving.traces import Cut, fit, read_trace, samples_of
from trimtab_engine.errors import ConfigError
from trimtab_engine.progress_bar import progress_bar
from trimtab_engine.tokenizer import Tokenizer

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
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
    """Measure and report. Exit code: 0 all requests were answered, 1 some were not, 130 Ctrl-C."""
    goodput = Goodput.parse(arguments.goodput or [])
    percentiles = parse_percentiles(arguments.metric_percentiles)
    metrics = parse_metrics(arguments.percentile_metrics)
    if arguments.plot:
        check_plot(arguments.plot)
    outcome, facts = asyncio.run(_measure(arguments))
    figures = summarize(outcome, metrics=metrics, percentiles=percentiles, goodput=goodput)
    result = {**_header(arguments, facts), **figures, "server": facts["server"]}
    if arguments.plot:
        title = f"{facts['model'].name}: {len(outcome.complete)} requests, rate {arguments.request_rate}"
        plot(outcome.complete, arguments.plot, title=title, objectives=goodput.objectives)
    _write(arguments, result, outcome)
    if outcome.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if figures["failed"] or not outcome.results else 0


async def _measure(arguments: argparse.Namespace) -> tuple[Outcome, dict[str, Any]]:
    base, headers = base_url(arguments), _headers(arguments)
    await server.wait_until_ready(base, headers, arguments.ready_check_timeout_sec)
    model = await server.served_model(base, headers, _model_name(arguments))
    load, notes = _load(arguments, base, headers, model)
    admin, admin_headers = _profiler_at(arguments, base, headers)
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
    return outcome, {"model": model, "count": count, "server": server.during(before, after), **notes}


def _model_name(arguments: argparse.Namespace) -> str | None:
    """The served name. A --model that is a path here says where the tokenizer is, and no name."""
    name: str | None = arguments.served_model_name or arguments.model
    return None if name is not None and name == arguments.model and Path(name).exists() else name


# --- what is sent -------------------------------------------------------------------------------------------------


def _load(
    arguments: argparse.Namespace, base: str, headers: dict[str, str], model: server.ServedModel
) -> tuple[Load, dict[str, Any]]:
    tokenizer = _tokenizer(arguments, model)
    samples, notes = dataset_samples(arguments, tokenizer, model.max_model_len)
    if not samples:
        raise ConfigError(
            "there is nothing to send: the dataset, or the part of the trace that was asked for, is empty"
        )
    is_chat = arguments.backend == "openai-chat" or arguments.endpoint.rstrip("/").endswith("/chat/completions")
    if is_chat:
        samples = as_text(samples, tokenizer)
    _check_lengths(samples, model)
    endpoint = arguments.endpoint
    if is_chat and endpoint == "/v1/completions":
        endpoint = "/v1/chat/completions"
    return Load(
        samples=samples,
        times=_times(arguments, samples),
        target=Target(base + endpoint, headers),
        body=_body(arguments, model),
        is_chat=is_chat,
        max_concurrency=arguments.max_concurrency,
    ), notes


def dataset_samples(
    arguments: argparse.Namespace, tokenizer: Tokenizer | None, max_model_len: int | None = None
) -> tuple[list[Sample], dict[str, Any]]:
    """What --dataset-name and its flags ask for, and what the result should say about it. Raises ConfigError."""
    words, count = Words(tokenizer, arguments.seed), arguments.num_prompts
    output_len = arguments.output_len
    match arguments.dataset_name:
        case "random":
            lengths = RandomLengths(
                arguments.input_len or arguments.random_input_len,
                output_len or arguments.random_output_len,
                arguments.random_prefix_len,
                arguments.random_range_ratio,
            )
            return random_samples(count, lengths, words), {}
        case "prefix_repetition":
            return prefix_repetition_samples(
                count,
                prefix_len=arguments.prefix_repetition_prefix_len,
                suffix_len=arguments.prefix_repetition_suffix_len,
                num_prefixes=arguments.prefix_repetition_num_prefixes,
                output_len=output_len or arguments.prefix_repetition_output_len,
                words=words,
            ), {}
        case "sharegpt":
            if tokenizer is None:
                raise ConfigError("--dataset-name sharegpt counts tokens; give --tokenizer the model's folder")
            wanted = output_len or arguments.sharegpt_output_len
            return sharegpt_samples(_path(arguments), count, wanted, tokenizer, arguments.seed), {}
        case "custom":
            return custom_samples(_path(arguments), count, output_len or arguments.custom_output_len, tokenizer), {}
        case _:
            return _trace(arguments, words, max_model_len)


def _path(arguments: argparse.Namespace) -> Path:
    if arguments.dataset_path is None:
        raise ConfigError(f"--dataset-name {arguments.dataset_name} needs --dataset-path FILE")
    path: Path = arguments.dataset_path
    return path


def _trace(
    arguments: argparse.Namespace, words: Words, max_model_len: int | None
) -> tuple[list[Sample], dict[str, Any]]:
    path = arguments.trace_path or arguments.dataset_path
    if path is None:
        raise ConfigError("--dataset-name trace needs --trace-path FILE")
    cut = Cut(arguments.trace_start, arguments.trace_duration, arguments.trace_sample)
    requests = read_trace(path, cut=cut, seed=arguments.seed, lengths=arguments.trace_lengths)
    if arguments.num_prompts_given:
        requests = requests[: arguments.num_prompts]
    limit = arguments.trace_max_model_len or max_model_len
    scale, fitted = fit(requests, max_model_len=limit, scale=arguments.trace_length_scale)
    samples = samples_of(fitted, words, scale=scale, speedup=arguments.trace_speedup)
    return samples, {"trace": str(path), "trace_length_scale": scale, "trace_speedup": arguments.trace_speedup}


def _tokenizer(arguments: argparse.Namespace, model: server.ServedModel) -> Tokenizer | None:
    """The one that was named, else the one where the server says that its model is, if that is here too."""
    if arguments.skip_tokenizer_init:
        return None
    named = arguments.tokenizer or (arguments.model if arguments.model and Path(arguments.model).exists() else None)
    if named is None and model.root and Path(model.root).is_dir():
        named = model.root
    return None if named is None else Tokenizer(named)


def _times(arguments: argparse.Namespace, samples: Sequence[Sample]) -> list[float]:
    ramp_up = None
    if arguments.ramp_up_strategy:
        start, end = arguments.ramp_up_start_rps, arguments.ramp_up_end_rps
        if start is None or end is None or end <= 0 or (start <= 0 and arguments.ramp_up_strategy == "exponential"):
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, above 0")
        ramp_up = RampUp(arguments.ramp_up_strategy, start, end)
    rate = arguments.request_rate
    if arguments.dataset_name == "trace" and rate == float("inf") and ramp_up is None:
        return recorded_times(samples)
    return arrival_times(len(samples), rate=rate, burstiness=arguments.burstiness, seed=arguments.seed, ramp_up=ramp_up)


def _check_lengths(samples: Sequence[Sample], model: server.ServedModel) -> None:
    """Refuse a load of which the server would refuse a part, where that can be known."""
    longest = max(((sample.prompt_len or 0) + (sample.output_len or 0) for sample in samples), default=0)
    if model.max_model_len and longest > model.max_model_len:
        raise ConfigError(
            f"the longest request has {longest} tokens in and out, but {model.name} takes {model.max_model_len}; lower "
            f"--input-len or --output-len, or serve with a larger --max-model-len"
        )


def _body(arguments: argparse.Namespace, model: server.ServedModel) -> dict[str, Any]:
    body = {name: value for name in SAMPLING_FIELDS if (value := getattr(arguments, name)) is not None}
    if arguments.ignore_eos or arguments.dataset_name in ("random", "prefix_repetition", "trace"):
        body["ignore_eos"] = True  # outputs are as long as the load says
    if arguments.logprobs is not None:
        is_chat = arguments.backend == "openai-chat"
        body |= {"logprobs": True, "top_logprobs": arguments.logprobs} if is_chat else {"logprobs": arguments.logprobs}
    return {"model": model.name, **body, **(arguments.extra_body or {})}


# --- where it goes and what comes of it ---------------------------------------------------------------------------


def base_url(arguments: argparse.Namespace) -> str:
    """--base-url, else made of --host and --port; without a slash at its end."""
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    url: str = arguments.base_url or f"http://{host}:{arguments.port}"
    return url.rstrip("/")


def _headers(arguments: argparse.Namespace) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if arguments.api_key:
        headers["Authorization"] = f"Bearer {arguments.api_key}"
    for item in arguments.header or []:
        name, separator, value = item.partition("=")
        if not separator:
            raise ConfigError(f"--header {item!r}: write NAME=VALUE")
        headers[name.strip()] = value.strip()
    return headers


def _profiler_at(arguments: argparse.Namespace, base: str, headers: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Our profiler is on the admin port; vLLM's is where its API is."""
    if arguments.admin_url is None:
        return base, headers
    token = {"Authorization": f"Bearer {arguments.admin_token}"} if arguments.admin_token else {}
    return arguments.admin_url.rstrip("/"), {**headers, **token}


def _header(arguments: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    """What was run: vLLM's fields, metadata, and the trace's."""
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
    }
    for item in arguments.metadata or []:
        name, separator, value = item.partition("=")
        if not separator:
            raise ConfigError(f"--metadata {item!r}: write NAME=VALUE")
        header[name] = value
    return header | {name: value for name, value in facts.items() if name.startswith("trace")}


def _write(arguments: argparse.Namespace, result: dict[str, Any], outcome: Outcome) -> None:
    failed = [one.error for one in outcome.results if not one.success and one.error != "interrupted"]
    if failed:
        print(f"{len(failed)} requests failed:\n{report.errors_line(failed)}", file=sys.stderr)
    if arguments.save_result or arguments.append_result:
        _save(arguments, result, outcome)
    print(json.dumps(result, indent=1) if arguments.output == "json" else report.table(result))


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
