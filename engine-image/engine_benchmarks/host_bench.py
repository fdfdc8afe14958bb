"""Host time of a decode step on a device: scheduling, inputs, sampling launches, results.

A real engine with a tiny model and steps as on CUDA: inputs at fixed addresses, graphs, the next step queued before the
previous one has completed. Device work is a no-op here (graph replay, prompts, copies to the device, sampling, logits),
so only the host's own time remains, without CUDA's launches (about 5 us each, a few dozen per step). While it is below
the device's time of a step, the device never waits.

    python -m engine_benchmarks.host_bench [-o json] [--steps N] [--running 256 1024] [--context 256 2048 8192]
        [--random] [--prefix-caching]
"""

import argparse
import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import torch
import zmq
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.graphs import CompilationConfig
from trimtab_engine.core.clients import Clients
from trimtab_engine.core.engine import Engine
from trimtab_engine.core.startup import start_engine
from trimtab_engine.ipc.gc_freeze import freeze_startup_objects
from trimtab_engine.messages.lifecycle import ClientAddresses
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.models.decoder import Decoder
from trimtab_engine.runner import start
from trimtab_engine.runner.graphs.device_steps import DeviceSteps
from trimtab_engine.runner.graphs.plan import cuda_graph_plan
from trimtab_engine.runner.graphs.recorder import Outside, Replay
from trimtab_engine.runner.graphs.step_buffers import StepBuffers
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.sampling import sampler
from trimtab_engine.scheduling.sampling import Sampling

RUNNING = (1, 32, 256)
CONTEXT = 1024
MAX_RUNNING = 4096
MAX_CONTEXT = 8192
BLOCK_SIZE = 16
PROMPT_TOKENS_PER_STEP = 65536  # all prompts are read after at most 128 steps, while the first requests already decode
WARM_UP_STEPS = 20
MAX_STEPS = 600
HIDDEN_SIZE = VOCAB_SIZE = 16
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
PARTS = {
    "schedule and lay out": "_prepare",
    "inputs and launch": "_dispatch_follower",
    "land": "_process_output",
    "report": "_report",
}
"""The measured parts, and the engine's method of each."""


class _ReplaysNothing:
    """Replaces CUDA's graph recorder: the recorded step runs once, and replaying it costs nothing."""

    def record(self, run: Callable[[Outside], None]) -> Replay:
        run(lambda call: call())
        return lambda: None

    def forget(self) -> None:
        """Do nothing: no state is kept."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that all decode at a length of `context`. `random`: with top_p 0.9 and a seed each, otherwise greedy."""

    running: int
    context: int = CONTEXT
    random: bool = False
    prefix_caching: bool = False


@dataclass(frozen=True, slots=True)
class Measurement:
    """Milliseconds of processor time per step, medians except for `quiet_ms`, the tenth percentile: steps least
    disturbed by other work on the machine. `message_ms`: time to send a step's output to the API server.
    """

    running: int
    context: int
    steps: int
    step_ms: float
    quiet_ms: float
    message_ms: float
    parts_ms: dict[str, float]


@contextmanager
def running_engine(load: Load) -> Iterator[Engine]:
    """Start an engine on the CPU, with a device's steps, sized for this load."""
    longest = load.context + _most_tokens(load) + 1
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            device_memory_bytes=4 << 30,
            max_model_len=longest,
            max_num_seqs=load.running,
            max_num_seqs_cap=load.running,
            max_num_batched_tokens=PROMPT_TOKENS_PER_STEP,
            max_num_batched_tokens_cap=PROMPT_TOKENS_PER_STEP,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=load.running * -(-longest // BLOCK_SIZE),
            enable_prefix_caching=load.prefix_caching,
            async_scheduling=True,
            compilation=CompilationConfig(cudagraph_capture_sizes=(load.running,)),
            cpu_threads=1,
        )
        with _skip_device_work():
            engine, _ = start_engine(config, lambda stage, percent: None, time.monotonic)
            assert engine._runner.steps is not None
            assert engine._runner.steps.sampler is not None
            engine._runner.steps.sampler.draws_by_kernel = True
            try:
                yield engine
            finally:
                engine.close()


@contextmanager
def _skip_device_work() -> Iterator[None]:
    """Skip device work within the block."""
    with (
        patch.object(start, "recorder_of", lambda device: _ReplaysNothing()),
        patch.object(start, "graph_plan", cuda_graph_plan),
        patch.object(ModelRunner, "profile", lambda *_: 0),
        patch.object(DeviceSteps, "_forward", lambda _, buffers, key, *rest: torch.zeros(key.num_tokens, HIDDEN_SIZE)),
        patch.object(StepBuffers, "_to_device", lambda *_: None),
        patch.object(Decoder, "logits", lambda model, hidden, wanted: torch.zeros(len(wanted), VOCAB_SIZE)),
        patch.object(sampler, "sample_triton", lambda logits, *_: (logits.argmax(dim=-1), None)),
    ):
        yield


def _most_tokens(load: Load) -> int:
    """Return the tokens that each request may generate: enough to read the last prompt, warm up and measure."""
    return MAX_STEPS + 4 * WARM_UP_STEPS + -(-load.running * load.context // (PROMPT_TOKENS_PER_STEP - load.running))


def measure(engine: Engine, load: Load, steps: int) -> Measurement:
    """Measure a number of requests that all decode."""
    running = load.running
    ids = [f"{running}-{number}" for number in range(running)]
    for number, request_id in enumerate(ids):
        sampling = Sampling(
            temperature=1.0 if load.random else 0.0,
            top_p=0.9 if load.random else 1.0,
            seed=number if load.random else None,
            max_tokens=_most_tokens(load),
            ignore_eos=True,
        )
        engine.add(AddRequest(request_id, [3] * load.context, sampling, arrival_time=time.monotonic()))
    decodes = 0
    while decodes < WARM_UP_STEPS:
        stats = engine.step().stats
        decodes += stats.kind == "decode" and stats.num_batch_requests == running
    seconds: dict[str, list[float]] = {name: [] for name in PARTS}
    whole: list[float] = []
    messages: list[float] = []
    freeze_startup_objects()  # as in the core's process
    with _timed(engine, seconds), _connect_client() as link:
        for _ in range(steps):
            started = time.thread_time()
            step = engine.step()
            whole.append(time.thread_time() - started)
            started = time.thread_time()
            link.send_step(step)
            messages.append(time.thread_time() - started)
            if set(step.stats.graph_steps) != {"full"}:
                raise RuntimeError(
                    f"a step replayed {step.stats.graph_steps or 'no graph'}, so the measurement is invalid"
                )
    gc.unfreeze()
    engine.abort(ids)
    while engine.has_work:
        engine.step()
    parts = {name: _ms(taken) for name, taken in seconds.items()}
    quiet = min(whole) if len(whole) < 2 else quantiles(whole, n=10, method="inclusive")[0]
    return Measurement(running, load.context, steps, _ms(whole), _ms([quiet]), _ms(messages), parts)


@contextmanager
def _connect_client() -> Iterator[Clients]:
    """Connect the core to an API server that reads nothing."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory() as folder:
        addresses = ClientAddresses(f"ipc://{folder}/to_core", f"ipc://{folder}/from_core")
        server = context.socket(zmq.PULL)
        server.bind(addresses.from_core)
        link = Clients([addresses])
        try:
            yield link
        finally:
            link.close()
            context.destroy(linger=0)


@contextmanager
def _timed(engine: Engine, seconds: dict[str, list[float]]) -> Iterator[None]:
    """Record the time of the parts of a step within the block."""
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
    """Return a readable table."""
    head = f"{'running':>7} {'context':>7} {'step ms':>8} {'quiet':>8} {'message':>8} " + " ".join(
        f"{name:>20}" for name in PARTS
    )
    rows = [
        f"{m.running:>7} {m.context:>7} {m.step_ms:>8.3f} {m.quiet_ms:>8.3f} {m.message_ms:>8.3f} "
        + " ".join(f"{m.parts_ms[name]:>20.3f}" for name in PARTS)
        for m in measurements
    ]
    return "\n".join([head, *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(prog="host_bench", description="Host time of decode steps, without the device's.")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    parser.add_argument("--steps", type=int, default=200, help="measured steps per load")
    parser.add_argument("--running", type=int, nargs="+", default=RUNNING, help="requests that decode at once")
    parser.add_argument("--context", type=int, nargs="+", default=[CONTEXT], help="tokens of each")
    parser.add_argument("--random", action="store_true", help="with top_p and seeds; else greedy")
    parser.add_argument("--prefix-caching", action="store_true", help="with the prefix cache on")
    options = parser.parse_args(arguments)
    for name, values, most in (("running", options.running, MAX_RUNNING), ("context", options.context, MAX_CONTEXT)):
        if not 1 <= min(values) <= max(values) <= most:
            parser.error(f"--{name} is {' '.join(map(str, values))}; it must be 1 to {most}")
    if not 1 <= options.steps <= MAX_STEPS:
        parser.error(f"--steps is {options.steps}; it must be 1 to {MAX_STEPS}")
    torch.set_num_threads(1)
    loads = [
        Load(running, context, random=options.random, prefix_caching=options.prefix_caching)
        for running in options.running
        for context in options.context
    ]
    measurements = []
    for load in loads:
        with running_engine(load) as engine:
            measurements.append(measure(engine, load, options.steps))
    if options.output == "json":
        report: dict[str, Any] = {
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        report |= {"random": options.random, "prefix_caching": options.prefix_caching}
        print(json.dumps(report | {"measurements": [asdict(m) for m in measurements]}, indent=1))
    else:
        print(table(measurements))
    return 0


if __name__ == "__main__":
    sys.exit(main())
