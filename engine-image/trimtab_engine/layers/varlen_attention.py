"""Attention of vision encoders: rows are in runs (a window, a time step, a tile), and every row attends to its whole
run. There is neither a cache nor a mask: runs of equal length are computed together as a batch.

It uses torch's fused kernels, which keep one tile of scores at a time. On CUDA the unfused fallback is disabled, since
it would allocate all scores (16 GiB per head of the largest image): if no kernel supports the head size, torch raises
an error when the engine starts.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Runs = Sequence[torch.Tensor]
"""[count, length] int64 each: the rows of runs of one length. Where there is but one, it has all rows, in order."""
WITHOUT_ALL_SCORES = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def attend_runs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: Runs) -> torch.Tensor:
    """query, key, value [num_rows, heads, head_size] -> like query, each row a sum over the values of its run."""
    if len(runs) == 1:
        shape = (*runs[0].shape, *query.shape[1:])
        return _attend(query.view(shape), key.view(shape), value.view(shape)).flatten(0, 1)
    attended = torch.empty_like(query)
    for rows in runs:
        index, shape = rows.flatten(), (*rows.shape, *query.shape[1:])
        of_query, of_key, of_value = (part.index_select(0, index).view(shape) for part in (query, key, value))
        attended.index_copy_(0, index, _attend(of_query, of_key, of_value).flatten(0, 1))
    return attended


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[count, length, heads, head_size] each."""
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if not query.is_cuda:
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    with sdpa_kernel(WITHOUT_ALL_SCORES):
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
