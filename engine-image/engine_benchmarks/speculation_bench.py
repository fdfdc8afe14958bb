"""Decode tokens per second with and without drafts: n-grams on a repetitive and on a non-repetitive text, the model as
its own draft, and its first layers as one. One engine per method; the live depth is changed between alternating runs,
so that other work on the machine favours neither. Medians of the rounds.

    python -m engine_benchmarks.speculation_bench MODEL [-o FILE.md]
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from safetensors.torch import load_file, save_file
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.core.startup import start_engine
from trimtab_engine.messages.admin import PatchConfig
from trimtab_engine.messages.requests import AddRequest, SpeculationCounts
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.text.tokenizer import Tokenizer

from engine_benchmarks.__main__ import machine
from engine_benchmarks.output import write_text

BATCHES = (1, 8)
DEPTH = 4
OUTPUT_TOKENS = 64
ROUNDS = 3
TRUNCATED_LAYERS = 8
REPEATED = "The red fox ran over the hill and the blue bird sang in the old tree while the river went to the sea. "
PROMPTS = {
    "repetitive": REPEATED * 8,
    "ordinary": "Once upon a time, in a village by the sea, there lived a clockmaker who had never seen a clock.",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One method on one prompt at one batch size: tokens per second at depth 0 and at DEPTH, and draft statistics."""

    method: str
    prompt: str
    batch: int
    plain: float
    speculating: float
    acceptance: float
    """Accepted drafts over all drafts."""
    mean_length: float
    """Tokens per request and step, for requests with drafts."""


def truncated(model: Path, folder: Path, num_layers: int) -> Path:
    """Write a checkpoint of the model's first layers, with its embeddings and its last norm."""
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    tensors = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            part = name.split(".")
            if "layers" not in part or int(part[part.index("layers") + 1]) < num_layers:
                tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("generation_config.json", "tokenizer.json"):
        if (model / name).exists():
            shutil.copy(model / name, folder / name)
    return folder


def engine_with(model: Path, speculative: SpeculativeConfig) -> Engine:
    config = EngineConfig(
        model=str(model),
        num_gpu_blocks_override=512,
        max_model_len=1024,
        max_num_seqs=max(BATCHES),
        max_num_seqs_cap=max(BATCHES),
        max_num_batched_tokens=1024,
        max_num_batched_tokens_cap=1024,
        enable_prefix_caching=False,
        speculative=speculative,
        num_speculative_tokens=DEPTH,
        num_speculative_tokens_cap=DEPTH,
    )
    return start_engine(config, lambda stage, percent: None, time.monotonic)[0]


def decode(engine: Engine, prompt: list[int], batch: int, depth: int) -> tuple[float, SpeculationCounts]:
    """Return the tokens per second from the first step in which all requests decode, and the drafts' counts."""
    status, _ = engine.patch_config(PatchConfig({"num_speculative_tokens": depth}))
    assert status == 200
    params = Sampling(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    for number in range(batch):  # different prefixes, so that outputs differ
        engine.add(AddRequest(str(number), [number + 100, *prompt], params, arrival_time=0.0))
    counts, answered, num_tokens, began = SpeculationCounts(), set[str](), 0, 0.0
    while engine.has_work:
        step = engine.step()
        if len(answered) == batch:
            num_tokens += sum(len(output.token_ids) for output in step.outputs)
            counts.add(step.stats.num_drafts, step.stats.num_draft_tokens, step.stats.accepted_per_position)
        else:
            answered |= {output.request_id for output in step.outputs}
            began = time.perf_counter()
    return num_tokens / (time.perf_counter() - began), counts


def measure(engine: Engine, method: str, name: str, prompt: list[int], batch: int, rounds: int) -> Measured:
    rates: dict[int, list[float]] = {0: [], DEPTH: []}
    counts = SpeculationCounts()
    for _ in range(rounds):
        for depth in rates:
            rate, seen = decode(engine, prompt, batch, depth)
            rates[depth].append(rate)
            counts.add(seen.num_drafts, seen.num_draft_tokens, seen.accepted_per_position)
    accepted, drafts = counts.num_accepted_tokens, max(1, counts.num_drafts)
    plain, speculating = (statistics.median(rates[depth]) for depth in (0, DEPTH))
    acceptance = accepted / max(1, counts.num_draft_tokens)
    return Measured(method, name, batch, plain, speculating, acceptance, 1 + accepted / drafts)


def measure_all(model: Path, rounds: int) -> list[Measured]:
    tokenizer = Tokenizer(str(model))
    prompts = {name: tokenizer.encode(text) for name, text in PROMPTS.items()}
    results = []
    with tempfile.TemporaryDirectory() as folder:
        first_layers = truncated(model, Path(folder), TRUNCATED_LAYERS)
        methods = {
            "ngram": SpeculativeConfig(
                method="ngram", num_speculative_tokens=DEPTH, prompt_lookup_min=2, prompt_lookup_max=4
            ),
            "draft model: itself": SpeculativeConfig(
                method="draft_model", model=str(model), num_speculative_tokens=DEPTH
            ),
            f"draft model: its first {TRUNCATED_LAYERS} layers": SpeculativeConfig(
                method="draft_model", model=str(first_layers), num_speculative_tokens=DEPTH
            ),
        }
        for method, speculative in methods.items():
            engine = engine_with(model, speculative)
            for name in PROMPTS if method == "ngram" else ("ordinary",):
                for batch in BATCHES:
                    results.append(measure(engine, method, name, prompts[name], batch, rounds))
                    typer.echo(str(results[-1]), err=True)
            engine.close()
    return results


def page(results: list[Measured], model: Path, rounds: int) -> str:
    where = machine()
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    about = (
        f"Machine: {where['cpus']} × {where['cpu']}, Python {where['python']}, {versions}. Model: {model.name}, "
        f"float32, greedy, {OUTPUT_TOKENS} tokens of output. "
        f"Command: `python -m engine_benchmarks.speculation_bench MODEL --rounds {rounds}`."
    )
    how = (
        f"Decode tokens per second, medians of {rounds} rounds that alternate between depth 0 and depth {DEPTH} in one "
        f"engine. Load average over the run's last minutes: {os.getloadavg()[1]:.1f} on {where['cpus']} CPUs."
    )
    lines = [
        "# Speculative decoding, measured on the CPU",
        "",
        about,
        "",
        how,
        "",
        f"| drafts from | prompt | batch | depth 0 | depth {DEPTH} | ratio | accepted drafts | tokens per step |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {m.method} | {m.prompt} | {m.batch} | {m.plain:.1f} | {m.speculating:.1f} | "
        f"{m.speculating / m.plain:.2f} | {m.acceptance:.0%} | {m.mean_length:.2f} |"
        for m in results
    ]
    return "\n".join(lines) + "\n"


def main(
    model: Annotated[Path, typer.Argument(help="folder with safetensors and a tokenizer")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the page there")] = None,
    rounds: Annotated[int, typer.Option(help="rounds, of which the median counts")] = ROUNDS,
) -> None:
    """Measure and print a page."""
    text = page(measure_all(model, rounds), model, rounds)
    if output is not None:
        write_text(output, text)
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
