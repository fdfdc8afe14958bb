"""Weights packed for the compiled GEMMs, and those GEMMs.

weight  [out_features, in_features]  fp32, bf16 or fp16, rows contiguous, packed as fp32, or blocks of 4 to 8 bits
                                     (quantised.py); packed once, zeros after the last output
bias    [out_features] or None       fp32
x       [rows, in_features]          fp32, elements of a row contiguous, any row stride
y       [rows, out_features]         or, gated, silu(first half) * second half: [rows, out_features // 2]
Memory-bound for few rows (the weights are read once), compute-bound from about 24 rows on.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from trimtab_kernels.native.huge_pages import advise_huge_pages
from trimtab_kernels.native.library import MatrixView, NativeLibrary
from trimtab_kernels.native.quantised import FLOAT8, BlockFormat, MixedBlocks, QuantisedBlocks, scales_of

FLOAT_BYTES = 4
ALIGNMENT = 64  # a cache line
THREADED_BYTES = (
    4 << 20
)  # of one weight that is packed by several threads: starting them takes a tenth of a millisecond
FLOAT32 = 0  # `enum kind` of quantised.h; the others belong to the block formats
STORED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`enum stored` of pack.h, by dtype."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Consecutive rows as stored in a checkpoint; they are joined and widened to float32 while they are packed. Each
    part is [..., in_features] in float32, bfloat16 or float16, on the CPU.

    Raises:
        ValueError: a part does not match.
    """

    parts: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        size = self.parts[0].shape[-1]
        if any(part.dtype not in STORED or part.is_cuda or part.shape[-1] != size for part in self.parts):
            raise ValueError(
                f"rows to pack: {[f'{list(part.shape)} {part.dtype}' for part in self.parts]} do not match"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows of all parts, and of inputs."""
        return sum(part.shape[:-1].numel() for part in self.parts), self.parts[0].shape[-1]

    def unify_dtype(self) -> "StoredRows":
        """Return the rows in one dtype, each row contiguous; matching parts are not copied."""
        dtypes = {part.dtype for part in self.parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        return StoredRows(tuple(_with_contiguous_rows(part.to(dtype)) for part in self.parts))

    def addresses(self) -> torch.Tensor:
        """Return the address of each row: [rows] int64."""
        return torch.cat([_row_addresses(part) for part in self.parts])


def _row_addresses(part: torch.Tensor) -> torch.Tensor:
    at = torch.tensor([part.data_ptr()])
    for extent, stride in zip(part.shape[:-1], part.stride()[:-1], strict=True):
        at = (at.unsqueeze(1) + torch.arange(extent) * (stride * part.itemsize)).flatten()
    return at


def _with_contiguous_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A packed weight. `view` contains addresses of the other tensors."""

    library: NativeLibrary
    weight: torch.Tensor
    panels: torch.Tensor
    """[panels, 2] int64: the address of each panel, and its kind."""
    bias: torch.Tensor | None
    scales: torch.Tensor | None
    """[out] float32, or None: factors of the sums."""
    order: torch.Tensor | None
    """[in] int32, or None: index of x's column of each input."""
    view: MatrixView
    is_gated: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x by the weight.

        Raises:
            ValueError: x does not match.
        """
        self._check(x)
        return self._multiply(x, self.view, is_gated=self.is_gated)

    def multiply_without_gate(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by a gated matrix without the gate: x [rows, in_features] -> [rows, out_features], the gate's
        outputs and then up's.
        """
        self._check(x)
        half, width = self.view.out // 2, self.library.panel
        panels = -(-half // width)  # per half; they alternate, with zeros after the last outputs
        view = self.view
        whole = MatrixView(view.panels, None, None, view.order, 2 * panels * width, view.in_, view.is_quantised)
        turns = self._multiply(x, whole, is_gated=False).view(-1, panels, 2, width)
        y = turns.transpose(1, 2).reshape(-1, 2, panels * width)[:, :, :half].reshape(-1, view.out)
        y = y if self.scales is None else y.mul_(self.scales)
        return y if self.bias is None else y.add_(self.bias)

    def _multiply(self, x: torch.Tensor, view: MatrixView, *, is_gated: bool) -> torch.Tensor:
        y = x.new_empty(x.shape[0], view.out // 2 if is_gated else view.out)
        if x.shape[0]:
            address, threads = ctypes.addressof(view), self.library.num_threads
            scratch = torch.empty(self.library.functions.trimtab_gemm_scratch(address, threads))
            self.library.functions.trimtab_multiply(
                address, x.data_ptr(), x.stride(0), x.shape[0], y.data_ptr(), y.stride(0), is_gated, threads,
                scratch.data_ptr(),
            )  # fmt: skip
        return y

    def _check(self, x: torch.Tensor) -> None:
        size = x.shape[1]
        if x.dtype != torch.float32 or x.device.type != "cpu" or size != self.view.in_ or x.stride(1) != 1:
            raise ValueError(
                f"packed matrix: x is {list(x.shape)} {x.dtype} with strides {x.stride()}, "
                f"not [rows, {self.view.in_}] float32 with contiguous rows"
            )


def pack_matrix(
    library: NativeLibrary,
    weight: torch.Tensor | StoredRows,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
) -> PackedMatrix:
    """Pack one weight; gated: its halves are the gate's rows and up's.

    Raises:
        ValueError: the shapes do not match.
    """
    stored = StoredRows((weight,)) if isinstance(weight, torch.Tensor) else weight
    out, size = stored.shape
    parts = 2 if is_gated else 1
    if out % parts or (bias is not None and bias.shape != (out,)):
        raise ValueError(f"pack_matrix: weight is {[out, size]}, gated: {is_gated}, bias {bias}; they do not fit")
    stored = stored.unify_dtype()
    rows, kind = stored.addresses(), STORED[stored.parts[0].dtype]
    panels = -(-out // parts // library.panel)
    packed = _aligned(parts * panels * library.panel * size)
    panel_bytes = FLOAT_BYTES * library.panel * size

    def pack(part: int, first: int, last: int) -> None:
        """Pack the panels [first, last) of one part."""
        row, end = (min(panel * library.panel, out // parts) for panel in (first, last))
        library.functions.trimtab_pack(
            kind, rows.data_ptr() + rows.itemsize * (part * (out // parts) + row), end - row, size,
            packed.data_ptr() + panel_bytes * (first * parts + part), parts,
        )  # fmt: skip

    _pack_in_threads(pack, parts, panels, library.num_threads if packed.nbytes >= THREADED_BYTES else 1)
    table = [(packed.data_ptr() + place * panel_bytes, FLOAT32) for place in range(parts * panels)]
    return _matrix(library, packed, table, bias, None, None, (out, size), is_gated=is_gated)


def _pack_in_threads(pack: Callable[[int, int, int], None], parts: int, panels: int, num_threads: int) -> None:
    """Pack each part's panels in about equal pieces. Most of the time is spent on page faults."""
    bounds = [panels * thread // num_threads for thread in range(num_threads + 1)]
    pieces = [(part, first, last) for part in range(parts) for first, last in pairwise(bounds) if first < last]
    if num_threads == 1:
        for piece in pieces:
            pack(*piece)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(lambda piece: pack(*piece), pieces))


def pack_blocks(
    library: NativeLibrary,
    weight: QuantisedBlocks | MixedBlocks,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
) -> PackedMatrix:
    """Pack a weight in blocks; its numbers are reordered but not changed.

    Raises:
        ValueError: the shapes do not match, or a part's rows are not whole panels.
    """
    out, size = weight.shape
    if out % (2 if is_gated else 1) or (bias is not None and bias.shape != (out,)):
        raise ValueError(f"pack_blocks: weight is {[out, size]}, gated: {is_gated}, bias {bias}; they do not fit")
    turns = [_split_gate_and_up(weight)] if is_gated else [(part,) for part in weight.parts]
    if any(turn[0].shape[0] % library.panel for turn in turns[:-1]):
        raise ValueError(f"pack_blocks: rows of several forms are no whole panels of {library.panel}")
    packed = _aligned(-(-sum(_packed_bytes(library, turn) for turn in turns) // FLOAT_BYTES))
    table: list[tuple[int, int]] = []
    at = packed.data_ptr()
    for turn in turns:
        table += _pack_interleaved(library, turn, at)
        at += _packed_bytes(library, turn)
    return _matrix(
        library, packed, table, bias, _gemm_scales(weight.parts), weight.order, (out, size), is_gated=is_gated
    )


def _gemm_scales(parts: Sequence[QuantisedBlocks]) -> torch.Tensor | None:
    """Return the factors of the compiled GEMMs' sums."""
    scales, units = scales_of(parts), [part.form.unit for part in parts]
    if scales is None and all(unit == 1.0 for unit in units):
        return None
    counts = torch.tensor([part.shape[0] for part in parts])
    unit = torch.tensor(units).repeat_interleave(counts)
    return unit if scales is None else unit * scales


def _packed_bytes(library: NativeLibrary, parts: Sequence[QuantisedBlocks]) -> int:
    """Return the packed bytes of parts with the same number of rows."""
    rows, size = parts[0].shape
    return -(-rows // library.panel) * sum(_panel_bytes(library, part.form, size) for part in parts)


def _panel_bytes(library: NativeLibrary, form: BlockFormat, size: int) -> int:
    return int(library.functions.trimtab_panel_bytes(form.kind, size))


def _pack_interleaved(library: NativeLibrary, parts: Sequence[QuantisedBlocks], at: int) -> list[tuple[int, int]]:
    """Pack parts with the same number of rows, alternating their panels; return the panels' addresses and kinds."""
    rows, size = parts[0].shape
    sizes = [_panel_bytes(library, part.form, size) for part in parts]
    step, firsts = sum(sizes), [at + before for before in accumulate(sizes[:-1], initial=0)]
    for part, first in zip(parts, firsts, strict=True):
        data = part.data.contiguous()
        library.functions.trimtab_pack_blocks(
            part.form.kind, data.data_ptr(), part.form.block_bytes, rows, size, first, step
        )
    return [
        (first + panel * step, part.form.kind)
        for panel in range(-(-rows // library.panel))
        for part, first in zip(parts, firsts, strict=True)
    ]


def _split_gate_and_up(weight: QuantisedBlocks | MixedBlocks) -> tuple[QuantisedBlocks, QuantisedBlocks]:
    """Return the gate's rows and up's.

    Raises:
        ValueError: the format changes within a half.
    """
    half = weight.shape[0] // 2
    if isinstance(weight, QuantisedBlocks):
        return weight.select_rows(lambda rows: rows[:half]), weight.select_rows(lambda rows: rows[half:])
    if [part.shape[0] for part in weight.parts] != [half, half]:
        raise ValueError(
            f"pack_blocks: parts of {[part.shape[0] for part in weight.parts]} rows are not two equal halves"
        )
    return weight.parts[0], weight.parts[1]


def _matrix(
    library: NativeLibrary,
    packed: torch.Tensor,
    table: list[tuple[int, int]],
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    order: torch.Tensor | None,
    shape: tuple[int, int],
    *,
    is_gated: bool,
) -> PackedMatrix:
    """Build a PackedMatrix. `table`: the panels' addresses and kinds."""
    panels = torch.tensor(table, dtype=torch.int64)
    bias, scales = (None if each is None else each.float().contiguous() for each in (bias, scales))
    order = None if order is None else order.int().contiguous()
    is_quantised = any(kind not in (FLOAT32, FLOAT8.kind) for _, kind in table)
    if order is not None and not is_quantised:
        raise ValueError("pack_blocks: an input order requires integer formats only")
    pointers = (None if each is None else each.data_ptr() for each in (bias, scales, order))
    view = MatrixView(panels.data_ptr(), *pointers, *shape, is_quantised)
    return PackedMatrix(library, packed, panels, bias, scales, order, view, is_gated)


def _aligned(num_floats: int) -> torch.Tensor:
    """Return memory that starts on a cache line, so that no vector crosses two. Huge pages are requested for large
    memory: fewer page faults while weights are packed, fewer TLB misses while they are read.
    """
    room = torch.empty(num_floats + ALIGNMENT // FLOAT_BYTES)
    skipped = -room.data_ptr() % ALIGNMENT // FLOAT_BYTES
    advise_huge_pages(room)
    return room[skipped : skipped + num_floats]


def multiply_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_gated: bool = False
) -> torch.Tensor:
    """Return the result of a packed matrix in plain torch."""
    y = F.linear(x, weight, bias)
    if not is_gated:
        return y
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up
