"""When garbage is looked for: while nobody waits.

Python's collector looks through all that is kept, a third of a second with a thousand resources, and no loop runs
meanwhile; by itself it did so every three seconds while edits came (docs/results/operator-scale.md). So by itself it
looks at what is young alone. What has grown old since the last time is looked through once a minute, where nobody
waits for an edit, and all that there is once an hour.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

COLLECT_SECONDS = 60.0
PATIENCE_SECONDS = 600.0  # for which edits that do not end may put it off
ALL_SECONDS = 3_600.0
NEVER = 1_000_000_000  # collections of what is young


async def collect_when_quiet(is_busy: Callable[[], bool]) -> None:
    """Look for garbage, now and whenever it is due, until cancelled; then Python does so by itself as before."""
    before, now = gc.get_threshold(), asyncio.get_running_loop().time
    gc.set_threshold(*before[:2], NEVER)
    all_due = now()
    try:
        while True:
            if now() >= all_due:
                gc.unfreeze()
                all_due = now() + ALL_SECONDS
            gc.collect()
            gc.freeze()
            await asyncio.sleep(COLLECT_SECONDS)
            await _quiet(is_busy)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


async def _quiet(is_busy: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE_SECONDS)):
        if not is_busy():
            return
        await asyncio.sleep(1.0)
