"""lora: the adapters' additions to two GEMMs of a layer of Llama-3.1-8B: decodes of four adapters, a prompt of one."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from trimtab_kernels.lora import lora_reference, lora_triton

from kernel_benchmarks.row import Row, tolerance_of

SHAPES = ((6144, 4096, 48), (4096, 14336, 16))
"""(outputs, inputs, rank): q, k and v together, and down, with adapters of rank 16."""
NUM_SLOTS = 4


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    # The interpreter does not multiply bfloat16.
    dtype = torch.float32 if tiny else torch.bfloat16
    for n, k, rank in ((40, 64, 16),) if tiny else SHAPES:
        for num_rows, num_used in ((3, 2),) if tiny else ((16, 4), (256, 4), (4096, 1)):
            yield _row(num_rows, num_used, n, k, rank, dtype, device)


def _row(num_rows: int, num_used: int, n: int, k: int, rank: int, dtype: torch.dtype, device: torch.device) -> Row:
    x = torch.randn(num_rows, k, device=device).to(dtype)
    down = (torch.randn(NUM_SLOTS, rank, k, device=device) / k**0.5).to(dtype)
    up = (torch.randn(NUM_SLOTS, n, rank, device=device) / rank**0.5).to(dtype)
    slots = (torch.arange(num_rows, device=device) % num_used).to(torch.int32)
    y = torch.zeros(num_rows, n, device=device, dtype=dtype)
    few = min(num_rows, 16)
    factors = num_used * rank * (n + k) * dtype.itemsize
    through = num_rows * (k + 2 * n) * dtype.itemsize
    return Row(
        f"lora {n}x{k} rank {rank}, {num_rows} rows of {num_used} adapters",
        "read",
        factors + through,
        0.0,
        partial(lora_triton, y, x, down, up, slots),
        # y accumulates over calls: the comparison uses the first rows of one call.
        partial(lora_reference, torch.zeros_like(y[:few]), x[:few], down, up, slots[:few]),
        4 * tolerance_of(dtype),
        {"torch": partial(_by_torch, y, x, down, up, num_used)},
        read=_added_alone(y, x, down, up, slots, few),
    )


def _added_alone(
    y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, slots: torch.Tensor, few: int
) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        y.zero_()
        lora_triton(y, x, down, up, slots)
        return y[:few]

    return read


def _by_torch(y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, num_used: int) -> object:
    """Process the rows of one adapter after the other, as a host that knows them would launch them."""
    for slot in range(num_used):
        y[slot::num_used] += (x[slot::num_used] @ down[slot].t()) @ up[slot].t()
    return y
