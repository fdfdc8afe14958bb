"""Other kernels for attention over a paged cache, for the benchmark of `paged_decode`.

Each gets its preferred layout: FlexAttention pages of 128 tokens, FlashInfer the same pages as our kernel.
"""

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

FLEX_PAGE = 128
"""Tokens: FlexAttention's default tile, the smallest unit that it can skip."""
FLASHINFER_WORKSPACE_BYTES = 128 << 20
"""The size that its documentation recommends."""

Call = Callable[[], torch.Tensor]


def flex_paged(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, compiled: bool = True
) -> Call:
    """FlexAttention, one query per sequence, over pages in random order.

    query [sequences, heads, size]; keys and values [sequences, length, KV heads, size], length a multiple of 128. The
    pages are created here, outside of the timed call; all of them are full, so that the compiled code computes no mask.
    """
    num_seqs, length = keys.shape[:2]
    if length % FLEX_PAGE:
        raise ValueError(f"{length} tokens are no whole pages of {FLEX_PAGE}")
    per_sequence = length // FLEX_PAGE
    order = torch.randperm(num_seqs * per_sequence, device=query.device)
    key_pages, value_pages = _paged(keys, order), _paged(values, order)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=query.device)
    owner = order // per_sequence
    table = place.view(num_seqs, 1, 1, per_sequence).to(torch.int32)
    full = torch.full((num_seqs, 1, 1), per_sequence, dtype=torch.int32, device=query.device)
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(full),
        torch.zeros(num_seqs, 1, 1, num_seqs * per_sequence, dtype=torch.int32, device=query.device),
        full,
        torch.nn.functional.pad(table, (0, num_seqs * per_sequence - per_sequence)),
        BLOCK_SIZE=FLEX_PAGE,
        mask_mod=lambda sequence, head, row, token: owner[token // FLEX_PAGE] == sequence,
        seq_lengths=(1, num_seqs * length),
    )
    attend = torch.compile(flex_attention) if compiled else flex_attention

    def call() -> torch.Tensor:
        found = attend(query.unsqueeze(2), key_pages, value_pages, block_mask=mask, scale=scale, enable_gqa=True)
        assert isinstance(found, torch.Tensor)
        return found.squeeze(2)

    return call


def _paged(cache: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return [1, KV heads, tokens, size]: page i has the contents of page order[i] in sequence order."""
    num_seqs, length, kv_heads, size = cache.shape
    pages = cache.reshape(-1, FLEX_PAGE, kv_heads, size)[order]
    return pages.reshape(1, num_seqs * length, kv_heads, size).transpose(1, 2).contiguous()


def flashinfer_paged(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, *, length: int, scale: float
) -> Call:
    """FlashInfer's decode over our blocks; planned here, outside of the timed call.

    keys and values [blocks, block size, KV heads, size]; tables [sequences, blocks of a sequence] int32.

    Raises:
        ImportError: FlashInfer is not installed.
    """
    import flashinfer

    num_seqs, per_sequence = tables.shape
    block = keys.shape[1]
    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=query.device) * per_sequence
    last = torch.full((num_seqs,), (length - 1) % block + 1, dtype=torch.int32, device=query.device)
    wrapper.plan(
        starts,
        tables.reshape(-1),
        last,
        query.shape[1],
        keys.shape[2],
        query.shape[2],
        block,
        q_data_type=query.dtype,
        kv_data_type=keys.dtype,
        sm_scale=scale,
    )
    return lambda: wrapper.run(query, (keys, values))


def on_first_call(make: Callable[[], Call]) -> Call:
    """Return a call that is prepared at first use: rows that are not measured cost nothing, and a missing peer is
    reported.
    """
    made: list[Call] = []

    def call() -> torch.Tensor:
        if not made:
            made.append(make())
        return made[0]()

    return call
