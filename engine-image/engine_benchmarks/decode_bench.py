"""Tokens per second of greedy generation at several batch sizes, and of one long prompt: the model runner and sampler
compared with transformers' `generate` and `generate_batch` (continuous batching) in the same run, and as a share of the
machine's limit.

Each contender generates 1 token, then 64: the first run is its prompt time, the difference its decode time. The limit
of a decode step is the larger of two times: reading every weight once at the measured bandwidth, and the step's FLOPs
at the best measured matrix rate for that many rows. A prompt's limit is the matrix rate.

    python -m engine_benchmarks.decode_bench MODEL [-o json]
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
from trimtab_engine.layers.linear import padded_rows
from trimtab_engine.models.checkpoint import num_parameters
from trimtab_engine.models.registry import open_model, parse_model_config
from trimtab_modelspec.config import ModelConfig

from engine_benchmarks.machine_bench import MachineRates, layer_shapes, measure_machine
from engine_benchmarks.parity import greedy_generator, load_runner

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
PREFILL_TOKENS = 512
BATCHES = (1, 8, 32)
# contenders alternate, and each one's best round counts, so that other work on the machine favours none of them
ROUNDS = 3
BLOCK_SIZE = 16
CONTINUOUS_BATCH_BLOCKS, CONTINUOUS_BATCH_TOKENS = 64, 4096  # room for exactly 32 requests of 128 tokens
CONTENDERS = ("trimtab", "generate", "generate_batch")
Run = Callable[[list[list[int]], int], object]
"""(prompts, tokens to generate for each)."""


@dataclass(frozen=True, slots=True)
class Decode:
    """One batch size. Tokens per second by contender (None if it failed, see `notes`), the limit, and the engine's
    share of it.

    `whole` counts generated tokens over the whole run, prompts included; `decode` those after the first, over the time
    after the first. `limit` and the share refer to decode.
    """

    batch: int
    whole: dict[str, float | None]
    decode: dict[str, float | None]
    limit: float
    share_of_limit: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt of `num_tokens` and the first token after it. The share is of the matrix rate at that many rows."""

    num_tokens: int
    tokens_per_second: dict[str, float | None]
    gflops: float
    matrix_gflops: float
    share_of_limit: float


def limit_tokens_per_second(config: ModelConfig, machine: MachineRates, batch: int) -> float:
    """Return the machine's limit for decode at this batch size, from its measured rates."""
    read_seconds = 4 * num_parameters(config) / (machine.read_gb_per_second * 1e9)
    if batch == 1:
        return 1 / read_seconds
    flops = 2 * num_parameters(config) * batch
    compute_seconds = flops / (machine.best_gflops(padded_rows(batch)) * 1e9)
    return batch / max(read_seconds, compute_seconds)


def prefill_flops(config: ModelConfig, num_tokens: int) -> float:
    """Return the FLOPs of a prompt: its GEMMs, causal attention, and the logits of its last token."""
    layer = 2 * sum(n * k for n, k in layer_shapes(config)) * num_tokens
    pairs = num_tokens * (num_tokens + 1) / 2
    attention = 4 * config.num_attention_heads * config.head_size * pairs
    return config.num_layers * (layer + attention) + 2 * config.vocab_size * config.hidden_size


def random_prompts(vocab_size: int, batch: int, num_tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Return seeded prompts, the same for every contender."""
    generator = torch.Generator().manual_seed(batch)
    prompts: list[list[int]] = torch.randint(100, vocab_size, (batch, num_tokens), generator=generator).tolist()
    return prompts


def trimtab(model: str) -> Run:
    """Return the engine's model runner and sampler."""
    return greedy_generator(load_runner(model, block_size=BLOCK_SIZE), block_size=BLOCK_SIZE, batch=max(BATCHES))


def transformers_generate(model: Any) -> Run:
    """Return transformers' static batch."""

    def run(prompts: list[list[int]], num_tokens: int) -> object:
        ids = torch.tensor(prompts)
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )

    return run


def transformers_continuous(model: Any) -> Run:
    """Return transformers' continuous batching with paged attention."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    batching = ContinuousBatchingConfig(
        num_blocks=CONTINUOUS_BATCH_BLOCKS, max_batch_tokens=CONTINUOUS_BATCH_TOKENS, use_cuda_graph=False
    )

    def run(prompts: list[list[int]], num_tokens: int) -> object:
        generation = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        outputs = model.generate_batch(
            inputs=prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False
        )
        produced = sum(len(output.generated_tokens) for output in outputs.values())
        if produced != len(prompts) * num_tokens:
            raise RuntimeError(f"generate_batch gave {produced} tokens instead of {len(prompts) * num_tokens}")
        return outputs

    return run


class _Race:
    """Contenders that alternate with the same work; each one's shortest time counts. A failing one is removed and
    noted.
    """

    def __init__(self, contenders: dict[str, Run]) -> None:
        self._contenders = contenders
        self.notes: dict[str, str] = {}
        self._best: dict[tuple[str, str], float] = {}

    def turn(self, work: str, prompts: list[list[int]], num_tokens: int, names: tuple[str, ...] = CONTENDERS) -> None:
        for name in names:
            if name in self.notes:
                continue
            gc.collect()
            started = time.perf_counter()
            try:
                self._contenders[name](prompts, num_tokens)
            except (RuntimeError, ValueError, AttributeError, TypeError, NotImplementedError) as error:
                if name == "trimtab":
                    raise
                self.notes[name] = f"{type(error).__name__}: {error}"
                continue
            seconds = time.perf_counter() - started
            self._best[name, work] = min(seconds, self._best.get((name, work), seconds))

    def seconds(self, work: str) -> dict[str, float | None]:
        return {name: None if name in self.notes else self._best.get((name, work)) for name in CONTENDERS}


def measure_decode(model: str, batches: tuple[int, ...] = BATCHES, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure all contenders and the machine in turns. Returns {machine, decode: [Decode], prefill: Prefill, notes}."""
    from transformers import AutoModelForCausalLM

    source = open_model(model)
    config = parse_model_config(source.config, source.generation_config, source.where)
    static = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    paged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    race = _Race(
        {
            "trimtab": trimtab(model),
            "generate": transformers_generate(static),
            "generate_batch": transformers_continuous(paged),
        }
    )
    rows = tuple(sorted({*(padded_rows(batch) for batch in batches), PREFILL_TOKENS}))
    machine = measure_machine(config, rows)
    for _ in range(rounds):
        machine = machine.best_of(measure_machine(config, rows))
        for batch in batches:
            prompts = random_prompts(config.vocab_size, batch)
            race.turn(f"first of {batch}", prompts, 1)
            race.turn(f"all of {batch}", prompts, OUTPUT_TOKENS)
        race.turn("prefill", random_prompts(config.vocab_size, 1, PREFILL_TOKENS), 1, ("trimtab", "generate"))
    results = [_decode(batch, race, limit_tokens_per_second(config, machine, batch)) for batch in batches]
    return {
        "machine": asdict(machine),
        "decode": [asdict(result) for result in results],
        "prefill": asdict(_prefill(config, race, machine)),
        "notes": race.notes,
    }


def _decode(batch: int, race: _Race, limit: float) -> Decode:
    first, every = race.seconds(f"first of {batch}"), race.seconds(f"all of {batch}")
    whole = {name: seconds and batch * OUTPUT_TOKENS / seconds for name, seconds in every.items()}
    decode: dict[str, float | None] = {}
    for name in CONTENDERS:
        begin, end = first[name], every[name]
        decode[name] = None if begin is None or end is None else batch * (OUTPUT_TOKENS - 1) / (end - begin)
    return Decode(batch, whole, decode, limit, (decode["trimtab"] or 0.0) / limit)


def _prefill(config: ModelConfig, race: _Race, machine: MachineRates) -> Prefill:
    seconds = race.seconds("prefill")
    ours = seconds["trimtab"]
    assert ours is not None
    gflops = prefill_flops(config, PREFILL_TOKENS) / ours / 1e9
    matrix = machine.best_gflops(PREFILL_TOKENS)
    rates = {name: best and PREFILL_TOKENS / best for name, best in seconds.items() if name != "generate_batch"}
    return Prefill(PREFILL_TOKENS, rates, gflops, matrix, gflops / matrix)


def ahead(rates: dict[str, float | None]) -> float | None:
    """Return the engine's rate over that of transformers' `generate`."""
    ours, generate = rates["trimtab"], rates["generate"]
    return None if ours is None or generate is None else ours / generate


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
    table = Table(
        "batch", *CONTENDERS, "ahead", *CONTENDERS, "ahead", "limit", "share", title="tokens/s: whole, decode"
    )
    for row in result["decode"]:
        cells = [
            cell
            for rates in (row["whole"], row["decode"])
            for cell in (*(_rate(rates[name]) for name in CONTENDERS), f"{ahead(rates) or 0:.2f}x")
        ]
        table.add_row(str(row["batch"]), *cells, _rate(row["limit"]), f"{row['share_of_limit']:.0%}")
    Console(width=140).print(table)
    prefill = result["prefill"]
    rates = prefill["tokens_per_second"]
    typer.echo(
        f"prompt of {prefill['num_tokens']}: {_rate(rates['trimtab'])} tokens/s, generate {_rate(rates['generate'])}; "
        f"{prefill['gflops']:.0f} of {prefill['matrix_gflops']:.0f} GFLOP/s, {prefill['share_of_limit']:.0%}"
    )
    for name, note in result["notes"].items():
        typer.echo(f"{name}: {note}")


def _rate(value: float | None) -> str:
    return "failed" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    typer.run(main)
