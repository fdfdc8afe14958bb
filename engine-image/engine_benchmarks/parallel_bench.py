"""What each layout costs beside one rank: tokens per second, and bytes on the wire per step; how evenly data-parallel
cores share a trace; and how layouts should scale (parallel_scaling.py).

    python -m engine_benchmarks.parallel_bench [--model SMOLLM2] [--output docs/results] [--rounds 3]

Real engine cores and ranks as processes, spoken to as the API server does: on random weights of a small dense model and
of a small Qwen3 mixture of experts, and on the model that is given. One thread per rank. On a machine with fewer CPUs
than ranks this measures overhead, not speed-up. In each round every layout of a model is measured right after one rank
of it, and ratios are taken within a round.
"""

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.engine_client.launcher import CoreLauncher
from trimtab_engine.errors import EngineDead
from trimtab_engine.messages import AddRequest, StepStats
from trimtab_engine.scheduling.sampling import Sampling

from engine_benchmarks.__main__ import machine
from engine_benchmarks.output import written
from engine_benchmarks.parallel_page import is_busy, page, plot
from engine_benchmarks.parallel_scaling import scaling_rows

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
TP2, PP2, DP2 = ({f"{kind}_parallel_size": 2} for kind in ("tensor", "pipeline", "data"))
EP = {"enable_expert_parallel": True}
Layouts = tuple[tuple[str, dict[str, Any]], ...]
DENSE_LAYOUTS: Layouts = (("TP2", TP2), ("PP2", PP2), ("TP2 PP2", TP2 | PP2), ("DP2", DP2))
MIXTURE_LAYOUTS: Layouts = (
    ("TP2, experts sliced", TP2),
    ("TP2 EP", TP2 | EP),
    ("DP2 EP", DP2 | EP),
    ("TP2 DP2 EP", TP2 | DP2 | EP),
)
GIVEN_LAYOUTS: Layouts = (("PP2", PP2), ("DP2", DP2), ("TP3", {"tensor_parallel_size": 3}))
"""SmolLM2-135M has 9 heads and 3 KV heads: three ranks can share them, two cannot."""
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 32, 32
TRACE_REQUESTS, TRACE_SECONDS = 48, 0.05  # requests, and the mean time between two of them
SHORT_OUTPUT, LONG_OUTPUT, LONG_SHARE = 4, 96, 0.25  # tokens: most answers are short, some are long


@dataclass(slots=True)
class Run:
    """One engine's work on NUM_REQUESTS at once. Bytes are those on the wire of the cores' own ranks."""

    tokens_per_second: float = 0.0
    num_steps: int = 0
    wire_bytes: dict[str, int] = field(default_factory=dict)
    tokens_of_cores: dict[int, int] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    _requests: dict[int, int] = field(default_factory=dict)
    _imbalance: float = 0.0
    _seconds: float = 0.0
    _last_time: float | None = None

    def note(self, stats: StepStats) -> None:
        self.num_steps += stats.num_scheduled_tokens > 0
        core = stats.engine_index
        self._weigh(stats.time)
        self._requests[core] = stats.num_running + stats.num_waiting
        self.tokens_of_cores[core] = self.tokens_of_cores.get(core, 0) + stats.num_generation_tokens
        for kind, count in stats.wire_bytes.items():
            self.wire_bytes[kind] = self.wire_bytes.get(kind, 0) + count

    def _weigh(self, now: float) -> None:
        """The time since the last report counts with the requests that the cores had in it."""
        total, last = sum(self._requests.values()), self._last_time
        if last is not None and now > last and total:
            self._imbalance += (now - last) * max(self._requests.values()) * len(self._requests) / total
            self._seconds += now - last
        self._last_time = now

    @property
    def load_max_over_mean(self) -> float:
        """Requests of the fullest core over the mean of the cores, over time; 1 is perfect."""
        return self._imbalance / self._seconds if self._seconds else 1.0

    @property
    def fullest_over_mean(self) -> float:
        """Tokens served by the fullest core over the mean."""
        shares = self.tokens_of_cores.values()
        return max(shares) * len(shares) / sum(shares)


def config_of(model: Path, layout: dict[str, Any]) -> EngineConfig:
    """Random weights where the folder has none."""
    return EngineConfig(
        model=str(model),
        load_format="auto" if any(model.glob("*.safetensors")) else "dummy",
        dtype="float32",
        cpu_threads=1,
        max_model_len=256,
        device_memory_bytes=6 << 30,
        num_gpu_blocks_override=256,
        max_num_seqs=16,
        max_num_seqs_cap=16,
        max_num_batched_tokens=512,
        max_num_batched_tokens_cap=512,
        **layout,
    )


class Cores:
    """An engine of a layout, from its start to its end."""

    def __init__(self, model: Path, layout: dict[str, Any]) -> None:
        self.run = Run()
        """Of what is served now."""
        self._launcher = CoreLauncher(config_of(model, layout))
        self.client = CoreClient(self._launcher.addresses[0], on_step=self._note)

    def _note(self, stats: StepStats) -> None:
        self.run.note(stats)

    async def __aenter__(self) -> "Cores":
        self.client.open()
        await self._launcher.start(self.client)
        await self.client.loaded.wait()
        if self.client.ready is None:
            await self._launcher.close(self.client)
            raise EngineDead(self.client.failure.message if self.client.failure else "the engine has ended")
        await self.serve([8] * NUM_REQUESTS)  # warm up
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._launcher.close(self.client)

    async def serve(self, outputs: Sequence[int], *, interval: float = 0.0, pinned: Sequence[int | None] = ()) -> Run:
        """Requests for so many tokens each, one every `interval` seconds on average; `pinned`: on which cores."""
        self.run = Run()
        vocabulary = self.client.ready.vocab_size if self.client.ready else 0
        dice = random.Random(0)
        times = [sum(gaps) for gaps in _growing([dice.expovariate(1 / interval) if interval else 0.0 for _ in outputs])]
        cores = pinned or [None] * len(outputs)

        async def one(number: int) -> None:
            await asyncio.sleep(times[number])
            prompt = [(3 + number * 7919 + place * 104_729) % (vocabulary - 3) for place in range(PROMPT_TOKENS)]
            sampling = Sampling(max_tokens=outputs[number], temperature=0.0, ignore_eos=True)
            request = AddRequest(f"r{number}", prompt, sampling, time.monotonic(), data_parallel_rank=cores[number])
            async for _ in self.client.generate(request):
                pass
            self.run.latencies.append(time.monotonic() - request.arrival_time)

        began = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(len(outputs))))
        self.run.tokens_per_second = sum(outputs) / (time.perf_counter() - began)
        return self.run


def _growing(gaps: list[float]) -> list[list[float]]:
    return [gaps[:end] for end in range(1, len(gaps) + 1)]


async def measure(model: Path, layout: dict[str, Any]) -> Run:
    """Start an engine of this layout, warm it up, measure, end it."""
    async with Cores(model, layout) as cores:
        return await cores.serve([OUTPUT_TOKENS] * NUM_REQUESTS)


async def measure_balance(model: Path, rounds: int) -> list[dict[str, Any]]:
    """Two data-parallel cores under a trace of short and long answers: by what they have to do, and in turns."""
    dice = random.Random(1)
    outputs = [LONG_OUTPUT if dice.random() < LONG_SHARE else SHORT_OUTPUT for _ in range(TRACE_REQUESTS)]
    ways: dict[str, list[int | None]] = {
        "least to do": [None] * TRACE_REQUESTS,
        "round robin": [number % 2 for number in range(TRACE_REQUESTS)],
    }
    seen: dict[str, list[Run]] = {way: [] for way in ways}
    async with Cores(model, DP2) as cores:
        for _ in range(rounds):
            for way, pinned in ways.items():
                seen[way].append(await cores.serve(outputs, interval=TRACE_SECONDS, pinned=pinned))
    return [
        {
            "way": way,
            "load_max_over_mean": round(statistics.median(run.load_max_over_mean for run in runs), 3),
            "tokens_of_fullest_core_over_mean": round(statistics.median(run.fullest_over_mean for run in runs), 3),
            "mean_latency_seconds": round(statistics.median(statistics.fmean(run.latencies) for run in runs), 3),
        }
        for way, runs in seen.items()
    ]


def row_of(name: str, alone: list[Run], together: list[Run]) -> dict[str, Any]:
    """Medians over the rounds; the ratio is that of each round."""
    last = together[-1]
    steps = max(last.num_steps, 1)
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
        "tokens_of_fullest_core_over_mean": round(last.fullest_over_mean, 3),
    }


def compare(model_name: str, model: Path, layouts: Layouts, rounds: int) -> list[dict[str, Any]]:
    """A row for each layout of a model."""
    alone: list[Run] = []
    together: dict[str, list[Run]] = {name: [] for name, _ in layouts}
    for _ in range(rounds):
        alone.append(asyncio.run(measure(model, {})))
        for name, layout in layouts:
            together[name].append(asyncio.run(measure(model, layout)))
            typer.echo(f"{model_name}, {name}: {together[name][-1].tokens_per_second:.1f} tokens/s", err=True)
    return [{"model": model_name} | row_of(name, alone, runs) for name, runs in together.items()]


def main(
    model: Annotated[Path | None, typer.Option(help="folder of SmolLM2-135M, for rows on a real model")] = None,
    output: Annotated[Path | None, typer.Option(help="folder for parallel.json, .md and .svg")] = None,
    rounds: Annotated[int, typer.Option(help="of one rank and every layout in turn")] = 3,
    only: Annotated[str, typer.Option(help="layouts whose name contains this")] = "",
) -> None:
    """Measure every layout beside one rank and print a table."""
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, values, layouts in (("dense", DENSE, DENSE_LAYOUTS), ("mixture", MIXTURE, MIXTURE_LAYOUTS)):
            made = Path(folder) / name
            made.mkdir()
            (made / "config.json").write_text(json.dumps(values))
            chosen = tuple(layout for layout in layouts if only in layout[0])
            rows += compare(name, made, chosen, rounds) if chosen else []
        if model is not None:
            rows += compare(model.name, model, tuple(one for one in GIVEN_LAYOUTS if only in one[0]), rounds)
        balance = asyncio.run(measure_balance(Path(folder) / "dense", rounds))
    results = {
        "machine": machine(),
        "command": "python -m engine_benchmarks.parallel_bench"
        + (f" --model {model.name}" if model else "")
        + f" --rounds {rounds}",
        "load_average_before": round(load, 1),
        "rounds": rounds,
        "layouts": rows,
        "balance": balance,
        "simulated": scaling_rows(),
    }
    typer.echo(page(results))
    if output is not None:
        written(output / "parallel.json", json.dumps(results, indent=1) + "\n")
        written(output / "parallel.md", page(results))
        if not is_busy(results):
            plot(results, output / "parallel.svg")


if __name__ == "__main__":
    typer.run(main)
