"""Terminal output of the demo: chapters, a load bar and live numbers; plain lines if the output is no terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from devtools import slow_stage, stage_log
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from harness.engine import EngineReading
from harness.report import redirected_to
from harness.watch import Watched

LINE_SECONDS = 10.0  # between two meter lines if the output is no terminal
BAR_WIDTH = 24
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Chapter:
    """A chapter in progress: its name in the final line, its expected duration and its start."""

    stage: str
    expected_seconds: float
    at_seconds: float  # after the start of the make run


class Stage:
    """One demo's output."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._begin = time.monotonic()
        self._chapters = 0
        self._current: Chapter | None = None

    def elapsed(self) -> float:
        return time.monotonic() - self._begin

    def chapter(self, title: str, expected_seconds: float, *, stage: str) -> None:
        """Close the previous chapter and open one; `stage` is its name in the final line."""
        self.end()
        self._chapters += 1
        expected = f", about {stage_log.duration(expected_seconds)}" if expected_seconds else ""
        self.console.print()
        self.console.rule(
            f"[bold]{self._chapters}. {title}[/bold]  [dim]{stage_log.duration(stage_log.elapsed())}{expected}[/dim]",
            align="left",
        )
        self._current = Chapter(stage, expected_seconds, stage_log.elapsed())

    def end(self) -> None:
        """Close the chapter, record its duration, and explain it if it took longer than expected."""
        chapter, self._current = self._current, None
        if chapter is None:
            return
        seconds = stage_log.elapsed() - chapter.at_seconds
        stage_log.record(stage_log.FinishedStage(chapter.stage, chapter.at_seconds, seconds, chapter.expected_seconds))
        if chapter.expected_seconds and slow_stage.is_late(seconds, chapter.expected_seconds):
            cores, load = slow_stage.load_now()
            why = slow_stage.delay_reason(slow_stage.StageContext(cores, load, (), ""))
            self.dim(f"  That took {stage_log.duration(seconds)}, later than expected: {why}.")

    def line(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def dim(self, text: str) -> None:
        self.console.print(Text(text, style="dim"))

    def quote(self, title: str, text: str) -> None:
        self.console.print(Panel(Text(text), title=title, title_align="left", border_style="green"))

    def piece(self, text: str) -> None:
        """Print a piece of a streamed answer."""
        self.console.print(Text(text, style="bold green"), end="")

    @contextmanager
    def loading(self, watched: Watched) -> Iterator[None]:
        """Show a progress bar of status.groups[0].load of the watched resource."""
        bar = Progress(
            TextColumn("{task.description:<28}"),
            BarColumn(BAR_WIDTH),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=self.console,
        )
        task = bar.add_task("Pending", total=100)
        seen: set[str] = set()

        def follow(_: str) -> None:
            for state in watched.states:
                description, percent = _load_of(state)
                if self.console.is_terminal:
                    bar.update(task, description=description, completed=percent)
                elif description not in seen:
                    self.dim(f"  {description} {percent} %")
                seen.add(description)

        with redirected_to(follow):
            if self.console.is_terminal:
                with bar:
                    yield
                    follow("")
            else:
                yield
                follow("")

    @contextmanager
    def meter(self) -> Iterator[Meter]:
        """Show a line of numbers that is updated with each reading."""
        meter = Meter(self)
        with redirected_to(lambda _: None):
            if self.console.is_terminal:
                with Live(console=self.console, refresh_per_second=4, transient=False) as live:
                    meter.live = live
                    yield meter
            else:
                yield meter


def _load_of(state: dict[str, object]) -> tuple[str, int]:
    status = state.get("status")
    groups = status.get("groups", []) if isinstance(status, dict) else []
    if not groups:
        return "Pending", 0
    load = groups[0].get("load") or {}
    return f"{groups[0].get('phase')}: {load.get('stage', 'pod starts')}", int(load.get("percent", 0))


class Meter:
    """Running, waiting, KV usage, preemptions and tokens per second, from one reading to the next."""

    def __init__(self, stage: Stage) -> None:
        self.live: Live | None = None
        self.peak_preemptions_per_second = 0.0
        self._stage = stage
        self._last: tuple[float, EngineReading] | None = None
        self._printed = 0.0

    def show(self, reading: EngineReading) -> None:
        now = time.monotonic()
        preempted = tokens = 0.0
        if self._last is not None and now > self._last[0]:
            seconds = now - self._last[0]
            preempted = max(0.0, reading.preemptions - self._last[1].preemptions) / seconds
            tokens = max(0.0, reading.generation_tokens - self._last[1].generation_tokens) / seconds
        self._last = (now, reading)
        self.peak_preemptions_per_second = max(self.peak_preemptions_per_second, preempted)
        text = _meter_text(reading, preempted, tokens)
        if self.live is not None:
            self.live.update(text)
        elif now - self._printed >= LINE_SECONDS:
            self._stage.console.print(text)
            self._printed = now


def _meter_text(reading: EngineReading, preempted: float, tokens: float) -> Text:
    full = round(reading.kv_usage * 10)
    text = Text("  ")
    text.append(f"{reading.running:2.0f} running {reading.waiting:2.0f} waiting  ")
    text.append("KV " + "█" * full + "░" * (10 - full), style="red" if reading.kv_usage > 0.95 else "green")
    text.append(f" {reading.kv_usage:4.0%} of {reading.kv_tokens:,} tokens  ")
    style = "bold red" if preempted else "green"
    text.append(f"{preempted:4.1f} preemptions/s ({reading.preemptions:.0f} in all)  ", style=style)
    text.append(f"{tokens:4.0f} tokens/s")
    return text
