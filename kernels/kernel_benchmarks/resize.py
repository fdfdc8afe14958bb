"""Live KV resize under load: how long requests stall when the KV cache grows and shrinks again, that none of them
fails, and that their tokens stay the same. Compared with the duration of a restart.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel_benchmarks.engine_rows import decode_load
from kernel_benchmarks.load import add, checked

if TYPE_CHECKING:
    from trimtab_engine.core.engine import Engine

RESIZE_BYTES = 10 << 30
REQUESTS, CONTEXT, STEPS = 64, 512, 96
GROW_AT, SHRINK_AT = 0.5, 0.75
"""Fractions of the run's steps after which the cache grows and shrinks: by then all requests decode."""
UTILIZATION_STEPS = 10_000  # utilization is rounded to four digits


class ResizeFailed(Exception):
    """The cache did not change as requested, a request failed, or tokens differ."""


@dataclass(frozen=True, slots=True)
class Resize:
    """`stalls` of growing and shrinking: seconds beyond a usual step between the tokens before and after."""

    stalls: tuple[float, float]
    bytes_moved: int


@dataclass(frozen=True, slots=True)
class _Run:
    tokens: dict[str, list[int]]
    step_seconds: list[float]


def live_resize(
    engine: "Engine", *, num_bytes: int = RESIZE_BYTES, requests: int = REQUESTS, context: int = CONTEXT
) -> Resize:
    """Grow by `num_bytes` and shrink back while requests decode.

    Raises:
        ResizeFailed: the cache did not change, a request failed, or tokens differ.
    """
    from trimtab_engine.messages.admin import PatchConfig

    usual = _run(engine, requests, context, {})
    device_bytes = engine.ledger().device_bytes
    low = float(engine.config()["applied"]["gpu_memory_utilization"])
    high = low + math.ceil(num_bytes / device_bytes * UTILIZATION_STEPS) / UTILIZATION_STEPS
    steps = len(usual.step_seconds)
    grow, shrink = int(GROW_AT * steps), int(SHRINK_AT * steps)
    moved: list[int] = []

    def to(utilization: float) -> None:
        before = engine.ledger().kinds["kv_mapped"]
        status, answer = engine.patch_config(PatchConfig({"gpu_memory_utilization": round(utilization, 4)}))
        if status != 200:
            raise ResizeFailed(f"a PATCH of gpu_memory_utilization to {utilization:.4f} was refused: {answer}")
        moved.append(abs(engine.ledger().kinds["kv_mapped"] - before))

    found = _run(engine, requests, context, {grow: high, shrink: low}, to)
    if min(moved) < 0.99 * num_bytes:
        raise ResizeFailed(f"{num_bytes} bytes were to be mapped and unmapped, but {moved} were")
    if found.tokens != usual.tokens:
        raise ResizeFailed("the tokens differ from those without a resize")
    median = statistics.median(found.step_seconds)
    return Resize((found.step_seconds[grow] - median, found.step_seconds[shrink] - median), min(moved))


def _run(
    engine: "Engine",
    requests: int,
    context: int,
    changes: dict[int, float],
    to: Callable[[float], None] | None = None,
) -> _Run:
    """Run the requests to their end; a step's seconds include the change before it.

    Raises:
        ResizeFailed: the cache did not change, or a request failed.
    """
    add(engine, decode_load(requests, context, STEPS))
    tokens: dict[str, list[int]] = {}
    seconds: list[float] = []
    while engine.has_work:
        began = time.perf_counter()
        if to is not None and len(seconds) in changes:
            to(changes[len(seconds)])
        for output in checked(engine.step()).outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason not in (None, "length"):
                raise ResizeFailed(f"request {output.request_id} ended with {output.finish_reason}: {output.error}")
        seconds.append(time.perf_counter() - began)
    return _Run(tokens, seconds)
