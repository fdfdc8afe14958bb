"""Counters by which programs of one launch learn who of them is the last: it finishes what all of them have begun."""

from functools import cache

import torch


@cache
def arrival_counters(device: torch.device, num_counters: int) -> torch.Tensor:
    """How many programs have left their part of something shared: 0 between launches, which come one after another.
    Kept as long as the process: captured graphs know where they are. So the first launch must not be captured."""
    return torch.zeros(num_counters, dtype=torch.int32, device=device)
