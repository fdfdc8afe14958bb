"""Latent attention of a step by the kernels and by their reference equals the CPU's plan of the same step."""

from typing import Any

import pytest
import torch
from kernel_benchmarks.aot.specialisation import specialise
from trimtab_kernels.latent_attention import (
    attend_latent_batch,
    attend_latent_batch_reference,
    latent_attention,
    warm_up_latent_attention,
)
from trimtab_kernels.launch.jit import record_launches
from trimtab_kernels.paged_attention import build_attention_metadata
from trimtab_kernels.paged_batch import PagedBatch, build_paged_batch

BLOCK_SIZE, KV_RANK, WIDTH = 8, 24, 32
DECODES = [([4, 2, 9], 20), ([1, 7], 9), ([3], 1)]
CHUNKS = [([5, 6, 8], 10, 12), ([10], 0, 5)]
DRAFTS = [([5, 6, 8], 19, 3), ([10], 0, 3), ([11, 12], 9, 3)]


def a_batch(
    decodes: list[tuple[list[int], int]], chunks: list[tuple[list[int], int, int]], device: torch.device
) -> PagedBatch:
    """Build a batch whose integers are created on the host: the tests' device mode must not move them."""
    with torch._C.DisableTorchFunction():
        return build_paged_batch(decodes, chunks, block_size=BLOCK_SIZE, device=device)


DECODED = ["_latent_decode", "_latent_merge"]
"""Kernels for few sequences."""


@pytest.mark.parametrize(
    ("decodes", "chunks", "kernels"),
    [
        (DECODES, [], DECODED),
        ([], CHUNKS, ["_latent_prefill"]),
        (DECODES, CHUNKS, [*DECODED, "_latent_prefill"]),
        ([], DRAFTS, DECODED),
        (DECODES[:1], DRAFTS, [*DECODED, *DECODED]),
        (DECODES, DRAFTS[:1] + CHUNKS, [*DECODED, "_latent_prefill"]),
    ],
    ids=["decodes", "chunks", "mixed", "drafts", "drafts and a decode", "all"],
)
def test_latent_attention_equals_cpu_plan(
    decodes: list[tuple[list[int], int]], chunks: list[tuple[list[int], int, int]], kernels: list[str]
) -> None:
    slots = [table[(length - 1) // BLOCK_SIZE] * BLOCK_SIZE + (length - 1) % BLOCK_SIZE for table, length in decodes]
    for table, before, now in chunks:
        slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(before, before + now)]
    cache = torch.randn(13, BLOCK_SIZE, 1, WIDTH)
    query = torch.randn(len(slots) + 2, 6, WIDTH)
    metadata = build_attention_metadata(slots, decodes, chunks, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    fresh = cache.cpu().flatten(0, 1)[slots]
    expected = latent_attention(query.cpu(), fresh, cache.cpu(), metadata, 0.25, kv_rank=KV_RANK).to(query.device)
    batch = a_batch(decodes, chunks, query.device)
    for attend in (attend_latent_batch, attend_latent_batch_reference):
        ours = attend(query, cache, batch, 0.25, kv_rank=KV_RANK)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        place = torch.full_like(ours, float("nan"))
        attend(query, cache, batch, 0.25, kv_rank=KV_RANK, output=place)
        torch.testing.assert_close(place, expected, rtol=1e-5, atol=1e-5)
    with record_launches() as launches:
        attend_latent_batch(query, cache, batch, 0.25, kv_rank=KV_RANK)
    assert [launch.kernel.name for launch in launches] == kernels


@pytest.mark.parametrize("num_heads", [1, 4, 24, 128])
def test_warm_up_compiles_every_variant_of_a_step(num_heads: int) -> None:
    like: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    cache = torch.empty(64, BLOCK_SIZE, 1, 576, **like)
    with record_launches() as launches:
        warm_up_latent_attention(torch.empty(1, num_heads, 576, **like), cache, kv_rank=512)
    warm = {(launch.kernel.name, specialise(launch).text) for launch in launches}
    for num_decodes in (0, 1, 3, 40):
        for num_chunks in (0, 1, 2):
            for chunk in (1, 2, 3, 8, 9, 17, 500):
                for last in (chunk, chunk + 1):
                    decodes = [(list(range(40)), 300)] * num_decodes
                    chunks = [(list(range(70)), 5, chunk)] * (num_chunks - 1) + [(list(range(70)), 0, last)]
                    batch = build_paged_batch(
                        decodes, chunks if num_chunks else [], block_size=BLOCK_SIZE, device=torch.device("cpu")
                    )
                    query = torch.empty(batch.num_tokens, num_heads, 576, **like)
                    with record_launches() as launches:
                        attend_latent_batch(query, cache, batch, 0.25, kv_rank=512)
                    assert {(launch.kernel.name, specialise(launch).text) for launch in launches} <= warm
