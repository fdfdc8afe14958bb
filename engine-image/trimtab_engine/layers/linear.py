"""y = x @ Wᵀ + b, with the weights in the layout that the device multiplies fastest.

CPU, float32, where the compiled operators are (trimtab_kernels.native): their panels, for any number of rows; of
weights that are stored with 4 to 8 bits the panels have these bits.

CPU otherwise: oneDNN's blocked layout, packed once. It is 2 to 4 times as fast as a plain matrix product for the few
rows of a decode step (docs/results/), and the packed copy replaces the plain one. Two consequences are handled here and
in the model runner: oneDNN compiles code for each number of rows (about 0.5 MiB each), so callers pad rows to the sizes
of `padded_rows`; and more than MAX_ROWS rows are multiplied in slices, which costs nothing because the weights stay in
the cache between slices.
"""

import torch
import torch.nn.functional as F
from trimtab_kernels.native.library import NativeLibrary, native_library
from trimtab_kernels.native.matrix import PackedMatrix, StoredRows, pack_blocks, pack_matrix
from trimtab_kernels.native.quantised import MixedBlocks, QuantisedBlocks
from trimtab_kernels.silu_and_mul import silu_and_mul
from trimtab_kernels.skinny_gemm import skinny_gemm_triton

from trimtab_engine.parallel.groups import RankGroup

Weight = torch.Tensor | StoredRows | QuantisedBlocks | MixedBlocks
MAX_ROWS = 256  # of one product: 128 make a prompt 3% slower, 512 make the MLP's intermediate leave the cache
CUDA_ROWS = 8192  # 110 MB at Qwen2.5-VL's width and 16 bits, and far more than fill a GPU
PACK_ROWS = 32  # the layout hint: the layout chosen for 32 rows is the fastest for 1 and for 256 rows as well
ROW_STEPS = (
    (8, 0),
    (64, 8),
    (128, 16),
    (256, 32),
)  # up to .0 rows are padded to a multiple of .1 (0: to a power of two)


def padded_rows(rows: int) -> int:
    """The number of rows to compute for `rows`: few distinct values, little padding."""
    whole, rest = divmod(rows, MAX_ROWS)
    if rest == 0:
        return rows
    for limit, step in ROW_STEPS:
        if rest <= limit:
            padded = -(-rest // step) * step if step else 1 << (rest - 1).bit_length()
            return whole * MAX_ROWS + padded
    raise AssertionError("ROW_STEPS ends at MAX_ROWS")


def rows_at_once(device: torch.device) -> int:
    """Rows of an MLP computed at once in a vision encoder: on the CPU so that its intermediate stays in the cache, on
    CUDA to limit memory.
    """
    return MAX_ROWS if device.type == "cpu" else CUDA_ROWS


def row_sizes() -> list[int]:
    """Every number of rows that one product can have."""
    return sorted({padded_rows(rows) for rows in range(1, MAX_ROWS + 1)})


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if oneDNN packs weights of this dtype here."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def library_for(dtype: torch.dtype, device: torch.device) -> NativeLibrary | None:
    """The compiled operators, where they are there and take weights like these."""
    if device.type != "cpu" or dtype != torch.float32:
        return None
    library = native_library()
    return library if isinstance(library, NativeLibrary) else None


def takes_stored_rows(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if a Linear that computes in this dtype joins and converts rows itself, while it packs them."""
    return library_for(dtype, device) is not None


def pads_rows(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if callers should pad the number of rows to a few sizes, because oneDNN compiles code for each."""
    return can_pack(dtype, device) and library_for(dtype, device) is None


class Linear:
    """weight [out_features, in_features], bias [out_features] or None, of the computing dtype, on the device; or
    stored rows or blocks, where library_for float32 on the CPU is there.
    """

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None, *, is_gated: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        self._is_gated = is_gated
        self.native: PackedMatrix | None = None
        """The weight packed for the compiled operators; then there is no other copy."""
        if not isinstance(weight, torch.Tensor):
            library = library_for(torch.float32, torch.device("cpu"))
            assert library is not None
            if isinstance(weight, StoredRows):
                self.native = pack_matrix(library, weight, bias, is_gated=is_gated)
            else:
                self.native = pack_blocks(library, weight, bias, is_gated=is_gated)
            return
        library = library_for(weight.dtype, weight.device)
        if library is not None:
            self.native = pack_matrix(library, weight, bias, is_gated=is_gated)
            return
        self._bias = bias
        self._packed = can_pack(weight.dtype, weight.device)
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        elif weight.device.type == "cpu":
            self._weight = weight.t().contiguous()
        else:
            self._weight = weight.contiguous()
        self._product = torch.ops.mkldnn._linear_pointwise.default if self._packed else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]."""
        return self._multiply(x) if self.native is None else self.native(x)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's partial result: x [rows, in_features] -> [rows, out_features]; finish() completes it."""
        return self._multiply(x) if self.native is None else self.native(x)

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """Apply the operations after the matmul: a gate, or the sum over ranks."""
        return y

    @property
    def joins_few_rows(self) -> bool:
        """Return True if `of_few_rows` is available: 16-bit matmuls on CUDA whose result is complete on this rank."""
        return self.native is None and self._weight.is_cuda and self._weight.dtype == torch.bfloat16

    def of_few_rows(
        self,
        x: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 1e-6,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Skinny variant for at most MAX_FEW_ROWS rows, one launch with the operations before and after the matmul: x
        is normalised first, or the result is added to the residual in place.
        """
        return skinny_gemm_triton(
            x, self._weight, norm=norm, eps=eps, bias=self._bias, is_gated=self._is_gated, residual=residual
        )

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self._product is not None:
            if x.shape[0] <= MAX_ROWS:
                y: torch.Tensor = self._product(x, self._weight, self._bias, "none", [], "")
                return y
            parts = torch.split(x, MAX_ROWS)
            return torch.cat([self._product(part, self._weight, self._bias, "none", [], "") for part in parts])
        if x.device.type == "cpu":
            y = torch.matmul(x, self._weight)
            return y if self._bias is None else y.add_(self._bias)
        return F.linear(x, self._weight, self._bias)


class GatedLinear(Linear):
    """Two projections as one, then silu of the first half times the second; returns half of out_features."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias, is_gated=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features / 2]."""
        return silu_and_mul(self._multiply(x)) if self.native is None else self.native(x)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return self._multiply(x) if self.native is None else self.native.multiply_without_gate(x)

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return silu_and_mul(y)


class RowParallelLinear(Linear):
    """Projection whose inputs are split among the ranks of a group: the ranks' results are summed.

    Only one rank has the bias, otherwise it would be added once per rank.
    """

    def __init__(self, weight: Weight, bias: torch.Tensor | None, group: RankGroup) -> None:
        super().__init__(weight, bias if group.index == 0 else None)
        self._group = group

    @property
    def joins_few_rows(self) -> bool:
        """False: the ranks' products are summed before anything is added to them."""
        return False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features / ranks] -> [rows, out_features], the same on every rank."""
        return self.finish(self.product(x))

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return self._group.all_reduce(y)
