"""Tokens per second of greedy generation at several batch sizes: our model runner and sampler beside transformers'
`generate` and `generate_batch` (continuous batching) in the same run, and as a share of the machine's own limit.

The limit of a decode step is the larger of two times: reading every weight once at the measured bandwidth, and the
step's FLOPs at the best measured matrix rate for that many rows. Rates count generated tokens over the whole run,
prompts included, for all three alike.

    python -m trimtab_engine.bench.decode_bench MODEL [-o json]
"""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table

from trimtab_engine.bench.machine_bench import MachineRates, measure_machine
from trimtab_engine.bench.parity import greedy_generator, load_runner
from trimtab_engine.layers.linear import padded_rows
from trimtab_engine.model_config import ModelConfig, parse_model_config
from trimtab_engine.weights.source import open_source

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
BATCHES = (1, 8, 32)
ROUNDS = 3  # contenders take turns; each one's best round counts, so that other work on the machine favours nobody
BLOCK_SIZE = 16
CONTINUOUS_BATCH_BLOCKS, CONTINUOUS_BATCH_TOKENS = 64, 4096  # room for 32 requests of 128 tokens, and no more
Run = Callable[[list[list[int]]], object]


@dataclass(frozen=True, slots=True)
class Decode:
    """One batch size. Tokens per second by contender (None: it failed, see `notes`), and our share of the limit."""

    batch: int
    trimtab: float
    generate: float | None
    generate_batch: float | None
    limit: float
    share_of_limit: float
    ahead: float
    """Our rate over the better of transformers' two."""


def limit_tokens_per_second(config: ModelConfig, machine: MachineRates, batch: int) -> float:
    """What the machine allows for decode at this batch size, from its own measured rates."""
    read_seconds = 4 * config.num_parameters / (machine.read_gb_per_second * 1e9)
    flops = 2 * config.num_parameters * batch
    compute_seconds = flops / (machine.best_gflops(padded_rows(batch)) * 1e9)
    return batch / max(read_seconds, compute_seconds)


def random_prompts(vocab_size: int, batch: int) -> list[list[int]]:
    """Seeded, so that every contender gets the same ones."""
    generator = torch.Generator().manual_seed(batch)
    prompts: list[list[int]] = torch.randint(100, vocab_size, (batch, PROMPT_TOKENS), generator=generator).tolist()
    return prompts


def trimtab(model: str) -> Run:
    """Our model runner and sampler."""
    generate = greedy_generator(load_runner(model, block_size=BLOCK_SIZE), block_size=BLOCK_SIZE, batch=max(BATCHES))
    return lambda prompts: generate(prompts, OUTPUT_TOKENS)


def transformers_generate(model: Any) -> Run:
    """transformers' static batch."""

    def run(prompts: list[list[int]]) -> object:
        ids = torch.tensor(prompts)
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=OUTPUT_TOKENS,
            min_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )

    return run


def transformers_continuous(model: Any) -> Run:
    """transformers' continuous batching with paged attention."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(
        num_blocks=CONTINUOUS_BATCH_BLOCKS, max_batch_tokens=CONTINUOUS_BATCH_TOKENS, use_cuda_graph=False
    )

    def run(prompts: list[list[int]]) -> object:
        outputs = model.generate_batch(
            inputs=prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False
        )
        produced = sum(len(output.generated_tokens) for output in outputs.values())
        if produced != len(prompts) * OUTPUT_TOKENS:
            raise RuntimeError(f"generate_batch gave {produced} tokens instead of {len(prompts) * OUTPUT_TOKENS}")
        return outputs

    return run


def measure_decode(model: str, batches: tuple[int, ...] = BATCHES, rounds: int = ROUNDS) -> dict[str, Any]:
    """All contenders and the machine in turns. Returns {machine, decode: [Decode], notes}."""
    from transformers import AutoModelForCausalLM

    source = open_source(model)
    config = parse_model_config(source.config, source.generation_config, source.where)
    static = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    paged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    contenders: dict[str, Run] = {
        "trimtab": trimtab(model),
        "generate": transformers_generate(static),
        "generate_batch": transformers_continuous(paged),
    }
    notes: dict[str, str] = {}
    best: dict[tuple[str, int], float] = {}
    rows = tuple(sorted({padded_rows(batch) for batch in batches}))
    machine = measure_machine(config, rows)
    for _ in range(rounds):
        machine = machine.best_of(measure_machine(config, rows))
        for batch in batches:
            prompts = random_prompts(config.vocab_size, batch)
            for name in [name for name in contenders if name not in notes]:
                gc.collect()
                started = time.perf_counter()
                try:
                    contenders[name](prompts)
                except (RuntimeError, ValueError, AttributeError, TypeError, NotImplementedError) as error:
                    if name == "trimtab":
                        raise
                    notes[name] = f"{type(error).__name__}: {error}"
                    continue
                rate = batch * OUTPUT_TOKENS / (time.perf_counter() - started)
                best[name, batch] = max(rate, best.get((name, batch), 0.0))
    results = [_result(batch, best, limit_tokens_per_second(config, machine, batch)) for batch in batches]
    return {"machine": asdict(machine), "decode": [asdict(result) for result in results], "notes": notes}


def _result(batch: int, best: dict[tuple[str, int], float], limit: float) -> Decode:
    ours = best["trimtab", batch]
    static, continuous = best.get(("generate", batch)), best.get(("generate_batch", batch))
    rivals = [rate for rate in (static, continuous) if rate is not None]
    ahead = ours / max(rivals) if rivals else float("nan")
    return Decode(batch, ours, static, continuous, limit, ours / limit, ahead)


def main(
    model: Annotated[str, typer.Argument(help="folder with safetensors and config.json")],
    output: Annotated[Literal["table", "json"], typer.Option("-o", "--output")] = "table",
    threads: Annotated[int, typer.Option(help="CPU threads of every contender")] = 2,
    rounds: Annotated[int, typer.Option(help="rounds, of which the best counts")] = ROUNDS,
) -> None:
    """Print tokens per second."""
    torch.set_num_threads(threads)
    result = measure_decode(model, rounds=rounds)
    if output == "json":
        typer.echo(json.dumps(result))
        return
    table = Table("batch", "trimtab", "generate", "generate_batch", "ahead", "limit", "share", title="tokens/s")
    for row in result["decode"]:
        rivals = [f"{row[name]:.1f}" if row[name] else "failed" for name in ("generate", "generate_batch")]
        table.add_row(
            str(row["batch"]),
            f"{row['trimtab']:.1f}",
            *rivals,
            f"{row['ahead']:.2f}x",
            f"{row['limit']:.1f}",
            f"{row['share_of_limit']:.0%}",
        )
    Console(width=120).print(table)
    for name, note in result["notes"].items():
        typer.echo(f"{name}: {note}")


if __name__ == "__main__":
    typer.run(main)
