"""Weights packed for the compiled products, and those products.

weight  [out_features, in_features]  fp32, rows contiguous, or blocks of 4 or 8 bits (quantised.py); packed once, zeros
                                     behind the last output
bias    [out_features] or None       fp32
x       [rows, in_features]          fp32, rows contiguous, any distance apart
y       [rows, out_features]         or, gated, silu(first half) * second half: [rows, out_features // 2]
Bound by memory for few rows (the weights are read once), by compute from about 24 rows on.
"""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trimtab_kernels.native.library import MatrixView, NativeLibrary
from trimtab_kernels.native.quantised import QuantisedBlocks

FLOAT_BYTES = 4
ALIGNMENT = 64  # of a cache line
FLOAT32 = 0  # `enum kind` of quantised.h; the others are the forms' own


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """`view` holds addresses of the tensors beside it."""

    library: NativeLibrary
    weight: torch.Tensor
    bias: torch.Tensor | None
    view: MatrixView
    is_gated: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Raises ValueError where x does not fit."""
        rows, size = x.shape
        if x.dtype != torch.float32 or x.device.type != "cpu" or size != self.view.in_ or x.stride(1) != 1:
            raise ValueError(
                f"packed matrix: x is {list(x.shape)} {x.dtype} with strides {x.stride()}, "
                f"not [rows, {self.view.in_}] float32 with contiguous rows"
            )
        y = x.new_empty(rows, self.view.out // 2 if self.is_gated else self.view.out)
        if rows:
            view, threads = ctypes.addressof(self.view), self.library.num_threads
            scratch = torch.empty(self.library.functions.trimtab_product_scratch(view, threads))
            self.library.functions.trimtab_multiply(
                view, x.data_ptr(), x.stride(0), rows, y.data_ptr(), y.stride(0), self.is_gated, threads,
                scratch.data_ptr(),
            )  # fmt: skip
        return y


def pack_matrix(
    library: NativeLibrary, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_gated: bool = False
) -> PackedMatrix:
    """Pack one weight; gated: its halves, gate's rows and up's. Raises ValueError where it does not fit."""
    out, size = weight.shape
    parts = 2 if is_gated else 1
    if weight.dtype != torch.float32 or out % parts or (bias is not None and bias.shape != (out,)):
        raise ValueError(f"pack_matrix: weight is {list(weight.shape)} {weight.dtype}, bias {bias}; float32 is needed")
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    panels = -(-out // parts // library.panel)
    packed = _aligned(parts * panels * library.panel * size)
    for part in range(parts):
        rows = weight[part * (out // parts) :]
        library.functions.trimtab_pack(
            rows.data_ptr(), weight.stride(0), out // parts, size,
            packed.data_ptr() + FLOAT_BYTES * part * library.panel * size, parts,
        )  # fmt: skip
    bias = None if bias is None else bias.float().contiguous()
    view = MatrixView(packed.data_ptr(), None if bias is None else bias.data_ptr(), out, size, FLOAT32)
    return PackedMatrix(library, packed, bias, view, is_gated)


def pack_blocks(
    library: NativeLibrary, weight: QuantisedBlocks, bias: torch.Tensor | None = None, *, is_gated: bool = False
) -> PackedMatrix:
    """The same of a weight in blocks, which stay as they are but for their order. Raises ValueError likewise."""
    out, size = weight.shape
    parts, kind = 2 if is_gated else 1, weight.form.kind
    if out % parts or (bias is not None and bias.shape != (out,)):
        raise ValueError(f"pack_blocks: weight is {[out, size]} in {parts} parts, bias {bias}; they do not fit")
    panel_bytes = library.functions.trimtab_panel_bytes(kind, size)
    panels = -(-out // parts // library.panel)
    packed = _aligned(parts * panels * panel_bytes // FLOAT_BYTES)
    data = weight.data.contiguous()
    for part in range(parts):
        library.functions.trimtab_pack_blocks(
            kind, data.data_ptr() + part * (out // parts) * data.stride(0), weight.form.block_bytes, out // parts,
            size, packed.data_ptr() + part * panel_bytes, parts,
        )  # fmt: skip
    bias = None if bias is None else bias.float().contiguous()
    view = MatrixView(packed.data_ptr(), None if bias is None else bias.data_ptr(), out, size, kind)
    return PackedMatrix(library, packed, bias, view, is_gated)


def _aligned(num_floats: int) -> torch.Tensor:
    """Memory that begins on a cache line, so that a vector never lies in two."""
    room = torch.empty(num_floats + ALIGNMENT // FLOAT_BYTES)
    skipped = -room.data_ptr() % ALIGNMENT // FLOAT_BYTES
    return room[skipped : skipped + num_floats]


def multiply_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_gated: bool = False
) -> torch.Tensor:
    """What a packed matrix computes, in plain torch."""
    y = F.linear(x, weight, bias)
    if not is_gated:
        return y
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up
