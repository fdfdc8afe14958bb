"""Attention of towers: rows lie in runs (a window, a time step, a tile), and every row of a run sees all of it. Neither
a cache nor a mask: runs of one length are computed together, as a batch.

By torch's kernels, which hold a tile of scores at a time. On CUDA its fallback, which would write out all of them (16
GiB for each head of the largest picture), is left out: where no kernel takes the heads, torch says so when the engine
starts.
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
