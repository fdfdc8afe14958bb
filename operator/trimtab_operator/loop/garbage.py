"""When garbage is looked for: while nobody waits.

Python's collector looks through all that is kept, a third of a second with a thousand resources, and no loop runs
meanwhile; by itself it did so every three seconds while edits came (docs/results/operator-scale.md). So by itself it
looks at what is young alone. What has grown old since the last time is looked through once a minute, where nobody
waits for an edit, and all that there is once an hour.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable

COLLECT_SECONDS = 60.0
PATIENCE_SECONDS = 600.0  # for which edits that do not end may put it off
TIMES_TO_ALL = 60  # that what is new is looked through, to one time of all
NEVER = 1_000_000_000  # collections of what is young


async def collect_when_quiet(is_busy: Callable[[], bool]) -> None:
    """Look for garbage, now and whenever it is due, until cancelled."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    for time in itertools.count():
        if time % TIMES_TO_ALL == 0:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        await asyncio.sleep(COLLECT_SECONDS)
        await _quiet(is_busy)


async def _quiet(is_busy: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE_SECONDS)):
        if not is_busy():
            return
        await asyncio.sleep(1.0)
