"""Asynchronous transfers between host and device: pinned memory, started copies, and completion marks.

These are the only places of a decode step that touch both sides. On the CPU copies are synchronous, and marks do
nothing.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

PART_BYTES = 16  # parts of a packed copy start on multiples of it, as kernels were compiled for


def pinned_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return host memory that a CUDA device can copy by itself; plain memory for the CPU."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def copy_to_device(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Start a copy from pinned memory. The source must not change until a later mark is reached."""
    destination.copy_(source, non_blocking=True)


def copy_to_host(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Begin to copy into pinned memory, which must not be read before a later mark is reached."""
    destination.copy_(source, non_blocking=True)


class Leading:
    """Cached view of the first rows of a fixed tensor; rebuilt only when the number of rows changes, which is rare."""

    __slots__ = ("_count", "_view", "_whole")

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = self._view = whole
        self._count = len(whole)

    def rows(self, count: int) -> torch.Tensor:
        """Return the first `count` of them."""
        if count != self._count:
            self._view, self._count = self._whole[:count], count
        return self._view


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start copying a few values of a step to the device, without waiting: torch keeps the pinned memory until it is
    read.
    """
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def send_together(values: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Start sending several vectors in one copy, each in its own dtype."""
    ends = list(accumulate(-(-value.nbytes // PART_BYTES) * PART_BYTES for value in values))
    places = [slice(end, end + value.nbytes) for end, value in zip([0, *ends], values, strict=False)]
    packed = torch.zeros(ends[-1], dtype=torch.uint8)
    for place, value in zip(places, values, strict=True):
        packed[place] = value.view(torch.uint8)
    sent = send(packed, device)
    return [sent[place].view(value.dtype) for place, value in zip(places, values, strict=True)]


def write(destination: torch.Tensor, values: torch.Tensor) -> None:
    """Begin to put plain values of the host where they are wanted on the device; torch keeps them until it is done."""
    copy_to_device(destination, values.pin_memory() if destination.is_cuda else values)


def receive(values: torch.Tensor) -> torch.Tensor:
    """Start copying values, which must not change, to the host. Read the result only after a later mark is reached."""
    if not values.is_cuda:
        return values
    received = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy_to_host(received, values)
    return received


class Mark:
    """A place in the device's queue of work. Void on the CPU."""

    def __init__(self, device: torch.device) -> None:
        event: Any = torch.cuda.Event
        self._event: Any = event() if device.type == "cuda" else None
        self._is_set = False

    def set(self) -> None:
        """Mark this point: after everything started so far."""
        self._is_set = True
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has reached the last mark. Return immediately if there is none."""
        if self._event is not None and self._is_set:
            self._event.synchronize()
