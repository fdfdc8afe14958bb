"""The only module that imports Gluon, Triton's language for kernels with explicit warp specialisation. Kernels import
`gl`, `hopper` and the rest from here. As with `jit.py`, kernel modules can be imported without Triton.

Gluon has no interpreter: `tests/kernels/fakes/gluon_stand_in.py` runs a kernel's source as plain Python. Names that
differ between Triton 3.6 and 3.9 have one name here.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from trimtab_kernels.launch.jit import HAS_TRITON, Absent, Kernel, triton

WARPS_OF_GROUP = 4
"""Warps that issue one warp-group instruction together."""


def _gluon(name: str) -> Any:
    return import_module(f"triton.experimental.gluon{name}") if HAS_TRITON else Absent()


gl: Any = _gluon(".language")
hopper: Any = _gluon(".language.nvidia.hopper")
mbarrier: Any = hopper.mbarrier
copy_from_descriptor: Any = getattr(hopper.tma, "async_load", None) or getattr(
    hopper.tma, "async_copy_global_to_shared", None
)
"""(descriptor, corner, barrier, target): the tensor memory accelerator copies a box of a tensor into shared memory,
zeros outside the tensor, and reports the copied bytes to the barrier."""
partition_barrier: Any = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier", None)
"""A barrier over the warps of one partition."""


def gluon_jit(source: Callable[..., Any]) -> Any:
    """Decorate a device function that kernels call."""
    return _gluon("").jit(source) if HAS_TRITON else source


class GluonKernel(Kernel):
    """An entry point in Gluon. `consumer_groups`: warp groups that compute the same GEMM for different rows."""

    def __init__(self, source: Callable[..., None], varying: tuple[str, ...], consumer_groups: int) -> None:
        self.name = source.__name__
        self.varying = varying
        self.consumer_groups = consumer_groups
        self.function = _gluon("").jit(source, do_not_specialize=list(varying)) if HAS_TRITON else None


def gluon_kernel(*varying: str, consumer_groups: int) -> Callable[[Callable[..., None]], GluonKernel]:
    """Decorate an entry point in Gluon, as `kernel` does for Triton."""
    return lambda source: GluonKernel(source, varying, consumer_groups)


def source_of(kernel: Kernel, signature: dict[str, str], constants: Any, attributes: Any) -> Any:
    """Return the compiler input of a kernel in either language."""
    kind = _gluon("._runtime").GluonASTSource if isinstance(kernel, GluonKernel) else triton.compiler.ASTSource
    return kind(kernel.function, signature, constants, attributes)


def tensor_descriptor(tensor: torch.Tensor, shape: list[int], strides: list[int], box: list[int]) -> Any:
    """Return a tensor descriptor for copies of boxes, with rows of 128 bytes swizzled for matrix instructions. The
    memory and each row must start at a multiple of 16 bytes.
    """
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * tensor.itemsize, rank=len(box))
    return _gluon(".nvidia.hopper").TensorDescriptor(tensor, shape, strides, box, layout)
