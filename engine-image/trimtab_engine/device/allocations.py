"""What torch allocates on the CPU, counted call by call.

The kernel's figures for a process (resident memory, its high-water mark) differ by some hundred KiB from start to
start: heaps grow in steps, threads bring arenas, pages are rounded. What the code asks torch for is the same every
time. The number of KV blocks is computed from it, and so it is the same (ADR-0017).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from trimtab_engine.errors import ConfigError

MEMORY_EVENT = "memory_alloc"


@dataclass(slots=True)
class Growth:
    """What a block of code took beyond what was there before it, in bytes; final when the `with` block ends."""

    kept: int = 0
    """What it still holds at its end."""
    peak: int = 0
    """The most that it held at once."""


@contextmanager
def count_allocations() -> Iterator[Growth]:
    """Count what this thread allocates and frees through torch on the CPU. Such blocks do not nest.

    What was there before does not count, nor does its end. A file that torch maps counts like an allocation: map it
    before. This is the profiler that torch had before Kineto:
    it starts at once, writes nothing to the terminal, and its events carry the sizes. Raises ConfigError where the
    caller profiles already, as torch has one profiler for each thread.
    """
    growth = Growth()
    try:
        _enable_profiler_legacy(
            ProfilerConfig(
                ProfilerState.CPU,
                report_input_shapes=False,
                profile_memory=True,
                with_stack=False,
                with_flops=False,
                with_modules=False,
                experimental_config=_ExperimentalConfig(),
            )
        )
    except RuntimeError as error:
        raise ConfigError(
            f"the engine cannot count its memory while torch's profiler runs ({error}); start the engine first, then "
            f"the profiler"
        ) from None
    try:
        yield growth
    finally:
        held = 0
        for events in _disable_profiler_legacy():
            for event in events:
                if str(event.kind()) == MEMORY_EVENT:
                    held += event.cpu_memory_usage()
                    growth.peak = max(growth.peak, held)
        growth.kept = held
