"""First-token latency of a resumed conversation: found in the KV cache, in host memory, or not at all.

The KV cache has room for one conversation, the host cache for two. Two conversations alternate, each time with a few
more tokens at the end:

```
first      first again   second               first again     second again    all cleared, first again
computed   KV cache      computed, evicts     host memory     host memory     computed
```
Processor time is reported in addition to wall time, which other work on the machine changes.

    python -m engine_benchmarks.host_cache_bench MODEL --tokens 4096 --rounds 3
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trimtab_engine import LLM
from trimtab_engine.bench.serving.samples import Words
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.text.tokenizer import Tokenizer

CONVERSATION_TOKENS = 4096  # half of the sample model's context
QUESTION_TOKENS = 32  # added per turn
BLOCK_SIZE = 16
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One turn: its wait for the first token, and where its prompt was found."""

    wall_seconds: float
    processor_seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_host_cached_tokens: int

    @property
    def place(self) -> str:
        if not self.num_cached_tokens:
            return "computed"
        return "host memory" if self.num_host_cached_tokens else "KV cache"


def first_token(llm: LLM, name: str, prompt: list[int]) -> FirstToken:
    wall, processor = time.perf_counter(), time.process_time()
    llm.engine.add(AddRequest(name, prompt, Sampling(temperature=0.0, max_tokens=1), time.monotonic()))
    while True:
        outputs = [output for output in llm.engine.step().outputs if output.token_ids]
        if outputs:
            break
    seconds = time.perf_counter() - wall, time.process_time() - processor
    while llm.engine.has_work:
        llm.engine.step()
    return FirstToken(*seconds, len(prompt), outputs[0].num_cached_tokens, outputs[0].num_host_cached_tokens)


def turns(llm: LLM, words: Words, num_tokens: int, number: int) -> list[FirstToken]:
    """Run one round: two new conversations, over all three places."""
    first, second = words.draw(num_tokens), words.draw(num_tokens)

    def turn(step: str, conversation: list[int]) -> FirstToken:
        return first_token(llm, f"{number}-{step}", [*conversation, *words.draw(QUESTION_TOKENS)])

    seen = [turn("first", first), turn("first again", first), turn("second", second)]
    seen += [turn("first from host", first), turn("second from host", second)]
    llm.engine.reset_prefix_cache(reset_running_requests=False)
    return [*seen, turn("first, forgotten", first)]


def measure(model: str, num_tokens: int, rounds: int, **settings: Any) -> dict[str, Any]:
    """Measure medians by place, over the rounds."""
    longest = num_tokens + QUESTION_TOKENS + BLOCK_SIZE
    num_blocks = longest // BLOCK_SIZE + 2
    tokenizer = Tokenizer(model)
    with LLM(
        model,
        device="cpu",
        max_model_len=longest,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=num_blocks,
        max_num_seqs=4,
        **({"kv_offload_size": "1Gi"} | settings),
    ) as llm:
        seen = [turn for number in range(rounds) for turn in turns(llm, Words(tokenizer, number), num_tokens, number)]
    places: dict[str, list[FirstToken]] = {}
    for turn in seen:
        places.setdefault(turn.place, []).append(turn)
    return {
        place: {
            "turns": len(found),
            "median_wall_ms": 1000 * statistics.median(turn.wall_seconds for turn in found),
            "median_processor_ms": 1000 * statistics.median(turn.processor_seconds for turn in found),
            "one": asdict(found[-1]),
        }
        for place, found in places.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="host_cache_bench", description="First tokens of conversations that return.")
    parser.add_argument("model", help="folder with safetensors and a tokenizer")
    parser.add_argument("--tokens", type=int, default=CONVERSATION_TOKENS, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    options = parser.parse_args(arguments)
    print(json.dumps(measure(options.model, options.tokens, options.rounds), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
