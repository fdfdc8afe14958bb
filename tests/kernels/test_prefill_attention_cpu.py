"""Attention by oneDNN's GEMMs against the plain form."""

import pytest
import torch
from trimtab_kernels.paged_attention import attend_reference
from trimtab_kernels.prefill_attention_cpu import (
    KEY_LENGTHS,
    MIN_ROWS,
    ROW_BLOCK,
    can_multiply,
    padded_length,
    prefill_attention_cpu,
)

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not torch._C._has_mkldnn, reason="torch was built without oneDNN"),
]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 16), (9, 3, 64), (3, 1, 10)])
@pytest.mark.parametrize(
    ("num_tokens", "length", "is_causal"),
    [(1, 1, True), (128, 128, True), (193, 193, True), (520, 520, True), (130, 7, False), (256, 384, False)],
)
def test_prefill_attention_cpu_equals_plain_form(
    num_tokens: int, length: int, is_causal: bool, heads: int, kv_heads: int, size: int
) -> None:
    group = heads // kv_heads
    query = torch.randn(num_tokens, heads, size)
    joint = torch.randn(length, 2 * kv_heads, size)  # keys and values are views of one GEMM's result
    key, value = joint[:, :kv_heads], joint[:, kv_heads:]
    output, lse = prefill_attention_cpu(query, key, value, scale=0.2, is_causal=is_causal, wants_lse=True)
    plain, _ = prefill_attention_cpu(query, key, value, scale=0.2, is_causal=is_causal, wants_lse=False)
    rows = query.view(num_tokens, kv_heads, group, size).permute(1, 2, 0, 3)
    shared = [t.transpose(0, 1).unsqueeze(1) for t in (key, value)]
    expected, expected_lse = attend_reference(rows, shared[0], shared[1], scale=0.2, is_causal=is_causal)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_padded_lengths_are_few_and_waste_at_most_a_third() -> None:
    assert len(KEY_LENGTHS) <= 10
    for length in range(ROW_BLOCK, KEY_LENGTHS[-1], ROW_BLOCK):
        assert length <= padded_length(length) <= 1.5 * length


def test_unsupported_shapes_use_flash_kernel() -> None:
    rows = torch.zeros(MIN_ROWS, 1, 4)
    assert can_multiply(rows, 4096)
    assert not can_multiply(rows, 4097)
    assert not can_multiply(rows[1:], 10)
    assert not can_multiply(rows.bfloat16(), 10)
