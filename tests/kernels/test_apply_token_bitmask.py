"""apply_token_bitmask against its definition."""

import pytest
import torch
from trimtab_kernels.apply_token_bitmask import apply_token_bitmask, apply_token_bitmask_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 97, 4097])
def test_bitmask_matches_reference(vocabulary: int, dtype: torch.dtype) -> None:
    words = (vocabulary + 31) // 32
    bitmask = torch.randint(-(2**31), 2**31, (2, words), dtype=torch.int64).to(torch.int32)
    logits = torch.randn(4, vocabulary).to(dtype)
    expected = logits.clone()
    apply_token_bitmask(logits, bitmask, torch.tensor([3, 1]))
    apply_token_bitmask_reference(expected, bitmask, torch.tensor([3, 1]))
    torch.testing.assert_close(logits, expected)


def test_bitmask_disallows_tokens_beyond_its_width() -> None:
    logits = torch.zeros(1, 40)
    apply_token_bitmask(logits, torch.tensor([[-1]], dtype=torch.int32), torch.tensor([0]))
    assert torch.isfinite(logits[0]).tolist() == [True] * 32 + [False] * 8


def test_bitmask_leaves_other_rows_unchanged() -> None:
    logits = torch.zeros(2, 32)
    apply_token_bitmask(logits, torch.tensor([[1]], dtype=torch.int32), torch.tensor([1]))
    assert logits[0].tolist() == [0.0] * 32
    assert int(torch.isfinite(logits[1]).sum()) == 1


def test_bitmask_keeps_nan_row_for_any_mask() -> None:
    logits = torch.zeros(2, 70)
    logits[0] = float("nan")
    mask = torch.tensor([[0b10, 0, 0], [0b10, 0, 0]], dtype=torch.int32)
    apply_token_bitmask(logits, mask, torch.tensor([0, 1]))
    assert logits[0, 0].isnan()
    assert logits[1].tolist() == [float("-inf"), 0.0] + [float("-inf")] * 68


def test_bitmask_rejects_mismatched_shapes() -> None:
    with pytest.raises(ValueError, match="must be"):
        apply_token_bitmask(torch.zeros(2, 32), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1]))
