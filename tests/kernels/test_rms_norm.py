"""rms_norm against its reference: odd sizes, every dtype, strides."""

import pytest
import torch
from trimtab_kernels.rms_norm import rms_norm, rms_norm_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (7, 576), (3, 4097)])
def test_it_matches_the_reference(rows: int, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), rtol=tolerance, atol=1e-6
    )


def test_rows_may_lie_apart() -> None:
    wide = torch.randn(5, 96)
    weight = torch.randn(48)
    torch.testing.assert_close(rms_norm(wide[:, :48], weight), rms_norm(wide[:, :48].contiguous(), weight))


def test_a_weight_of_another_size_or_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm(torch.ones(2, 8), torch.ones(7))
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm(torch.ones(2, 8), torch.ones(8, dtype=torch.bfloat16))
