"""Arrival counters, by which the CTAs of one launch determine the last one, which finishes their common result."""

from functools import cache

import torch


@cache
def arrival_counters(device: torch.device, num_counters: int) -> torch.Tensor:
    """Return counters of the CTAs that have stored their part of a shared result. They are 0 between launches, which
    run one after another. They live as long as the process, because captured graphs contain their addresses; the first
    launch must therefore not be captured.
    """
    return torch.zeros(num_counters, dtype=torch.int32, device=device)
