"""Cost of the state stream in a core: microseconds per block boundary and per step, with and without a listener.

Prompts are admitted, computed, cached and freed by a real block manager, without a model. The same operations run with
and without the ledger; the difference, divided by the blocks that prompts fill, is its cost.

    python -m engine_benchmarks.state_stream_bench
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_engine.scheduling.block_manager import BlockManager
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.state_stream.cache_ledger import CacheLedger
from trimtab_engine.state_stream.step_time_fit import StepTimeFit

BLOCK_SIZE, NUM_BLOCKS = 16, 8192
TOKENS_PER_KEY = 120
PROMPT_TOKENS, OUTPUT_TOKENS, NUM_PROMPTS = 4000, 256, 60


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of a prompt and its answer, with the prompt's keys."""

    tokens: list[int]
    keys: list[int]
    ends: list[int]


def make_prompts(seed: int = 0) -> list[Prompt]:
    """Return prompts of which a half share their beginning."""
    rng = random.Random(seed)
    shared = [rng.randrange(32_000) for _ in range(PROMPT_TOKENS // 2)]
    prompts = []
    for _ in range(NUM_PROMPTS):
        head = shared if rng.random() < 0.5 else [rng.randrange(32_000) for _ in shared]
        tail = [rng.randrange(32_000) for _ in range(PROMPT_TOKENS // 2 + OUTPUT_TOKENS)]
        tokens, ends = head + tail, list(range(TOKENS_PER_KEY, PROMPT_TOKENS, TOKENS_PER_KEY))
        prompts.append(Prompt(tokens, [hash(tuple(tokens[:end])) & (2**64 - 1) for end in ends], ends))
    return prompts


def run(prompts: Sequence[Prompt], *, listens: bool) -> float:
    """Serve the prompts one after the other, twice, as the scheduler does. Return the CPU seconds."""
    blocks = BlockManager(NUM_BLOCKS, NUM_BLOCKS, BLOCK_SIZE)
    ledger = CacheLedger(blocks) if listens else None
    started = time.thread_time()
    for step, prompt in enumerate([*prompts, *prompts]):
        request = Request.of(str(step), prompt.tokens[:PROMPT_TOKENS], Sampling(), arrival_time=0.0)
        if ledger is not None:
            ledger.add(request, prompt.keys, prompt.ends)
        blocks.share(request, blocks.find_cached(request))
        blocks.allocate(request, PROMPT_TOKENS)
        blocks.cache_blocks(request, PROMPT_TOKENS)
        if ledger is not None:
            ledger.scheduled(step)
            ledger.completed(step)
            ledger.take_news()
        for token in prompt.tokens[PROMPT_TOKENS:]:  # decoding fills a block every BLOCK_SIZE steps
            request.token_ids.append(token)
            blocks.allocate(request, len(request.token_ids))
            if len(request.token_ids) % BLOCK_SIZE == 0:
                blocks.cache_blocks(request, len(request.token_ids))
        blocks.free(request)
    return time.thread_time() - started


def seconds_of_step_fit(count: int = 20_000) -> float:
    """Return the CPU seconds of the fit for one step."""
    fit = StepTimeFit()
    started = time.thread_time()
    for number in range(count):
        fit.add(tokens=64, sequences=64, context=64_000 + number, seconds=0.01, computes_prompts=number % 20 == 0)
    return (time.thread_time() - started) / count


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9, help="runs of each kind, alternating (default: 9)")
    runs: int = parser.parse_args(arguments).runs
    prompts = make_prompts()
    num_blocks = 2 * NUM_PROMPTS * (PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE
    pairs = [(run(prompts, listens=False), run(prompts, listens=True)) for _ in range(runs)]
    without = min(pair[0] for pair in pairs)
    extra = statistics.median(pair[1] - pair[0] for pair in pairs)
    print(f"block manager without listener: {1e6 * without / num_blocks:.2f} µs per block boundary")
    print(f"ledger: {1e6 * extra / num_blocks:.2f} µs more per block boundary ({100 * extra / without:.0f} %)")
    print(f"step-time fit: {1e6 * seconds_of_step_fit():.1f} µs per step")


if __name__ == "__main__":
    main()
