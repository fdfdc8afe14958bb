"""Builders of requests, configurations and engines shared by engine tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.core.startup import start_engine
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling

ON_A_GPU: dict[str, Any] = {
    "load_format": "auto",
    "dtype": "float32",
    "device": "cuda",
    "device_memory_bytes": 64 << 30,  # what other processes have of it counts as taken
    "block_size": 16,
}
"""Configuration of a GPU engine compared with transformers."""


def a_config(model: Path, **changes: Any) -> EngineConfig:
    """A small engine on the CPU with one thread and random weights; caps are where the knobs start, unless given."""
    values: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "device_memory_bytes": 4 << 30,
        "cpu_threads": 1,
        "block_size": 8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        **changes,
    }
    for knob in ("max_num_seqs", "max_num_batched_tokens"):
        values.setdefault(f"{knob}_cap", values[knob])
    return EngineConfig(**values)


def ticking() -> Callable[[], float]:
    """A clock that is a millisecond later each time it is read."""
    ticks = itertools.count()
    return lambda: next(ticks) * 0.001


def uneven(seed: int) -> Callable[[], float]:
    """A clock as of a busy machine, the same one for the same seed: each time it is read it is between a tenth of a
    millisecond and ten milliseconds later.
    """
    dice = random.Random(seed)
    now = 0.0

    def read() -> float:
        nonlocal now
        now += 10 ** dice.uniform(-4, -2)
        return now

    return read


def an_engine(model: Path, clock: Callable[[], float] | None = None, /, **changes: Any) -> Engine:
    """The engine of `a_config`, started, with a clock that ticks unless another is given."""
    engine, _ = start_engine(a_config(model, **changes), lambda stage, percent: None, clock or ticking())
    return engine


def a_request(
    prompt: Iterable[int] = (1,),
    output: Iterable[int] = (),
    *,
    request_id: str = "r",
    arrival_time: float = 0.0,
    priority: int = 0,
    **sampling: Any,
) -> Request:
    """A request as the scheduler and the sampler see it, which has generated `output` already."""
    request = Request.of(request_id, list(prompt), Sampling(**sampling), arrival_time=arrival_time, priority=priority)
    request.token_ids += output
    return request


def a_new_request(request_id: str, prompt: Iterable[int], **sampling: Any) -> AddRequest:
    """Return a greedy request to the engine core that runs to `max_tokens` by default."""
    params = Sampling(**{"temperature": 0.0, "ignore_eos": True, **sampling})
    return AddRequest(request_id, list(prompt), params, arrival_time=0.0)


def logprobs_of(model: Path, vocabulary: int, **changes: Any) -> list[float]:
    """Return the log-probabilities of one prompt's tokens, in chunks, and of following tokens."""
    return answer_of(model, vocabulary, 6, **changes)[0]


def answer_of(model: Path, vocabulary: int, max_tokens: int, **changes: Any) -> tuple[list[float], list[int]]:
    """The same, and these tokens."""
    sizes: dict[str, Any] = {"num_gpu_blocks_override": 40, "max_model_len": 128, "max_num_batched_tokens": 24}
    engine = an_engine(model, load_format="auto", **(sizes | changes))
    params = Sampling(max_tokens=max_tokens, temperature=0.0, prompt_logprobs=0, logprobs=1, ignore_eos=True)
    engine.add(AddRequest("r", [(5 * i) % vocabulary for i in range(50)], params, arrival_time=0.0))
    found: list[float] = []
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step().outputs:
            tokens += output.token_ids
            found += [score.logprobs[0] for score in output.prompt_logprobs or () if score is not None]
            found += [score.logprobs[0] for score in output.logprobs or () if score is not None]
    return found, tokens
