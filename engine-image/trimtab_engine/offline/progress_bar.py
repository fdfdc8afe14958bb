"""Progress bar on stderr: progress, remaining time, and a line of figures."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

REFRESH_SECONDS = 0.2  # drawing takes time from the measured code
Advance = Callable[[int, str], None]
"""Called with the number of newly completed items and the figures to show."""


@contextmanager
def progress_bar(description: str, total: int, *, enabled: bool = True) -> Iterator[Advance]:
    """Show a bar while the block runs. If stderr is not a terminal, only the final state is printed."""
    if not enabled:
        yield lambda count, figures: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task(description, total=total, figures="")
        drawn = -REFRESH_SECONDS

        def advance(count: int, figures: str) -> None:
            nonlocal drawn
            bar.update(task, advance=count, figures=figures)
            now = time.monotonic()
            if now - drawn >= REFRESH_SECONDS:
                drawn = now
                bar.refresh()

        yield advance
