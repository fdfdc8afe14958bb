"""CPU decode attention, which reads the cache in place, against the one-sequence reference."""

import pytest
import torch
from trimtab_kernels.decode_attention_cpu import decode_attention_cpu, plan_reads
from trimtab_kernels.paged_attention import paged_attention_reference

pytestmark = pytest.mark.cpu

BLOCK_SIZE = 4


def a_cache(num_blocks: int, kv_heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_blocks)
    shape = (num_blocks, BLOCK_SIZE, kv_heads, size)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(1, 1, 7), (4, 4, 16), (9, 3, 64), (6, 1, 10)])
@pytest.mark.parametrize("length", [1, 4, 7, 12])
def test_decode_attention_single_sequence_of_any_length(heads: int, kv_heads: int, size: int, length: int) -> None:
    keys, values = a_cache(9, kv_heads, size)
    table = [7, 2, 5][: -(-length // BLOCK_SIZE)]
    query = torch.randn(1, heads, size)
    reads = plan_reads(torch.tensor([table]), length, None, heads, keys.shape)
    expected = paged_attention_reference(query, keys, values, table, length - 1, 0.3)
    for _ in range(2):  # a pattern serves every layer
        output = decode_attention_cpu(query, keys, values, reads, 0.3)
        torch.testing.assert_close(output, expected, rtol=2e-6, atol=2e-6)


def test_shorter_sequences_of_group_see_only_own_tokens() -> None:
    keys, values = a_cache(12, 2, 8)
    tables, lengths = [[11, 3], [4, 4]], [8, 3]
    mask = torch.zeros(2, 1, 8)
    mask[1, :, 3:] = float("-inf")
    query = torch.randn(2, 6, 8)
    reads = plan_reads(torch.tensor(tables), 8, mask, 6, keys.shape)
    output = decode_attention_cpu(query, keys, values, reads, 0.5)
    for i in range(2):
        expected = paged_attention_reference(query[i : i + 1], keys, values, tables[i], lengths[i] - 1, 0.5)
        torch.testing.assert_close(output[i : i + 1], expected, rtol=2e-6, atol=2e-6)


def test_plan_reads_rejects_length_beyond_cache_rows() -> None:
    with pytest.raises(ValueError, match="8 places per row"):
        plan_reads(torch.tensor([[0, 0]]), 8, None, 1, torch.Size((1, BLOCK_SIZE, 1, 8)))
