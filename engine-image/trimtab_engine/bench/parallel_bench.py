"""What each layout costs beside one rank: tokens per second, and bytes on the wire per step.

    python -m trimtab_engine.bench.parallel_bench [--output FILE]

Real engine cores and ranks as processes, spoken to as the API server does, on random weights of a small dense model
and of a small mixture of experts. One thread per rank. On a machine with fewer CPUs than ranks this measures overhead,
not speed-up. Each layout is measured right after one rank, and the ratio is that of the two.
"""

import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab_engine.config import EngineConfig
from trimtab_engine.core_client import CoreClient
from trimtab_engine.core_launcher import CoreLauncher
from trimtab_engine.errors import EngineDead
from trimtab_engine.messages import AddRequest, SamplingParams, StepStats

DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 16_000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
MIXTURE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}
LAYOUTS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("TP2", DENSE, {"tensor_parallel_size": 2}),
    ("PP2", DENSE, {"pipeline_parallel_size": 2}),
    ("TP2 PP2", DENSE, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ("DP2", DENSE, {"data_parallel_size": 2}),
    ("TP2, experts sliced", MIXTURE, {"tensor_parallel_size": 2}),
    ("TP2 EP", MIXTURE, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ("DP2 EP", MIXTURE, {"data_parallel_size": 2, "enable_expert_parallel": True}),
    (
        "TP2 DP2 EP",
        MIXTURE,
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    ),
)
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 32, 32


@dataclass(slots=True)
class Run:
    """One engine's work on NUM_REQUESTS at once. Bytes are those on the wire of the cores' own ranks."""

    tokens_per_second: float = 0.0
    num_steps: int = 0
    wire_bytes: dict[str, int] = field(default_factory=dict)
    tokens_of_cores: dict[int, int] = field(default_factory=dict)

    def note(self, stats: StepStats) -> None:
        self.num_steps += stats.num_scheduled_tokens > 0
        core = stats.engine_index
        self.tokens_of_cores[core] = self.tokens_of_cores.get(core, 0) + stats.num_generation_tokens
        for kind, count in stats.wire_bytes.items():
            self.wire_bytes[kind] = self.wire_bytes.get(kind, 0) + count


async def measure(model: Path, layout: dict[str, Any]) -> Run:
    """Start an engine of this layout, warm it up, measure, end it."""
    config = EngineConfig(
        model=str(model),
        load_format="dummy",
        cpu_threads=1,
        max_model_len=256,
        device_memory_bytes=4 << 30,
        num_gpu_blocks_override=256,
        max_num_seqs=16,
        max_num_seqs_cap=16,
        max_num_batched_tokens=512,
        max_num_batched_tokens_cap=512,
        **layout,
    )
    launcher, runs = CoreLauncher(config), [Run()]

    def note(stats: StepStats) -> None:
        runs[-1].note(stats)  # the newest: the warm-up has one of its own

    client = CoreClient(launcher.addresses[0], on_step=note)
    client.open()
    await launcher.start(client)
    try:
        await client.loaded.wait()
        if client.ready is None:
            raise EngineDead(client.failure.message if client.failure else "the engine has ended")
        await _serve(client, 8)
        run = Run()
        runs.append(run)
        began = time.perf_counter()
        await _serve(client, OUTPUT_TOKENS)
        run.tokens_per_second = NUM_REQUESTS * OUTPUT_TOKENS / (time.perf_counter() - began)
        return run
    finally:
        await launcher.close(client)


async def _serve(client: CoreClient, num_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)

    async def one(number: int) -> None:
        prompt = [3 + (number * 7919 + place * 104_729) % 15_000 for place in range(PROMPT_TOKENS)]
        async for _ in client.generate(AddRequest(f"{num_tokens}-{number}", prompt, sampling, time.monotonic())):
            pass

    await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))


def row_of(name: str, alone: list[Run], together: list[Run]) -> dict[str, Any]:
    """Medians over the rounds; the ratio is that of each round."""
    last = together[-1]
    steps = max(last.num_steps, 1)
    shares = last.tokens_of_cores.values()
    return {
        "layout": name,
        "one_rank_tokens_per_second": round(statistics.median(run.tokens_per_second for run in alone), 1),
        "tokens_per_second": round(statistics.median(run.tokens_per_second for run in together), 1),
        "ratio": round(
            statistics.median(b.tokens_per_second / a.tokens_per_second for a, b in zip(alone, together, strict=True)),
            3,
        ),
        "steps": last.num_steps,
        "wire_bytes_per_step": {kind: count // steps for kind, count in sorted(last.wire_bytes.items())},
        "tokens_of_fullest_core_over_mean": round(max(shares) * len(shares) / sum(shares), 3),
    }


def main(
    output: Annotated[Path | None, typer.Option(help="also write the rows there, as JSON")] = None,
    rounds: Annotated[int, typer.Option(help="of one rank and the layout in turn")] = 3,
    only: Annotated[str, typer.Option(help="layouts whose name contains this")] = "",
) -> None:
    """Measure every layout beside one rank and print a table."""
    rows = []
    typer.echo(
        f"{'layout':22} {'one rank':>9} {'layout':>9} {'ratio':>6}  bytes per step on the wire of the core's rank"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, config, layout in LAYOUTS:
            if only not in name:
                continue
            model = Path(folder) / name.replace(" ", "-")
            model.mkdir()
            (model / "config.json").write_text(json.dumps(config))
            alone, together = [], []
            for _ in range(rounds):
                alone.append(asyncio.run(measure(model, {})))
                together.append(asyncio.run(measure(model, layout)))
            row = row_of(name, alone, together)
            rows.append(row)
            typer.echo(
                f"{name:22} {row['one_rank_tokens_per_second']:9} {row['tokens_per_second']:9} {row['ratio']:6}  "
                f"{row['wire_bytes_per_step']}"
            )
    if output is not None:
        output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
