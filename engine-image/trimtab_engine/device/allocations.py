"""Counter of torch's CPU allocations.

The kernel's figures for a process (resident memory, its high-water mark) differ by some hundred KiB between starts:
heaps grow in steps, threads add arenas, pages are rounded. Requests to torch are deterministic. The number of KV blocks
is computed from them and is therefore deterministic too (ADR-0017).
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
    """Memory growth of a block of code in bytes; final when the `with` block ends."""

    kept: int = 0
    """Bytes still held at the end."""
    peak: int = 0
    """Maximum bytes held at once."""


@contextmanager
def count_allocations() -> Iterator[Growth]:
    """Count this thread's CPU allocations and frees through torch. Blocks cannot be nested. Memory allocated before
    does not count, nor does its freeing. A file mapped by torch counts like an allocation: map it before.

    Uses torch's legacy profiler: it starts immediately, prints nothing, and its events carry sizes.

    Raises:
        ConfigError: If the caller is already profiling; torch has one profiler per thread.
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
