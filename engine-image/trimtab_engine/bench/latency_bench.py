"""`trimtab-engine bench latency`: latency of one batch in this process, with vLLM's arguments and fields."""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from trimtab_engine import LLM, SamplingParams
from trimtab_engine.bench.inputs import check_inputs, check_target
from trimtab_engine.bench.outputs import write_file
from trimtab_engine.bench.serving.samples import Words
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags.engine import engine_config
from trimtab_engine.flags.local_model import local_model
from trimtab_engine.offline.progress_bar import progress_bar

PERCENTILES = (10, 25, 50, 75, 90, 99)
EXIT_INTERRUPTED = 130


def run_latency(arguments: argparse.Namespace) -> int:
    """Warm up, measure, report. Ctrl-C reports the completed iterations. Return the exit code."""
    check_profile(arguments)
    check_inputs(arguments)
    if arguments.output_json:
        check_target("--output-json", Path(arguments.output_json))
    arguments, fetched = local_model(arguments)
    with closing(fetched) if fetched else nullcontext(), LLM.of(engine_config(arguments)) as llm:
        room = llm.ready.max_model_len
        if arguments.input_len + arguments.output_len > room:
            raise ConfigError(
                f"--input-len {arguments.input_len} and --output-len {arguments.output_len} exceed the model's "
                f"{room} tokens; lower them, or raise --max-model-len"
            )
        prompts = [Words(llm.get_tokenizer(), seed).draw(arguments.input_len) for seed in range(arguments.batch_size)]
        params = SamplingParams(
            n=arguments.n,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=arguments.output_len,
            detokenize=not arguments.disable_detokenize,
        )

        def one_round() -> float:
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - started

        latencies: list[float] = []
        interrupted = False
        try:
            _rounds("Warm-up", arguments.num_iters_warmup, one_round, [])
            if arguments.profile:
                return profile(llm, one_round)
            _rounds("Rounds", arguments.num_iters, one_round, latencies)
        except KeyboardInterrupt:
            interrupted = True
    if latencies:
        result = summarize(latencies)
        print(text(result))
        if arguments.output_json:
            write_file(Path(arguments.output_json), (json.dumps(result, indent=4) + "\n").encode())
    return EXIT_INTERRUPTED if interrupted else 0


def check_profile(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if a profile cannot be written, before anything is loaded."""
    if arguments.profile and arguments.profiler_dir is None:
        raise ConfigError("--profile requires --profiler-dir DIR")


def profile(llm: LLM, work: Callable[[], object]) -> int:
    """Profile the work instead of measuring it, and print the path of the trace."""
    llm.start_profile()
    work()
    print(f"profile: {llm.stop_profile()}")
    return 0


def _rounds(name: str, count: int, one_round: Callable[[], float], latencies: list[float]) -> None:
    with progress_bar(name, count) as advance:
        for _ in range(count):
            latencies.append(one_round())
            advance(1, f"{latencies[-1]:.2f} s")


def summarize(latencies: Sequence[float]) -> dict[str, Any]:
    """Return vLLM's fields."""
    values = np.array(latencies)
    return {
        "avg_latency": float(values.mean()),
        "std_latency": float(values.std()),
        "latencies": list(latencies),
        "percentiles": {str(p): float(np.percentile(values, p)) for p in PERCENTILES},
    }


def text(result: dict[str, Any]) -> str:
    lines = [f"Avg latency: {result['avg_latency']} seconds", f"Std latency: {result['std_latency']} seconds"]
    lines += [f"{p}% percentile latency: {value} seconds" for p, value in result["percentiles"].items()]
    return "\n".join(lines)
