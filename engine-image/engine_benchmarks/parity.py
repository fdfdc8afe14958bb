"""Greedy tokens against transformers in float32: the measure of "correct".

The engine's tokens must equal the reference's. Where the reference's own two best logits are closer than NEAR_TIE of
the logit range, the order of summation may decide: such a place is counted, and the comparison goes on teacher-forced
(the engine continues from the reference's tokens). Any other difference is a defect.

    python -m engine_benchmarks.parity MODEL
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.device.device import Device
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.sampling.sampler import sample
from trimtab_engine.scheduling.batch import ScheduledSequence
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling

NEAR_TIE = 1e-4  # of the range of the reference's logits at that position
Generate = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts, tokens to generate) -> the generated tokens of each prompt."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are",
    "In 1969, the first humans",
    "To bake a simple loaf of bread, you need",
    "The mitochondria is",
    "Dear Sir or Madam,",
    "SELECT name FROM users WHERE",
    "The quick brown fox",
    "Photosynthesis is the process by which",
    "A haiku about autumn:",
    "The difference between a virus and a bacterium is",
    "1, 1, 2, 3, 5, 8,",
    "The best way to learn a language is",
    "Shakespeare was born in",
    "An operating system is",
    "If it rains tomorrow, we will",
    "Gravity on the Moon is",
)


@dataclass(slots=True)
class Parity:
    """Outcome of a comparison. `defects` reads as sentences; equal means that it is empty."""

    num_tokens: int = 0
    near_ties: int = 0
    defects: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reference:
    """What transformers generated for one prompt: tokens, and the gap of its two best logits as part of their range."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]


def reference_tokens(model: Any, prompts: list[list[int]], num_tokens: int) -> list[Reference]:
    """What greedy generation by a transformers model gives each prompt alone, through end-of-sequence tokens.

    All prompts are generated at once, padded, which is a guess; then each is computed once, alone and as a whole, and
    must choose each of its tokens. Behind one that it does not choose, it is generated alone.
    """
    guesses = _generated(model, prompts, num_tokens)
    return [_reference(model, prompt, guess) for prompt, guess in zip(prompts, guesses, strict=True)]


def _reference(model: Any, prompt: list[int], guess: list[int]) -> Reference:
    tokens = guess
    while True:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        best = logits.argmax(dim=-1).tolist()
        same = next((i for i, (a, b) in enumerate(zip(tokens, best, strict=True)) if a != b), len(tokens))
        if same == len(tokens):
            return Reference(prompt, tokens, [_relative_gap(row) for row in logits])
        known = [*tokens[:same], best[same]]
        rest = len(tokens) - len(known)
        tokens = known + (_generated(model, [prompt + known], rest)[0] if rest else [])


def _generated(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens of all prompts at once, padded on the left."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    output = model.generate(
        torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]),
        attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[list[int]] = output[:, longest:].tolist()
    return tokens


def _relative_gap(logits: torch.Tensor) -> float:
    best = logits.topk(2).values
    return float((best[0] - best[1]) / (logits.max() - logits.min()))


def compare(references: list[Reference], generate: Generate) -> Parity:
    """Compare `generate` with the references, all prompts together, and after near ties one by one."""
    parity = Parity()
    num_tokens = max(len(reference.tokens) for reference in references)
    outputs = generate([reference.prompt for reference in references], num_tokens)
    for number, (reference, output) in enumerate(zip(references, outputs, strict=True)):
        parity.num_tokens += len(reference.tokens)
        _compare_one(number, reference, output, generate, parity)
    return parity


def _compare_one(number: int, reference: Reference, output: list[int], generate: Generate, parity: Parity) -> None:
    """Walk to each difference; continue behind near ties from the reference's tokens."""
    done = 0
    while done < len(reference.tokens):
        wanted = reference.tokens[done:]
        same = next((i for i, (a, b) in enumerate(zip(output, wanted, strict=False)) if a != b), len(wanted))
        if same == len(wanted):
            return
        position = done + same
        if reference.gaps[position] >= NEAR_TIE:
            parity.defects.append(
                f"prompt {number}, token {position}: {output[same]} instead of {reference.tokens[position]}, where the "
                f"reference's two best logits are {reference.gaps[position]:.1e} of the range apart"
            )
            return
        parity.near_ties += 1
        done = position + 1
        if done < len(reference.tokens):
            forced = reference.prompt + reference.tokens[:done]
            output = generate([forced], len(reference.tokens) - done)[0]


def greedy_generator(runner: ModelRunner, *, block_size: int, chunk: int | None = None, batch: int = 32) -> Generate:
    """A `Generate` on the bare model runner: prompts in chunks of `chunk` tokens (None: whole), `batch` at once.

    KV blocks are dealt out so that no sequence's are in a row.
    """

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), batch):
            num_groups = len(runner.facts.kv_groups)
            requests = _requests(prompts[first : first + batch], num_tokens, block_size, num_groups)
            _generate_batch(runner, requests, num_tokens, chunk)
            outputs += [request.token_ids[request.num_prompt_tokens :] for request in requests]
        return outputs

    return generate


def _requests(prompts: list[list[int]], num_tokens: int, block_size: int, num_groups: int) -> list[Request]:
    requests = []
    for index, prompt in enumerate(prompts):
        request = Request.of(str(index), prompt, Sampling(temperature=0.0), arrival_time=0.0)
        count = -(-(len(prompt) + num_tokens) // block_size)
        request.block_tables = [
            [index + (block * num_groups + group) * len(prompts) for block in range(count)]
            for group in range(num_groups)
        ]
        request.num_gone = [0] * num_groups
        requests.append(request)
    return requests


def _generate_batch(runner: ModelRunner, requests: list[Request], num_tokens: int, chunk: int | None) -> None:
    """Every step mixes what there is: sequences still in their prompt, and sequences that decode."""
    while pending := [r for r in requests if r.num_output_tokens < num_tokens]:
        step = []
        for request in pending:
            start = request.num_computed_tokens
            count = min(request.num_tokens - start, chunk or request.num_tokens)
            request.num_computed_tokens += count
            step.append(ScheduledSequence(request, start, count, request.num_computed_tokens == request.num_tokens))
        logits = runner.execute(step)
        sampling = [s.request for s in step if s.samples]
        if sampling:
            for request, token in zip(sampling, sample(logits, sampling).token_ids, strict=True):
                request.token_ids.append(token)


def load_runner(
    model: str,
    *,
    block_size: int = 16,
    num_blocks: int = 1024,
    load_format: str = "auto",
    cpu_threads: int | None = None,
) -> ModelRunner:
    """A model runner on the CPU in float32 with its KV cache mapped. `cpu_threads`: None for as many as CPUs."""
    config = EngineConfig(model=model, block_size=block_size, dtype="float32", load_format=load_format)  # type: ignore[arg-type]
    runner = ModelRunner.load(config, Device("cpu", cpu_threads=cpu_threads), lambda stage, percent: None)
    runner.init_kv_cache(num_blocks)
    runner.kv_cache.map_blocks(num_blocks)
    return runner


def main(model: Annotated[Path, typer.Argument(help="folder with safetensors")], num_tokens: int = 64) -> None:
    """Compare 20 prompts alone, batched and chunked; exit code 1 when a token differs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = [AutoTokenizer.from_pretrained(model)(prompt).input_ids for prompt in PROMPTS]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    references = reference_tokens(reference, prompts, num_tokens)
    runner = load_runner(str(model))
    failed = False
    for name, chunk, batch in (("alone", None, 1), ("batched", None, 20), ("chunked", 3, 20)):
        parity = compare(references, greedy_generator(runner, block_size=16, chunk=chunk, batch=batch))
        failed |= bool(parity.defects)
        typer.echo(f"{name}: {parity.num_tokens} tokens, {parity.near_ties} near ties, {len(parity.defects)} defects")
        for defect in parity.defects:
            typer.echo(f"  {defect}")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
