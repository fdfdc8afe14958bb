"""A progress bar on stderr for what takes a while: how far, how long still, and one line of figures."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

REFRESH_SECONDS = 0.2  # drawing is work that the measured code would otherwise do
Advance = Callable[[int, str], None]
"""Called with how many more are done and the figures to show beside them."""


@contextmanager
def progress_bar(description: str, total: int, *, enabled: bool = True) -> Iterator[Advance]:
    """Show a bar while the block runs. Where stderr is no terminal, only the last state is printed."""
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
