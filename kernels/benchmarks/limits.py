"""What the device can do, measured in the same run: bytes/s of a copy, FLOP/s of large matrix products."""

from collections.abc import Callable

import torch

from benchmarks.timing import seconds_of

COPY_BYTES = 1 << 31
SIDE = 8192
"""Of the square products. Random values: zeros draw less power and run faster."""


def copy_bandwidth(device: torch.device) -> float:
    """Read and written bytes per second."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds_of(lambda: destination.copy_(source), device)


def bf16_rate(device: torch.device) -> float:
    """FLOP/s of a bf16 product."""
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    return float(2 * SIDE**3 / seconds_of(lambda: torch.mm(a, b), device))


def fp8_rate(device: torch.device) -> float:
    """FLOP/s of a float8 product with one scale. Raises RuntimeError where the GPU has none."""
    a, b = (torch.randn(SIDE, SIDE, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    call = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)  # noqa: E731
    return float(2 * SIDE**3 / seconds_of(call, device))


LIMITS: dict[str, Callable[[torch.device], float]] = {"copy": copy_bandwidth, "bf16": bf16_rate, "fp8": fp8_rate}
