"""A step's batch for the Triton attention kernels equals the CPU's plan of the same step."""

from typing import Any

import pytest
import torch
from kernel_benchmarks.aot.specialisation import specialise
from trimtab_kernels.launch.jit import record_launches
from trimtab_kernels.paged_attention import build_attention_metadata, paged_attention
from trimtab_kernels.paged_batch import (
    PagedBatch,
    attend_paged_batch,
    attend_paged_batch_reference,
    build_paged_batch,
    warm_up_attention,
)

BLOCK_SIZE = 8


def slots_of(decodes: list[tuple[list[int], int]], chunks: list[tuple[list[int], int, int]]) -> list[int]:
    slots = [table[(length - 1) // BLOCK_SIZE] * BLOCK_SIZE + (length - 1) % BLOCK_SIZE for table, length in decodes]
    for table, before, now in chunks:
        slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(before, before + now)]
    return slots


def a_batch(
    decodes: list[tuple[list[int], int]],
    chunks: list[tuple[list[int], int, int]],
    device: torch.device,
    gone: list[int] | None = None,
) -> PagedBatch:
    """Build a batch whose integers are created on the host: the tests' device mode must not move them."""
    with torch._C.DisableTorchFunction():
        return build_paged_batch(decodes, chunks, block_size=BLOCK_SIZE, device=device, gone=gone)


@pytest.mark.parametrize("num_decodes", [0, 1, 3])
@pytest.mark.parametrize("num_chunks", [0, 2])
def test_paged_batch_equals_cpu_plan(num_decodes: int, num_chunks: int) -> None:
    decodes = [([4, 2, 9], 20), ([1, 7], 9), ([3], 1)][:num_decodes]
    chunks = [([5, 6, 8], 10, 12), ([10], 0, 5)][:num_chunks]
    if not decodes and not chunks:
        pytest.skip("an empty step is never run")
    slots = slots_of(decodes, chunks)
    keys, values = (torch.randn(11, BLOCK_SIZE, 2, 16) for _ in range(2))
    query = torch.randn(len(slots) + 2, 4, 16)
    metadata = build_attention_metadata(slots, decodes, chunks, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    fresh = (keys.cpu().flatten(0, 1)[slots], values.cpu().flatten(0, 1)[slots])
    expected = paged_attention(query.cpu(), *fresh, keys.cpu(), values.cpu(), metadata, 0.25).to(query.device)
    batch = a_batch(decodes, chunks, query.device)
    for attend in (attend_paged_batch, attend_paged_batch_reference):
        torch.testing.assert_close(attend(query, keys, values, batch, 0.25), expected, rtol=1e-5, atol=1e-5)
        place = torch.full_like(query, float("nan"))
        attend(query, keys, values, batch, 0.25, output=place)
        torch.testing.assert_close(place, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "gone"),
    [({"window": 9}, None), ({"window": 30}, None), ({"chunk_size": 9}, [16, 8, 0, 40, 0]), ({"chunk_size": 24}, None)],
    ids=str,
)
def test_windows_and_attention_chunks_equal_cpu_plan(options: dict[str, Any], gone: list[int] | None) -> None:
    """Tables start after `gone` tokens, but attention chunks are counted from the start of the sequence."""
    decodes = [([4, 2, 9], 20), ([1, 7], 9), ([3], 1)]
    chunks = [([5, 6, 8], 10, 12), ([10], 0, 5)]
    is_chunked = "chunk_size" in options
    slots = slots_of(decodes, chunks)
    keys, values = (torch.randn(11, BLOCK_SIZE, 2, 16) for _ in range(2))
    query, sinks = torch.randn(len(slots), 4, 16), torch.randn(4)
    metadata = build_attention_metadata(
        slots, decodes, chunks, block_size=BLOCK_SIZE, device=torch.device("cpu"), gone=gone or (), **options
    )
    fresh = (keys.cpu().flatten(0, 1)[slots], values.cpu().flatten(0, 1)[slots])
    expected = paged_attention(query.cpu(), *fresh, keys.cpu(), values.cpu(), metadata, 0.25, sinks=sinks.cpu())
    before = (gone or [0] * 5) if is_chunked else None
    batch = a_batch(decodes, chunks, query.device, gone=before)
    for attend in (attend_paged_batch, attend_paged_batch_reference):
        ours = attend(query, keys, values, batch, 0.25, sinks=sinks, **options)
        torch.testing.assert_close(ours, expected.to(query.device), rtol=1e-5, atol=1e-5)


def test_tables_are_as_wide_as_longest_context() -> None:
    batch = build_paged_batch([([4, 2, 9], 9)], [([5, 6, 8], 0, 3)], block_size=BLOCK_SIZE, device=torch.device("cpu"))
    assert batch.block_tables.tolist() == [[4, 2], [5, 0]]
    assert batch.seq_lens.tolist() == [9, 3]
    assert batch.query_starts.tolist() == [0, 3]
    assert (batch.num_tokens, batch.num_decodes, batch.max_query_len) == (4, 1, 3)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 40}, {"chunk_size": 40}, {"window": 40, "sinks": torch.empty(4, device="meta")}],
    ids=["", "window", "chunks", "sinks"],
)
def test_warm_up_compiles_every_variant_of_a_step(options: dict[str, Any]) -> None:
    cache = torch.empty(64, BLOCK_SIZE, 2, 16, device="meta")
    with record_launches() as launches:
        warm_up_attention(torch.empty(1, 4, 16, device="meta"), cache, cache, **options)
    warm = {(launch.kernel.name, specialise(launch).text) for launch in launches}
    for num_decodes in (0, 1, 3, 40, 700):
        for length in (1, 300, 5000, 100_000):
            for chunk in (0, 1, 3, 17, 500):
                blocks = list(range(1, length // BLOCK_SIZE + 2))
                decodes, chunks = [(blocks, length)] * num_decodes, [(list(range(1, 70)), 0, chunk)] * (chunk > 0)
                if (length > 300 and num_decodes > 3) or not decodes + chunks:
                    continue  # tables of millions of Python integers, and steps without work
                gone = [8] * len(decodes + chunks) if "chunk_size" in options else None
                batch = build_paged_batch(decodes, chunks, block_size=BLOCK_SIZE, device=torch.device("cpu"), gone=gone)
                with record_launches() as launches:
                    query = torch.empty(batch.num_tokens, 4, 16, device="meta")
                    attend_paged_batch(query, cache, cache, batch, 0.25, **options)
                assert {(launch.kernel.name, specialise(launch).text) for launch in launches} <= warm
