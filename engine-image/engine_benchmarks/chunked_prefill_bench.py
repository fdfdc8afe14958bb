"""Effect of max_num_batched_tokens, step by step in this process and in processor time, which other work on the machine
hardly changes: how a long prompt delays decoding streams, and how long it waits for its own first token.

    python -m engine_benchmarks.chunked_prefill_bench MODEL
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from trimtab_engine import LLM
from trimtab_engine.bench.serving.samples import Words
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.scheduling.sampling import Sampling

BUDGETS = (32, 64, 128, 256, 512, 1024)
STREAMS, LONG_PROMPT, SHORT_PROMPT = 4, 800, 16
BATCH, BATCH_PROMPT, BATCH_OUTPUT = 12, 128, 8
ROUNDS = 3


def request(name: str, prompt: list[int], max_tokens: int) -> AddRequest:
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return AddRequest(name, prompt, sampling, time.monotonic())


def step(llm: LLM) -> tuple[float, set[str]]:
    """Return the processor seconds of one step, and the requests that got a token."""
    started = time.process_time()
    outputs = llm.engine.step().outputs
    return time.process_time() - started, {output.request_id for output in outputs if output.token_ids}


def interrupted_streams(llm: LLM, words: Words) -> dict[str, float]:
    """Submit a long prompt while streams decode: return their longest and median gap until its first token, and its
    wait.
    """
    streams = [f"stream-{number}" for number in range(STREAMS)]
    for name in streams:
        llm.engine.add(request(name, words.draw(SHORT_PROMPT), 1000))
    begun: set[str] = set()
    while len(begun) < STREAMS:
        begun |= step(llm)[1]
    alone = [step(llm)[0] for _ in range(8)]
    llm.engine.add(request("long", words.draw(LONG_PROMPT), 1))
    gaps: list[float] = []
    arrived = False
    while not arrived:
        seconds, got = step(llm)
        gaps.append(seconds)
        arrived = "long" in got
    llm.engine.abort(streams)
    while llm.engine.has_work:
        llm.engine.step()
    return {
        "ttft_ms": 1000 * sum(gaps),
        "longest_itl_ms": 1000 * max(gaps),
        "itl_without_prompt_ms": 1000 * statistics.median(alone),
        "steps": len(gaps),
    }


def batch_seconds(llm: LLM, words: Words) -> float:
    """Return the processor seconds of many requests submitted at once."""
    for number in range(BATCH):
        llm.engine.add(request(f"batch-{number}", words.draw(BATCH_PROMPT), BATCH_OUTPUT))
    started = time.process_time()
    while llm.engine.has_work:
        llm.engine.step()
    return time.process_time() - started


def measure(model: str, rounds: int) -> list[dict[str, Any]]:
    """Measure medians over the rounds, one row per budget; budgets alternate."""
    seen: dict[int, list[dict[str, float]]] = {budget: [] for budget in BUDGETS}
    limits: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 16, "num_gpu_blocks_override": 400}
    with LLM(model, device="cpu", max_num_batched_tokens=max(BUDGETS), enable_prefix_caching=False, **limits) as llm:
        for number in range(rounds):
            for budget in BUDGETS:
                llm.patch_config(max_num_batched_tokens=budget)
                words = Words(None, seed=number)
                seen[budget].append({**interrupted_streams(llm, words), "batch_seconds": batch_seconds(llm, words)})
                print(f"[chunked prefill] {budget}: {seen[budget][-1]}", file=sys.stderr, flush=True)
    return [
        {"max_num_batched_tokens": budget, **{name: statistics.median(run[name] for run in runs) for name in runs[0]}}
        for budget, runs in seen.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chunked_prefill_bench", description="max_num_batched_tokens, step by step.")
    parser.add_argument("model", help="folder with safetensors and a tokenizer")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    options = parser.parse_args(arguments)
    print(json.dumps(measure(options.model, options.rounds), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
