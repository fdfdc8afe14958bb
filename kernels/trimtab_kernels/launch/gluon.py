"""The one door to Gluon, Triton's language in which a kernel says itself which warps do what: kernels import `gl`,
`hopper` and the rest from here, never triton itself. As behind `jit.py`, a file imports where there is no Triton.

Gluon has no interpreter: `tests/kernels/fakes/gluon_stand_in.py` runs a kernel's source as plain Python. Names that
Triton 3.6 and 3.9 give differently have one name here.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from trimtab_kernels.launch.jit import HAS_TRITON, Absent, Kernel, triton

WARPS_OF_GROUP = 4
"""Warps that issue one warp-group product together."""


def _gluon(name: str) -> Any:
    return import_module(f"triton.experimental.gluon{name}") if HAS_TRITON else Absent()


gl: Any = _gluon(".language")
hopper: Any = _gluon(".language.nvidia.hopper")
mbarrier: Any = hopper.mbarrier
copy_box: Any = getattr(hopper.tma, "async_load", None) or getattr(hopper.tma, "async_copy_global_to_shared", None)
"""(box, corner, barrier, target): the tensor memory accelerator copies a box of a tensor into shared memory, zeros
where it lies outside, and tells the barrier how many bytes have come."""
meet: Any = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier", None)
"""A barrier of one partition's warps."""


def gluon_jit(source: Callable[..., Any]) -> Any:
    """Decorates a device function, which kernels call."""
    return _gluon("").jit(source) if HAS_TRITON else source


class GluonKernel(Kernel):
    """An entry point in Gluon. `consumer_groups`: warp groups that do the same products on rows of their own."""

    def __init__(self, source: Callable[..., None], varying: tuple[str, ...], consumer_groups: int) -> None:
        self.name = source.__name__
        self.varying = varying
        self.consumer_groups = consumer_groups
        self.function = _gluon("").jit(source, do_not_specialize=list(varying)) if HAS_TRITON else None


def gluon_kernel(*varying: str, consumer_groups: int) -> Callable[[Callable[..., None]], GluonKernel]:
    """As `kernel`, in Gluon."""
    return lambda source: GluonKernel(source, varying, consumer_groups)


def source_of(kernel: Kernel, signature: dict[str, str], constants: Any, attributes: Any) -> Any:
    """What Triton's compiler takes of a kernel in either language."""
    kind = _gluon("._runtime").GluonASTSource if isinstance(kernel, GluonKernel) else triton.compiler.ASTSource
    return kind(kernel.function, signature, constants, attributes)


def boxes_of(tensor: torch.Tensor, shape: list[int], strides: list[int], box: list[int]) -> Any:
    """A descriptor by which kernels copy boxes out of a tensor, rows of 128 bytes swizzled as matrix products read
    them. Its memory must begin at a multiple of 16 bytes, and so must each of its rows."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * tensor.itemsize, rank=len(box))
    return _gluon(".nvidia.hopper").TensorDescriptor(tensor, shape, strides, box, layout)
