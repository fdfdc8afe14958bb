"""Fixtures that make unwritten output visible: torch fills uninitialised tensors with NaN here.

Triton's interpreter must evaluate the bounds of loops: before 3.9 it passes numpy arrays of one element to int(), which
numpy rejects from 2.4 on (and warned about before). Triton 3.9 extracts the element first; the fixture does the same
for older versions.

The same tests run on a GPU (`make test-gpu`, TRITON_INTERPRET=0): tensors of a test are then created on the CPU, so
that they have the same values, and moved. Tests for the CPU only are marked `cpu`. Parameters are created at import and
would stay on the CPU: a tensor among them is rejected on CPUs too, where the error would not show otherwise.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from trimtab_kernels.launch.jit import HAS_TRITON, triton

ON_GPU = os.environ["TRITON_INTERPRET"] == "0"
CONSTRUCTORS = (
    torch.arange, torch.empty, torch.full, torch.linspace, torch.ones, torch.rand, torch.randint, torch.randn,
    torch.randperm, torch.tensor, torch.zeros,
)  # fmt: skip


def let_scalars_be_indices(interpreter: Any) -> None:
    """Patch an older interpreter module as Triton 3.9 changes its language within a kernel."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if HAS_TRITON and not ON_GPU and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
    let_scalars_be_indices(import_module("triton.runtime.interpreter"))  # some versions import it on first use


class MadeOn(TorchFunctionMode):
    """Moves tensors created without a device to this one."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        moves = function in CONSTRUCTORS and (kwargs or {}).get("device") is None
        return made.to(self._device) if moves else made


def has_tensor_of_the_cpu(value: Any) -> bool:
    """Return True for a CPU tensor, or a container with one."""
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu"
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(has_tensor_of_the_cpu, values))


@pytest.fixture(autouse=True)
def made_in_the_test(request: pytest.FixtureRequest) -> None:
    call = getattr(request.node, "callspec", None)
    if call and not request.node.get_closest_marker("cpu") and has_tensor_of_the_cpu(call.params):
        pytest.fail("a parameter has a tensor, which stays on the CPU on a GPU too: make it in the test")


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def on_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Create the test's tensors on the device that runs the kernels."""
    if not ON_GPU or request.node.get_closest_marker("cpu"):
        yield
        return
    if not torch.cuda.is_available():
        pytest.fail("TRITON_INTERPRET=0 requires a GPU, but torch finds none")
    request.getfixturevalue("report_device_errors")
    with MadeOn("cuda"):
        yield
