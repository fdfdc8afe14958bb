"""`trimtab-engine bench throughput`: many concurrent requests in this process, with vLLM's arguments and fields."""

import argparse
import json
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from trimtab_engine import LLM, SamplingParams
from trimtab_engine.bench.inputs import check_inputs, check_target
from trimtab_engine.bench.latency_bench import check_profile, profile
from trimtab_engine.bench.outputs import write_file
from trimtab_engine.bench.serving.samples import Sample
from trimtab_engine.bench.serving.workload import dataset_samples
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags.engine import engine_config
from trimtab_engine.flags.local_model import local_model
from trimtab_engine.offline.outputs import RequestOutput


def run_throughput(arguments: argparse.Namespace) -> int:
    """Generate for all samples at once and report. Return the exit code; Ctrl-C ends without results (130)."""
    check_profile(arguments)
    check_inputs(arguments)
    if arguments.output_json:
        check_target("--output-json", Path(arguments.output_json))
    arguments, fetched = local_model(arguments)
    with closing(fetched) if fetched else nullcontext(), LLM.of(engine_config(arguments)) as llm:
        samples, _ = dataset_samples(arguments, llm.get_tokenizer())
        if not samples:
            raise ConfigError("nothing to generate: the dataset has no prompt of a suitable length")
        prompts, params = _checked(samples, arguments, llm.ready.max_model_len)
        if arguments.profile:
            return profile(llm, lambda: llm.generate(prompts, params))
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        elapsed = time.perf_counter() - started
    result = summarize(outputs, elapsed)
    print(text(result))
    if arguments.output_json:
        write_file(Path(arguments.output_json), (json.dumps(result, indent=4) + "\n").encode())
    return 0


def _checked(
    samples: list[Sample], arguments: argparse.Namespace, max_model_len: int
) -> tuple[list[str | list[int]], list[SamplingParams]]:
    longest = max((sample.prompt_len or 0) + (sample.output_len or 0) for sample in samples)
    if longest > max_model_len:
        raise ConfigError(
            f"the longest request has {longest} tokens in and out, but the model's maximum is {max_model_len}; lower "
            f"--input-len or --output-len, or raise --max-model-len"
        )
    params = [
        SamplingParams(
            n=arguments.n,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=sample.output_len,
            detokenize=not arguments.disable_detokenize,
        )
        for sample in samples
    ]
    return [sample.prompt for sample in samples], params


def summarize(outputs: list[RequestOutput], elapsed: float) -> dict[str, Any]:
    """Return vLLM's fields, and the number of output tokens."""
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": num_input + num_output,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (num_input + num_output) / elapsed,
        "total_output_tokens": num_output,
        "output_tokens_per_second": num_output / elapsed,
    }


def text(result: dict[str, Any]) -> str:
    return (
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {result['total_num_tokens'] - result['total_output_tokens']}\n"
        f"Total num output tokens:  {result['total_output_tokens']}"
    )
