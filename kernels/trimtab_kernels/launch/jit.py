"""The only module that imports Triton: kernels import `tl`, `jit` and `kernel` from here.

Triton is part of torch's CUDA builds and absent from its CPU builds, where the references run instead. A kernel's file
therefore contains its reference, its kernel and its wrapper, and can be imported everywhere: without Triton, a kernel
is an object that refuses to be launched.

`watch_compilations` counts Triton's compilations from then on: there must be none after warm-up.

`record_launches` records launches instead of making them. Called with tensors on torch's meta device, a launcher thus
reports exactly which specialisation of which kernel it needs: the input of the ahead-of-time compiler
(kernel_benchmarks/aot).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# Triton 3.9 requires a choice: whether multiplications and additions are fused must not depend on its version.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


class Absent:
    """Placeholder for the module if Triton is not installed, so that decorators and annotations still evaluate."""

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "Absent":
        return self


HAS_TRITON = find_spec("triton") is not None
triton: Any = import_module("triton") if HAS_TRITON else Absent()
tl: Any = import_module("triton.language") if HAS_TRITON else Absent()

Grid = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch that was recorded instead of made. `options` are num_warps, num_stages and the like."""

    kernel: "Kernel"
    grid: Grid
    arguments: dict[str, Any]
    options: dict[str, Any]


_recorded: list[Launch] | None = None
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")
"""Launch keywords that are not parameters of the kernel."""


class Kernel:
    """An entry point: `kernel[grid](...)` as in Triton. `function` is Triton's own object."""

    def __init__(self, source: Callable[..., None], varying: tuple[str, ...]) -> None:
        self.name = source.__name__
        self.varying = varying
        self.function: Any = None
        if HAS_TRITON:
            self.function = triton.jit(source, do_not_specialize=list(varying))

    def __getitem__(self, grid: Grid) -> Callable[..., Any]:
        if _recorded is not None:
            return lambda *arguments, **keywords: self._record(grid, arguments, keywords)
        if self.function is None:
            raise RuntimeError(f"{self.name}: Triton is not installed; install the CUDA build of torch, or use the CPU")
        launch: Callable[..., Any] = self.function[grid]
        return launch

    def _record(self, grid: Grid, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        assert _recorded is not None
        options = {name: keywords.pop(name) for name in OPTIONS if name in keywords}
        named = dict(zip(self.function.arg_names, arguments, strict=False)) | keywords
        _recorded.append(Launch(self, grid, named, options))


def kernel(*varying: str) -> Callable[[Callable[..., None]], Kernel]:
    """Decorate an entry point. `varying` arguments change from step to step (numbers of tokens; slices of a step's
    integers, with any alignment). They are not specialised on, so that serving never compiles.
    """
    return lambda source: Kernel(source, varying)


def jit(source: Callable[..., Any]) -> Any:
    """Decorate a device function that kernels call."""
    return triton.jit(source) if HAS_TRITON else source


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Record launches within the block instead of making them."""
    global _recorded  # noqa: PLW0603 - the launch site is deep inside a launcher; one process records at a time
    assert _recorded is None, "recordings do not nest"
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


_num_compilations = 0


def num_compilations() -> int:
    """Return the number of kernels that Triton has compiled, or loaded from its cache, in this process since
    watch_compilations.
    """
    return _num_compilations


def watch_compilations() -> None:
    """Count every kernel that a launch finds uncompiled. Repeated calls count once."""
    if not HAS_TRITON:
        return
    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook
    if getattr(before, "counts_compilations", False):
        return

    def note(**details: Any) -> Any:
        global _num_compilations  # noqa: PLW0603  # one process has one Triton
        _num_compilations += 1
        return before(**details) if before is not None else None

    note.counts_compilations = True  # type: ignore[attr-defined]  # how the next caller knows it
    runtime.jit_post_compile_hook = note
