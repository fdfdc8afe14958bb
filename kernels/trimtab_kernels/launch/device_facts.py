"""Device properties that launch configurations depend on: generation, number of multiprocessors and shared memory.

A value type, so that the choice of a configuration is a pure function: tests and the ahead-of-time compiler use it for
devices that are not present.
"""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts of one device. capability: 10 * major + minor. shared_bytes: shared memory of one thread block, from
    NVIDIA's programming guide.
    """

    capability: int
    num_sms: int
    shared_bytes: int

    @property
    def has_float8(self) -> bool:
        """Return True for Ada and later, which convert and multiply float8_e4m3 in hardware. Ampere's compiler rejects
        the type.
        """
        return self.capability >= 89

    @property
    def has_hopper_shared_memory(self) -> bool:
        """Return True if the shared memory is at least Hopper's: tiles for three CTAs, otherwise only for two."""
        return self.shared_bytes > 200 << 10


HOPPER = 90
"""The capability that introduced warp-group matrix instructions (wgmma)."""
A100 = DeviceFacts(capability=80, num_sms=108, shared_bytes=163 << 10)
L40 = DeviceFacts(capability=89, num_sms=142, shared_bytes=99 << 10)
H200 = DeviceFacts(capability=90, num_sms=132, shared_bytes=227 << 10)
B200 = DeviceFacts(capability=100, num_sms=148, shared_bytes=227 << 10)
TARGETS = (A100, L40, H200, B200)
"""One device per generation that the kernels are compiled for."""


@cache
def device_facts(device: torch.device) -> DeviceFacts:
    """Return the facts of a CUDA device; for other devices (the interpreter runs on CPU tensors) those of an H200."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", H200.shared_bytes)
    return DeviceFacts(10 * properties.major + properties.minor, properties.multi_processor_count, shared)
