"""The specialisation equals that of Triton's own launcher."""

from typing import Any

import pytest
import torch
from kernel_benchmarks.aot.specialisation import DIVISIBLE, specialise
from trimtab_kernels.launch.gluon import tensor_descriptor
from trimtab_kernels.launch.jit import HAS_TRITON, kernel, record_launches, tl

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="requires Triton")
MEMORY = torch.empty(64, dtype=torch.bfloat16)


@kernel("varying")
def _example(specialised: tl.tensor, varying: tl.tensor) -> None:
    """Never launched."""


@pytest.mark.cpu
@pytest.mark.parametrize(
    "value",
    [
        MEMORY, MEMORY[3:], MEMORY[8:], torch.empty(1), torch.empty(1, dtype=torch.int32),
        torch.empty(1, dtype=torch.uint8), torch.empty(1, dtype=torch.float8_e4m3fn), None, True, 0.5, 0, 1, 16, 17,
        2**31, 2**31 + 16,
    ],
)  # fmt: skip
def test_types_constants_and_alignment_equal_launchers(value: Any) -> None:
    with record_launches() as launches:
        _example[(1,)](value, value)
    found = specialise(launches[0])
    for index, (name, is_specialised) in enumerate((("specialised", True), ("varying", False))):
        kind, attribute = of_the_launcher(value, is_specialised)
        assert found.signature[name] == kind
        assert (found.attributes.get((index,)) == DIVISIBLE) == (attribute == "D")


@pytest.mark.parametrize("box", [[1, 16, 64], [64, 64]])
def test_descriptor_type_contains_dtype_box_and_layout(box: list[int]) -> None:
    tensor = torch.empty([4, 64, 64] if len(box) == 3 else [256, 64], dtype=torch.bfloat16)
    descriptor = tensor_descriptor(tensor, list(tensor.shape), list(tensor.stride()), box)
    with record_launches() as launches:
        _example[(1,)](descriptor, descriptor)
    found = specialise(launches[0])
    kind, attribute = of_the_launcher(descriptor, is_specialised=True)
    assert [without_spaces(part) for part in found.signature.values()] == [without_spaces(kind)] * 2
    assert attribute is None
    assert not found.attributes


def without_spaces(text: str) -> str:
    """Remove spaces: Triton 3.6 and 3.9 format lists differently, and parse both."""
    return text.replace(" ", "")


def of_the_launcher(value: Any, is_specialised: bool) -> tuple[str, object]:
    """Return (type, "D" if divisible by 16, or the value of a constant)."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    kind, attribute = native_specialize_impl(CUDABackend, value, False, is_specialised, is_specialised)
    return str(kind), attribute
