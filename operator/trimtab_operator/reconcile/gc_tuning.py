"""Python garbage collection while no edit is pending.

With a thousand resources, a full collection takes a third of a second and blocks all loops; CPython ran one every three
seconds during bursts of edits (docs/results/operator-scale.md). So automatic collections are limited to young objects.
Objects that became old since the last collection are collected once a minute while no edit is pending, and all objects
once an hour.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

COLLECT_INTERVAL_SECONDS = 60.0
MAX_DEFER_SECONDS = 600.0  # of a collection during continuous edits
FULL_COLLECT_INTERVAL_SECONDS = 3_600.0
DISABLED_THRESHOLD = 1_000_000_000  # young collections per old one: never


async def collect_garbage_when_idle(is_busy: Callable[[], bool]) -> None:
    """Collect garbage at regular intervals until cancelled, then restore Python's defaults."""
    before, now = gc.get_threshold(), asyncio.get_running_loop().time
    gc.set_threshold(*before[:2], DISABLED_THRESHOLD)
    all_due = now()
    try:
        while True:
            if now() >= all_due:
                gc.unfreeze()
                all_due = now() + FULL_COLLECT_INTERVAL_SECONDS
            gc.collect()
            gc.freeze()
            await asyncio.sleep(COLLECT_INTERVAL_SECONDS)
            await _wait_until_idle(is_busy)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


async def _wait_until_idle(is_busy: Callable[[], bool]) -> None:
    for _ in range(int(MAX_DEFER_SECONDS)):
        if not is_busy():
            return
        await asyncio.sleep(1.0)
