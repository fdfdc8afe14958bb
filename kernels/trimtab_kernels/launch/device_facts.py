"""What a launch configuration depends on: the device's generation, its multiprocessors and their shared memory.

A value, so that the choice of a configuration is a pure function: tests and the ahead-of-time compiler ask it for
devices that are not there.
"""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """capability: 10 * major + minor. shared_bytes: what one thread block may use, from NVIDIA's programming guide."""

    capability: int
    num_sms: int
    shared_bytes: int

    @property
    def has_float8(self) -> bool:
        """Ada and later convert and multiply float8_e4m3 in hardware; Ampere's compiler refuses the type."""
        return self.capability >= 89

    @property
    def has_hoppers_memory(self) -> bool:
        """As much shared memory as Hopper and later have: tiles of three programs, less those of two."""
        return self.shared_bytes > 200 << 10


HOPPER = 90
"""The capability whose warp groups multiply together (wgmma)."""
A100 = DeviceFacts(capability=80, num_sms=108, shared_bytes=163 << 10)
L40 = DeviceFacts(capability=89, num_sms=142, shared_bytes=99 << 10)
H200 = DeviceFacts(capability=90, num_sms=132, shared_bytes=227 << 10)
B200 = DeviceFacts(capability=100, num_sms=148, shared_bytes=227 << 10)
TARGETS = (A100, L40, H200, B200)
"""One device per generation that kernels are compiled for."""


@cache
def device_facts(device: torch.device) -> DeviceFacts:
    """Of a CUDA device; elsewhere (the interpreter runs on CPU tensors) those of an H200."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", H200.shared_bytes)
    return DeviceFacts(10 * properties.major + properties.minor, properties.multi_processor_count, shared)
