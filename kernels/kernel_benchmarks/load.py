"""Requests for the engine itself, stepped in this process: no server, no tokenizer."""

import gc
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kernel_benchmarks.engine_rows import Workload
from kernel_benchmarks.ideal import ModelShape

if TYPE_CHECKING:
    from trimtab_engine.core.engine import Engine
    from trimtab_engine.messages.requests import StepOutputs

MAX_POSITIONS = 4096


class Compiled(Exception):
    """A kernel was compiled during the measurement, which is therefore not representative."""


@contextmanager
def running_engine(shape: ModelShape, *, device: str = "cuda", **changes: Any) -> "Iterator[Engine]":
    """Start an engine with random weights, and close it at the end."""
    from trimtab_engine.config.engine import EngineConfig
    from trimtab_engine.core.startup import start_engine

    values: dict[str, Any] = {
        "load_format": "dummy",
        "device": device,
        "max_model_len": 2048,
        "max_num_seqs": 256,
        "max_num_seqs_cap": 256,
        "max_num_batched_tokens": 8192,
        "max_num_batched_tokens_cap": 8192,
        "enable_prefix_caching": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config(MAX_POSITIONS)))
        config = EngineConfig(model=folder, **{**values, **changes})
        engine, _ = start_engine(config, lambda stage, percent: None, time.monotonic)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def add(engine: "Engine", workload: Workload, *, temperature: float = 0.0) -> None:
    """Queue requests that generate exactly the given number of tokens."""
    from trimtab_engine.messages.requests import AddRequest
    from trimtab_engine.scheduling.sampling import Sampling

    for number, (prompt, count) in enumerate(workload):
        sampling = Sampling(temperature=temperature, max_tokens=count, ignore_eos=True)
        engine.add(AddRequest(str(number), prompt, sampling, arrival_time=time.monotonic()))


def checked(step: "StepOutputs") -> "StepOutputs":
    """Run a step.

    Raises:
        Compiled: a kernel was compiled.
    """
    if step.stats.kernel_compilations:
        raise Compiled(f"{step.stats.kernel_compilations} kernels were compiled after start-up")
    return step


def run_to_end(engine: "Engine") -> int:
    """Step until no request is left; return the number of generated tokens."""
    generated = 0
    while engine.has_work:
        generated += tokens_of(checked(engine.step()))
    return generated


def tokens_of(step: "StepOutputs") -> int:
    return sum(len(output.token_ids) for output in step.outputs)


def drop_all(engine: "Engine") -> None:
    """Abort the running requests and drain in-flight steps."""
    engine.abort([str(number) for number in range(1024)])
    while engine.has_work:
        engine.step()
