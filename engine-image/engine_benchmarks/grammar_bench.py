"""Cost of grammars: one token's mask, and a decode step with grammars compared with one without, in the same run.

python -m engine_benchmarks.grammar_bench MODEL [-o json]
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Literal

import torch
import typer
from llguidance import LLTokenizer
from rich.console import Console
from rich.table import Table
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.core.startup import start_engine
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.models.registry import open_model, parse_model_config
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.structured.matcher import WORD_BYTES, GrammarMatcher
from trimtab_engine.structured.validation import grammar_text, validate_grammar
from trimtab_engine.structured.vocabulary import read_vocabulary
from trimtab_kernels.apply_token_bitmask import apply_token_bitmask

BATCHES = (1, 8)
NUM_STEPS = 8  # decode steps per round
ROUNDS = 30  # rounds with and without grammars alternate, so that other work on the machine favours neither
NUM_TOKENS = 200  # steps of a random walk that measures masks
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": [f"tag{n}" for n in range(20)]}},
        "notes": {"type": "string"},
    },
    "required": ["name", "age", "tags", "notes"],
    "additionalProperties": False,
}
ARITHMETIC = (
    'start: sum\nsum: product (("+"|"-") product)*\nproduct: atom (("*"|"/") atom)*\natom: /[0-9]+/ | "(" sum ")"'
)
GRAMMARS: dict[str, dict[str, object]] = {
    "JSON schema": {"kind": "json", "value": json.dumps(SCHEMA)},
    "any JSON object": {"kind": "json", "value": '{"type":"object"}'},
    "regex": {"kind": "regex", "value": r"([a-z]{1,12} ){1,500}[0-9]{4}"},
    "1,000 choices": {"kind": "choice", "value": [f"choice number {n}" for n in range(1000)]},
    "Lark grammar": {"kind": "grammar", "value": ARITHMETIC},
}
LONG: dict[str, object] = {"kind": "regex", "value": r"([a-z]{1,12} )+"}
"""For the steps: nearly every token of a language model needs a check, and it does not end."""


@dataclass(frozen=True, slots=True)
class MaskCost:
    """One grammar. Milliseconds of its compilation; microseconds of processor time for a mask, median and worst, in a
    random walk, including the first masks; for a copy, and for an accepted token.
    """

    grammar: str
    trial_ms: float
    mask_us: float
    worst_mask_us: float
    copy_us: float
    accept_us: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """Decode steps of `batch` requests. Medians over the rounds: milliseconds of a step without grammars, and the ratio
    with and without; processor time of applying a bitmask.
    """

    batch: int
    without_ms: float
    ratio: float
    apply_us_per_token: float


def mask_costs(tokenizer: LLTokenizer) -> list[MaskCost]:
    return [_mask_cost(tokenizer, name, spec) for name, spec in GRAMMARS.items()]


def _mask_cost(tokenizer: LLTokenizer, name: str, spec: dict[str, object]) -> MaskCost:
    began = time.perf_counter()
    grammar = validate_grammar(tokenizer, spec)["grammar"]
    trial_seconds = time.perf_counter() - began
    prototype = GrammarMatcher.of(tokenizer, grammar)
    row = torch.empty(1, prototype.num_words, dtype=torch.int32)
    masks, accepts, copies = [], [], []
    generator = torch.Generator().manual_seed(0)
    matcher = prototype
    for _ in range(NUM_TOKENS):
        if matcher is prototype or matcher.is_complete:
            copies.append(_seconds(prototype.copy))
            matcher = prototype.copy()
        masks.append(_seconds(partial(matcher.fill, row.data_ptr(), matcher.num_words * WORD_BYTES)))
        bits = torch.zeros(1, tokenizer.vocab_size)
        apply_token_bitmask(bits, row, torch.tensor([0]))
        allowed = torch.nonzero(torch.isfinite(bits[0])).flatten()
        token = int(allowed[torch.randint(len(allowed), (1,), generator=generator)])
        accepts.append(_seconds(partial(matcher.accept, [token])))
    micro = [statistics.median(values) * 1e6 for values in (masks, copies, accepts)]
    return MaskCost(name, trial_seconds * 1e3, micro[0], max(masks) * 1e6, micro[1], micro[2])


def _seconds(run: Callable[[], object]) -> float:
    began = time.thread_time()
    run()
    return time.thread_time() - began


def step_costs(model: str, engine: Engine, vocab_size: int) -> list[StepCost]:
    grammar = grammar_text(LONG)
    costs = []
    for batch in BATCHES:
        _decode(engine, batch, grammar, f"warm-{batch}")
        turns = [
            [_decode(engine, batch, kind, f"{batch}-{number}") for kind in (None, grammar)] for number in range(ROUNDS)
        ]
        costs.append(
            StepCost(
                batch,
                statistics.median(without for without, _ in turns) * 1e3,
                statistics.median(with_grammar / without for without, with_grammar in turns),
                _apply_seconds(batch, vocab_size) * 1e6 / batch,
            )
        )
    return costs


def _decode(engine: Engine, batch: int, grammar: str | None, name: str) -> float:
    """Return the median seconds of a decode step; the requests are aborted afterwards."""
    ids = [f"{name}-{index}-{grammar is None}" for index in range(batch)]
    sampling = Sampling(max_tokens=NUM_STEPS + 20, temperature=0.0, ignore_eos=True, grammar=grammar)
    for index, request_id in enumerate(ids):
        engine.add(AddRequest(request_id, [100 + index] * 8, sampling, 0.0))
    seconds: list[float] = []
    while len(seconds) < NUM_STEPS:
        began = time.perf_counter()
        outputs = engine.step()
        if outputs.stats.kind == "decode" and outputs.stats.num_batch_requests == batch:
            seconds.append(time.perf_counter() - began)
    engine.abort(ids)
    return statistics.median(seconds)


def _apply_seconds(batch: int, vocab_size: int) -> float:
    logits = torch.randn(batch, vocab_size)
    bitmask = torch.randint(-(2**31), 2**31, (batch, (vocab_size + 31) // 32), dtype=torch.int64).to(torch.int32)
    return statistics.median(
        _seconds(lambda: apply_token_bitmask(logits, bitmask, torch.arange(batch))) for _ in range(50)
    )


def make_engine(model: str) -> Engine:
    config = EngineConfig(
        model=model,
        max_model_len=256,
        num_gpu_blocks_override=256,
        max_num_seqs=max(BATCHES),
        max_num_seqs_cap=max(BATCHES),
        max_num_batched_tokens=256,
        max_num_batched_tokens_cap=256,
        enable_prefix_caching=False,
    )
    return start_engine(config, lambda stage, percent: None, time.monotonic)[0]


def main(model: str, output: Annotated[Literal["table", "json"], typer.Option("-o")] = "table") -> None:
    """Measure the cost of grammars on this machine."""
    source = open_model(model)
    facts = parse_model_config(source.config, source.generation_config, source.where)
    began = time.perf_counter()
    tokenizer = read_vocabulary(model, facts.vocab_size, tuple(facts.eos_token_ids)).build()
    tokenizer_seconds = time.perf_counter() - began
    masks = mask_costs(tokenizer)
    steps = step_costs(model, make_engine(model), facts.vocab_size)
    if output == "json":
        figures = {"masks": [asdict(row) for row in masks], "steps": [asdict(row) for row in steps]}
        print(json.dumps({"tokenizer_seconds": tokenizer_seconds, **figures}))
        return
    console = Console()
    console.print(f"the vocabulary, read and built: {tokenizer_seconds:.2f} s")
    for rows in (masks, steps):
        table = Table(*asdict(rows[0]))
        for row in rows:
            table.add_row(
                *(f"{value:.3g}" if isinstance(value, float) else str(value) for value in asdict(row).values())
            )
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
