"""What a decode step costs the host when a device computes it: scheduling, inputs, sampling's launches, results.

A real engine with a tiny model and steps as on CUDA: inputs at fixed places, graphs, the next step queued before the
last one has landed. Replaying a graph does nothing here, so what is left is the host's own time but for CUDA's launches
(about 5 us each, a few dozen per step). While it is below the device's own time of a step, the device never waits.

    python -m engine_benchmarks.host_bench [-o json] [--steps N]
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.core.startup import start_engine
from trimtab_engine.messages import AddRequest
from trimtab_engine.runner import start
from trimtab_engine.runner.graphs.plan import cuda_graph_plan
from trimtab_engine.runner.graphs.recorder import Outside, Replay
from trimtab_engine.scheduling.sampling import Sampling

RUNNING = (1, 32, 256)
CONTEXT = 1024
WARM_UP_STEPS = 20
MAX_STEPS = 600
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
PARTS = {"schedule and lay out": "_prepare", "inputs and launch": "_follow", "land": "_land", "report": "_report"}
"""What is told apart, and the engine's method that does it."""


class _ReplaysNothing:
    """Stands for CUDA's recorder: the recorded step runs once, replaying it costs nothing."""

    def record(self, run: Callable[[Outside], None]) -> Replay:
        run(lambda call: call())
        return lambda: None

    def forget(self) -> None:
        """Nothing was kept."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Milliseconds of processor time per step, medians."""

    running: int
    steps: int
    step_ms: float
    parts_ms: dict[str, float]


@contextmanager
def an_engine() -> Iterator[Engine]:
    """On the CPU, with a device's steps."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            device_memory_bytes=4 << 30,
            max_model_len=2048,
            max_num_seqs=max(RUNNING),
            max_num_seqs_cap=max(RUNNING),
            max_num_batched_tokens=8192,
            max_num_batched_tokens_cap=8192,
            num_gpu_blocks_override=max(RUNNING) * 2048 // 16,
            enable_prefix_caching=False,
            async_scheduling=True,
            cpu_threads=1,
        )
        with (
            patch.object(start, "recorder_of", lambda device: _ReplaysNothing()),
            patch.object(start, "graph_plan", cuda_graph_plan),
        ):
            engine, _ = start_engine(config, lambda stage, percent: None, time.monotonic)
    try:
        yield engine
    finally:
        engine.close()


def measure(engine: Engine, running: int, steps: int) -> Measurement:
    """So many requests that all decode."""
    ids = [f"{running}-{number}" for number in range(running)]
    for request_id in ids:
        sampling = Sampling(temperature=0.0, max_tokens=MAX_STEPS + 4 * WARM_UP_STEPS, ignore_eos=True)
        engine.add(AddRequest(request_id, [3] * CONTEXT, sampling, arrival_time=time.monotonic()))
    decodes = 0
    while decodes < WARM_UP_STEPS:
        stats = engine.step().stats
        decodes += stats.kind == "decode" and stats.num_batch_requests == running
    seconds: dict[str, list[float]] = {name: [] for name in PARTS}
    whole: list[float] = []
    with _timed(engine, seconds):
        for _ in range(steps):
            started = time.thread_time()
            stats = engine.step().stats
            whole.append(time.thread_time() - started)
            if set(stats.graph_steps) != {"full"}:
                raise RuntimeError(f"a step replayed {stats.graph_steps or 'no graph'}: this is not what is measured")
    engine.abort(ids)
    while engine.has_work:
        engine.step()
    return Measurement(running, steps, _ms(whole), {name: _ms(taken) for name, taken in seconds.items()})


@contextmanager
def _timed(engine: Engine, seconds: dict[str, list[float]]) -> Iterator[None]:
    """Within the block the parts of a step note their time."""
    for name, method in PARTS.items():
        setattr(engine, method, _noting(getattr(engine, method), seconds[name]))
    try:
        yield
    finally:
        for method in PARTS.values():
            delattr(engine, method)


def _noting(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        started = time.thread_time()
        result = call(*arguments)
        seconds.append(time.thread_time() - started)
        return result

    return timed


def _ms(seconds: Sequence[float]) -> float:
    return round(1e3 * median(seconds), 4)


def table(measurements: Sequence[Measurement]) -> str:
    """For people."""
    head = f"{'running':>7} {'step ms':>8} " + " ".join(f"{name:>20}" for name in PARTS)
    rows = [
        f"{m.running:>7} {m.step_ms:>8.3f} " + " ".join(f"{m.parts_ms[name]:>20.3f}" for name in PARTS)
        for m in measurements
    ]
    return "\n".join([head, *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="host_bench", description="Host time of decode steps, without the device's.")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    parser.add_argument("--steps", type=int, default=200, help="measured steps per load")
    options = parser.parse_args(arguments)
    if not 1 <= options.steps <= MAX_STEPS:
        parser.error(f"--steps is {options.steps}; it must be 1 to {MAX_STEPS}")
    torch.set_num_threads(1)
    with an_engine() as engine:
        measurements = [measure(engine, running, options.steps) for running in RUNNING]
    if options.output == "json":
        told = {"python": platform.python_version(), "torch": torch.__version__, "context": CONTEXT}
        print(json.dumps(told | {"measurements": [asdict(m) for m in measurements]}, indent=1))
    else:
        print(table(measurements))
    return 0


if __name__ == "__main__":
    sys.exit(main())
