"""Requests and send times from the arguments: prompts of a dataset or a trace."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab_engine.bench.serving.arrivals import RampUp, arrival_times, recorded_times
from trimtab_engine.bench.serving.samples import (
    RandomLengths,
    Sample,
    Words,
    custom_samples,
    prefix_repetition_samples,
    random_samples,
    sharegpt_samples,
)
from trimtab_engine.bench.serving.traces import Cut, read_trace, samples_of, scale_to_fit
from trimtab_engine.errors import ConfigError
from trimtab_engine.text.tokenizer import Tokenizer


def dataset_samples(
    arguments: argparse.Namespace, tokenizer: Tokenizer | None, max_model_len: int | None = None
) -> tuple[list[Sample], dict[str, Any]]:
    """Return the samples of --dataset-name and its flags, and notes for the result. check_inputs has validated them.
    Raises ConfigError.
    """
    seed, count = arguments.seed or 0, arguments.num_prompts
    words = Words(tokenizer, seed, content_seed=getattr(arguments, "content_seed", None))
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
                raise ConfigError("--dataset-name sharegpt requires a tokenizer; set --tokenizer to the model's folder")
            wanted = output_len or arguments.sharegpt_output_len
            return sharegpt_samples(arguments.dataset_path, count, wanted, tokenizer, seed), {}
        case "custom":
            return custom_samples(
                arguments.dataset_path, count, output_len or arguments.custom_output_len, tokenizer
            ), {}
        case _:
            return _trace(arguments, words, max_model_len)


def _trace(
    arguments: argparse.Namespace, words: Words, max_model_len: int | None
) -> tuple[list[Sample], dict[str, Any]]:
    path: Path = arguments.trace_path or arguments.dataset_path
    cut = Cut(arguments.trace_start, arguments.trace_duration, arguments.trace_sample)
    requests = read_trace(path, cut=cut, seed=arguments.seed or 0, lengths=arguments.trace_lengths)
    if arguments.num_prompts_given:
        requests = requests[: arguments.num_prompts]
    limit = arguments.trace_max_model_len or max_model_len
    scale, fitted = scale_to_fit(requests, max_model_len=limit, scale=arguments.trace_length_scale)
    samples = samples_of(fitted, words, scale=scale, speedup=arguments.trace_speedup)
    return samples, {"trace": str(path), "trace_length_scale": scale, "trace_speedup": arguments.trace_speedup}


def parse_ramp(arguments: argparse.Namespace) -> RampUp | None:
    """Return the change of the rate, or None if it is constant. Raises ConfigError for a ramp without its ends."""
    if not arguments.ramp_up_strategy:
        return None
    start, end = arguments.ramp_up_start_rps, arguments.ramp_up_end_rps
    if start is None or end is None or end <= 0 or (start <= 0 and arguments.ramp_up_strategy == "exponential"):
        raise ConfigError("--ramp-up-strategy requires --ramp-up-start-rps and --ramp-up-end-rps, above 0")
    return RampUp(arguments.ramp_up_strategy, start, end)


def send_times(arguments: argparse.Namespace, samples: Sequence[Sample]) -> list[float]:
    """Return the send time of each sample, in seconds after the start."""
    ramp_up = parse_ramp(arguments)
    rate = arguments.request_rate
    if arguments.dataset_name == "trace" and rate == float("inf") and ramp_up is None:
        return recorded_times(samples)
    return arrival_times(
        len(samples), rate=rate, burstiness=arguments.burstiness, seed=arguments.seed or 0, ramp_up=ramp_up
    )
