"""A fake CUDA device: fake tensors run operators without numbers, host waits raise, and tests record
kernel launches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_benchmarks.aot.specialisation import specialise
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from trimtab_engine.device import transfer
from trimtab_engine.device.transfer import Mark
from trimtab_engine.runner import item_encoder, model_runner
from trimtab_engine.runner.graphs import device_steps, step_buffers
from trimtab_engine.sampling import choice_columns, device_sampler, logprobs, pooling, sampler, token_table
from trimtab_kernels.launch.jit import Launch

CUDA = torch.device("cuda")
WAITS = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "item",
        "nonzero",
        "is_nonzero",
        "equal",
        "masked_select",
        "_unique2",
        "unique2",
    )
}


class Waited(AssertionError):
    """Something would have made the host wait for the device."""


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's, without annotations
    """Rejects device reads, and copies between host and device not started by transfer.py. With `is_start_up` copies
    are allowed. Implements operations that fake tensors without a device lack.
    """

    def __init__(self, *, is_start_up: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._is_start_up = is_start_up

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, keywords = func._schema.name, kwargs or {}
        if name in WAITS:
            if not args[0].is_cuda:
                return 1  # the host's own number, which a fake tensor does not have
            raise Waited(f"{name} waits for the device")
        if name in ("aten::copy_", "aten::zero_"):
            self._check(name, args[1] if name == "aten::copy_" else args[0], args[0].device)
            return args[0]
        if name == "aten::view" and isinstance(args[1], torch.dtype) and args[0].is_cuda:
            size = args[0].shape[-1] * args[0].itemsize // args[1].itemsize
            return args[0].new_empty((*args[0].shape[:-1], size), dtype=args[1])
        if name not in ("aten::to", "aten::_to_copy"):
            return func(*args, **keywords)
        asked = [*args[1:], *keywords.values()]
        target = next((value for value in asked if isinstance(value, torch.device)), args[0].device)
        dtype = next((value for value in asked if isinstance(value, torch.dtype)), args[0].dtype)
        self._check(name, args[0], target)
        return args[0].new_empty(args[0].shape, dtype=dtype, device=target)

    def _check(self, name: str, source: torch.Tensor, target: torch.device) -> None:
        if target.type != source.device.type and not self._is_start_up:
            raise Waited(f"{name} from {source.device} to {target}")


class FakeCuda(TorchFunctionMode):
    """Slices, fills and copies of fake tensors by operators: torch's own methods query the device first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__setitem__ and args[0].is_cuda:
            assert not isinstance(args[2], torch.Tensor) or args[2].is_cuda, "a value from the host"
            return None
        if func in (torch.Tensor.copy_, torch.Tensor.zero_) and args[0].is_cuda:
            assert all(tensor.is_cuda for tensor in args if isinstance(tensor, torch.Tensor)), "a copy from the host"
            return args[0]
        if func is torch.Tensor.contiguous and args[0].is_cuda:
            return args[0] if args[0].is_contiguous() else args[0].new_empty(args[0].shape)
        if func is not torch.Tensor.__getitem__ or not args[0].is_cuda:
            return func(*args, **(kwargs or {}))
        tensor, dimension = args[0], 0
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        for place, part in enumerate(parts):
            if part is Ellipsis:
                dimension = tensor.dim() - sum(later is not None for later in parts[place + 1 :])
                continue
            if part is None:
                tensor = tensor.unsqueeze(dimension)
            elif isinstance(part, int):
                tensor = torch.ops.aten.select(tensor, dimension, part)
                continue
            else:
                assert isinstance(part, slice), f"indexing by {type(part)} may wait for the device"
                tensor = torch.ops.aten.slice(tensor, dimension, part.start, part.stop, part.step or 1)
            dimension += 1
        return tensor


@contextmanager
def a_fake_device() -> Iterator[None]:
    """Provide CUDA tensors without CUDA. The three functions of transfer.py check their arguments."""

    def pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
        assert device.type == "cuda"
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def host(*arguments: Any) -> step_buffers._Host:
        with _disable_current_modes():  # numpy writes to it: a real tensor
            return real_host(*arguments)

    def passes(destination: torch.Tensor, source: torch.Tensor) -> None:
        assert destination.shape == source.shape
        assert {destination.device.type, source.device.type} == {"cpu", "cuda"}

    def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert values.device.type == "cpu"
        return torch.empty(values.shape, dtype=values.dtype, device=device)

    def receive(values: torch.Tensor) -> torch.Tensor:
        assert values.is_cuda
        return torch.empty(values.shape, dtype=values.dtype)

    facts = SimpleNamespace(major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=227 << 10)
    real_host = step_buffers._Host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_buffers, "_Host", host)
        for module in (step_buffers, device_steps):
            patch.setattr(module, "pinned_bytes", pinned)
        for module in (step_buffers, device_steps, model_runner, pooling):
            patch.setattr(module, "Mark", lambda device: Mark(torch.device("cpu")))
        patch.setattr(step_buffers, "copy_to_device", passes)
        patch.setattr(device_steps, "copy_to_host", passes)
        for module in (transfer, choice_columns, device_sampler, item_encoder, pooling, sampler):
            patch.setattr(module, "send", send)
        for module in (device_sampler, logprobs, pooling):
            patch.setattr(module, "receive", receive)
        patch.setattr(token_table, "write", passes)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode(), FakeCuda():
            yield


def variants(launches: list[Launch]) -> set[tuple[str, str, str]]:
    """Return the variants that Triton compiles separately: kernel, specialization, options."""
    return {(x.kernel.name, specialise(x).text, str(sorted(x.options.items()))) for x in launches}
