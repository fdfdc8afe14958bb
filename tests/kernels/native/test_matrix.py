"""GEMMs with packed weights against torch, for every shape."""

import pytest
import torch
from trimtab_kernels.native import matrix
from trimtab_kernels.native.library import NativeLibrary
from trimtab_kernels.native.matrix import StoredRows, multiply_reference, pack_matrix

EPSILON = torch.finfo(torch.float32).eps


def close(actual: torch.Tensor, expected: torch.Tensor, terms: int) -> None:
    """Compare sums of `terms` multiplications of numbers around 1, in another order."""
    tolerance = 4 * EPSILON * max(4.0, terms)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 33, 240, 241, 500])
@pytest.mark.parametrize(("out", "size"), [(1, 1), (7, 3), (64, 48), (71, 577), (160, 64)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_multiply_equals_torch(library: NativeLibrary, rows: int, out: int, size: int, has_bias: bool) -> None:
    x, weight = torch.randn(rows, size), torch.randn(out, size)
    bias = torch.randn(out) if has_bias else None
    close(pack_matrix(library, weight, bias)(x), multiply_reference(x, weight, bias), size)


@pytest.mark.parametrize("rows", [1, 5, 241])
@pytest.mark.parametrize("half", [1, 33, 64])
@pytest.mark.parametrize("has_bias", [True, False])
def test_gated_multiply_is_silu_of_gate_times_up(library: NativeLibrary, rows: int, half: int, has_bias: bool) -> None:
    x, weight = torch.randn(rows, 40), torch.randn(2 * half, 40)
    bias = torch.randn(2 * half) if has_bias else None
    packed = pack_matrix(library, weight, bias, is_gated=True)
    close(packed(x), multiply_reference(x, weight, bias, is_gated=True), 40 * 16)


@pytest.mark.parametrize("rows", [0, 1, 5, 241])
@pytest.mark.parametrize("half", [1, 33, 64])
@pytest.mark.parametrize("has_bias", [True, False])
def test_multiply_without_gate_returns_both_halves(
    library: NativeLibrary, rows: int, half: int, has_bias: bool
) -> None:
    x, weight = torch.randn(rows, 40), torch.randn(2 * half, 40)
    bias = torch.randn(2 * half) if has_bias else None
    packed = pack_matrix(library, weight, bias, is_gated=True)
    close(packed.multiply_without_gate(x), multiply_reference(x, weight, bias), 40)


def test_extreme_gates_are_exact_or_zero(library: NativeLibrary) -> None:
    x = torch.tensor([[-1e4], [-100.0], [-30.0], [0.0], [30.0], [1e4]])
    packed = pack_matrix(library, torch.ones(2, 1), is_gated=True)
    torch.testing.assert_close(packed(x), multiply_reference(x, torch.ones(2, 1), is_gated=True), rtol=1e-6, atol=1e-29)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_computes_every_column(library: NativeLibrary, threads: int) -> None:
    x, weight = torch.randn(3, 20), torch.randn(200, 20)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        close(pack_matrix(library, weight)(x), multiply_reference(x, weight), 20)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("is_gated", [False, True])
def test_several_threads_pack_same_bytes_as_one(
    library: NativeLibrary, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(2 * 77, 50)
    one = pack_matrix(library, weight, is_gated=is_gated)
    monkeypatch.setattr(matrix, "THREADED_BYTES", 0)
    monkeypatch.setattr(NativeLibrary, "num_threads", 3)
    assert torch.equal(pack_matrix(library, weight, is_gated=is_gated).weight, one.weight)


def panels_of(library: NativeLibrary, weight: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Pack in plain torch: panels of the parts alternate, with zeros after the last output."""
    halves = [torch.nn.functional.pad(half, (0, 0, 0, -half.shape[0] % library.panel)) for half in weight.chunk(parts)]
    panels = [half.view(-1, library.panel, half.shape[1]).transpose(1, 2) for half in halves]
    return torch.stack(panels, dim=1).flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out", "size"), [(1, 1), (7, 3), (64, 48), (71, 577), (160, 64)])
def test_packed_panel_contains_every_number_of_each_dtype(
    library: NativeLibrary, dtype: torch.dtype, out: int, size: int
) -> None:
    weight = torch.randn(out, size).to(dtype)
    packed = pack_matrix(library, weight)
    assert torch.equal(packed.weight, panels_of(library, weight.float()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_16_bit_numbers_are_widened_as_in_torch(library: NativeLibrary, dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).view(256, 256)
    packed, expected = pack_matrix(library, every).weight, panels_of(library, every.float())
    is_number = ~expected.isnan()
    assert torch.equal(packed.view(torch.int32)[is_number], expected.view(torch.int32)[is_number])
    assert bool(packed[~is_number].isnan().all())


@pytest.mark.parametrize("is_gated", [False, True])
def test_rows_of_several_tensors_and_orders_are_packed(library: NativeLibrary, is_gated: bool) -> None:
    first, second = torch.randn(12, 50).bfloat16(), torch.randn(26, 100).bfloat16()[:, 50:]
    pairs = first.view(-1, 2, 3, 50).transpose(1, 2)
    packed = pack_matrix(library, StoredRows((pairs, second)), is_gated=is_gated)
    whole = torch.cat([pairs.reshape(12, 50), second]).float()
    assert torch.equal(packed.weight, panels_of(library, whole, 2 if is_gated else 1))


def test_mixed_dtypes_are_packed_and_mixed_widths_rejected(library: NativeLibrary) -> None:
    parts = torch.randn(5, 8).half(), torch.randn(9, 16)[:, ::2]
    packed = pack_matrix(library, StoredRows(parts))
    assert torch.equal(packed.weight, panels_of(library, torch.cat([part.float() for part in parts])))
    with pytest.raises(ValueError, match="rows to pack"):
        StoredRows((torch.randn(5, 8), torch.randn(5, 9)))


def test_row_stride_is_supported_and_column_stride_is_not(library: NativeLibrary) -> None:
    weight = torch.randn(9, 8)
    packed = pack_matrix(library, weight)
    wide = torch.randn(5, 20)
    close(packed(wide[:, 4:12]), multiply_reference(wide[:, 4:12], weight), 8)
    with pytest.raises(ValueError, match="contiguous rows"):
        packed(torch.randn(8, 5).t())


@pytest.mark.parametrize(("size", "dtype"), [(7, torch.float32), (8, torch.float64)])
def test_multiply_rejects_mismatched_x(library: NativeLibrary, size: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="packed matrix"):
        pack_matrix(library, torch.randn(9, 8))(torch.randn(2, size, dtype=dtype))


def test_pack_matrix_rejects_other_dtypes_and_odd_halves(library: NativeLibrary) -> None:
    with pytest.raises(ValueError, match="float64"):
        pack_matrix(library, torch.randn(4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="pack_matrix"):
        pack_matrix(library, torch.randn(3, 4), is_gated=True)


def test_multiply_without_rows_returns_no_rows(library: NativeLibrary) -> None:
    assert pack_matrix(library, torch.randn(4, 4))(torch.empty(0, 4)).shape == (0, 4)
