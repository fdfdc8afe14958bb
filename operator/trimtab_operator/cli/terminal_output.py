"""Tables, bars and the console of the cluster commands, so that all of them look alike."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimtab_operator.resource.time import parse_time

PIPED_WIDTH = 160  # columns without a terminal
BAR_WIDTH = 20
HIGH_SHARE, FULL_SHARE = 0.8, 0.95
PARTS = " ▏▎▍▌▋▊▉█"
WRAPPED_COLUMNS = ("MESSAGE", "LAST DECISION", "WHAT TO DO")


def new_console() -> Console:
    """Return a console for stdout; without a terminal, lines are `PIPED_WIDTH` columns wide."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console


def new_table(*columns: str, wrapped: Collection[str] = WRAPPED_COLUMNS) -> Table:
    """Return an empty table. Only the columns in `wrapped` break lines at spaces."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column not in wrapped)
    return table


def share_bar(share: float | None, *, width: int = BAR_WIDTH) -> Text:
    """Return a bar for a share of 0..1 with its percentage; yellow from 80 %, red from 95 %."""
    if share is None:
        return Text("·" * width + "    -", style="dim")
    shown = min(1.0, max(0.0, share))
    eighths = round(shown * width * 8)
    text = "█" * (eighths // 8) + (PARTS[eighths % 8] if eighths % 8 else "")
    style = "red" if share >= FULL_SHARE else "yellow" if share >= HIGH_SHARE else "green"
    bar = Text(text.ljust(width, "·"), style=style)
    return bar.append(f" {share:4.0%}", style="default")


def format_seconds(seconds: float) -> str:
    """Return a duration for display: 8.3 ms, 240 ms, 1.2 s."""
    if seconds < 1:
        milliseconds = seconds * 1000
        return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
    return f"{seconds:.1f} s"


def format_age(timestamp: str | None, now: datetime | None = None) -> str:
    """Return the age of an RFC 3339 time as kubectl shows it: 42s, 5m, 3h, 2d. Empty if it is missing."""
    at = parse_time(timestamp) if timestamp else None
    if at is None:
        return ""
    seconds = max(0, int(((now or datetime.now(UTC)) - at).total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
