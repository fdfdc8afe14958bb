"""Weights packed for the compiled products, and those products.

weight  [out_features, in_features]  fp32, bf16 or fp16, rows contiguous, packed as fp32, or blocks of 4 to 8 bits
                                     (quantised.py); packed once, zeros behind the last output
bias    [out_features] or None       fp32
x       [rows, in_features]          fp32, rows contiguous, any distance apart
y       [rows, out_features]         or, gated, silu(first half) * second half: [rows, out_features // 2]
Bound by memory for few rows (the weights are read once), by compute from about 24 rows on.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from trimtab_kernels.native.huge_pages import ask_for_huge_pages
from trimtab_kernels.native.library import MatrixView, NativeLibrary
from trimtab_kernels.native.quantised import FLOAT8, Form, MixedBlocks, QuantisedBlocks, scales_of

FLOAT_BYTES = 4
ALIGNMENT = 64  # of a cache line
THREADED_BYTES = (
    4 << 20
)  # of one weight that is packed by several threads: starting them takes a tenth of a millisecond
FLOAT32 = 0  # `enum kind` of quantised.h; the others are the forms' own
STORED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`enum stored` of pack.h, by dtype."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows one behind the other as a checkpoint has them: they are joined, and become float32, while they are packed.
    Each part is [..., in_features] in float32, bfloat16 or float16, on the CPU; ValueError is raised where it is not.
    """

    parts: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        size = self.parts[0].shape[-1]
        if any(part.dtype not in STORED or part.is_cuda or part.shape[-1] != size for part in self.parts):
            raise ValueError(f"rows to pack: {[f'{list(part.shape)} {part.dtype}' for part in self.parts]} do not fit")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of all parts, and inputs."""
        return sum(part.shape[:-1].numel() for part in self.parts), self.parts[0].shape[-1]

    def alike(self) -> "StoredRows":
        """The same in one dtype, each row contiguous; parts that are so are not copied."""
        dtypes = {part.dtype for part in self.parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        return StoredRows(tuple(_with_contiguous_rows(part.to(dtype)) for part in self.parts))

    def addresses(self) -> torch.Tensor:
        """Of each row: [rows] int64."""
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
    """`view` holds addresses of the tensors beside it."""

    library: NativeLibrary
    weight: torch.Tensor
    panels: torch.Tensor
    """[panels, 2] int64: the address of each, and its kind."""
    bias: torch.Tensor | None
    scales: torch.Tensor | None
    """[out] float32, or None: by which the sums are multiplied."""
    order: torch.Tensor | None
    """[in] int32, or None: which of x's columns each input is."""
    view: MatrixView
    is_gated: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Raises ValueError where x does not fit."""
        self._check(x)
        return self._multiply(x, self.view, is_gated=self.is_gated)

    def before_gate(self, x: torch.Tensor) -> torch.Tensor:
        """Of a gated matrix: x [rows, in_features] -> [rows, out_features], gate's outputs and then up's."""
        self._check(x)
        half, width = self.view.out // 2, self.library.panel
        panels = -(-half // width)  # of each; they take turns, and behind the last outputs there are zeros
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
            scratch = torch.empty(self.library.functions.trimtab_product_scratch(address, threads))
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
    """Pack one weight; gated: its halves, gate's rows and up's. Raises ValueError where it does not fit."""
    stored = StoredRows((weight,)) if isinstance(weight, torch.Tensor) else weight
    out, size = stored.shape
    parts = 2 if is_gated else 1
    if out % parts or (bias is not None and bias.shape != (out,)):
        raise ValueError(f"pack_matrix: weight is {[out, size]}, gated: {is_gated}, bias {bias}; they do not fit")
    stored = stored.alike()
    rows, kind = stored.addresses(), STORED[stored.parts[0].dtype]
    panels = -(-out // parts // library.panel)
    packed = _aligned(parts * panels * library.panel * size)
    panel_bytes = FLOAT_BYTES * library.panel * size

    def pack(part: int, first: int, last: int) -> None:
        """Panels of one part, from the first to before the last."""
        row, end = (min(panel * library.panel, out // parts) for panel in (first, last))
        library.functions.trimtab_pack(
            kind, rows.data_ptr() + rows.itemsize * (part * (out // parts) + row), end - row, size,
            packed.data_ptr() + panel_bytes * (first * parts + part), parts,
        )  # fmt: skip

    _in_threads(pack, parts, panels, library.num_threads if packed.nbytes >= THREADED_BYTES else 1)
    table = [(packed.data_ptr() + place * panel_bytes, FLOAT32) for place in range(parts * panels)]
    return _matrix(library, packed, table, bias, None, None, (out, size), is_gated=is_gated)


def _in_threads(pack: Callable[[int, int, int], None], parts: int, panels: int, num_threads: int) -> None:
    """Each part's panels in about equal pieces. Most of packing is waiting for pages that nobody has touched yet."""
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
    """The same of a weight in blocks, whose numbers stay as they are but for their order. Raises ValueError likewise,
    and where a part's rows are not whole panels."""
    out, size = weight.shape
    if out % (2 if is_gated else 1) or (bias is not None and bias.shape != (out,)):
        raise ValueError(f"pack_blocks: weight is {[out, size]}, gated: {is_gated}, bias {bias}; they do not fit")
    turns = [_halves(weight)] if is_gated else [(part,) for part in weight.parts]
    if any(turn[0].shape[0] % library.panel for turn in turns[:-1]):
        raise ValueError(f"pack_blocks: rows of several forms are no whole panels of {library.panel}")
    packed = _aligned(-(-sum(_packed_bytes(library, turn) for turn in turns) // FLOAT_BYTES))
    table: list[tuple[int, int]] = []
    at = packed.data_ptr()
    for turn in turns:
        table += _pack_in_turns(library, turn, at)
        at += _packed_bytes(library, turn)
    return _matrix(
        library, packed, table, bias, _product_scales(weight.parts), weight.order, (out, size), is_gated=is_gated
    )


def _product_scales(parts: Sequence[QuantisedBlocks]) -> torch.Tensor | None:
    """By what the compiled products' sums are multiplied."""
    scales, units = scales_of(parts), [part.form.unit for part in parts]
    if scales is None and all(unit == 1.0 for unit in units):
        return None
    counts = torch.tensor([part.shape[0] for part in parts])
    unit = torch.tensor(units).repeat_interleave(counts)
    return unit if scales is None else unit * scales


def _packed_bytes(library: NativeLibrary, parts: Sequence[QuantisedBlocks]) -> int:
    """Of parts with the same number of rows."""
    rows, size = parts[0].shape
    return -(-rows // library.panel) * sum(_panel_bytes(library, part.form, size) for part in parts)


def _panel_bytes(library: NativeLibrary, form: Form, size: int) -> int:
    return int(library.functions.trimtab_panel_bytes(form.kind, size))


def _pack_in_turns(library: NativeLibrary, parts: Sequence[QuantisedBlocks], at: int) -> list[tuple[int, int]]:
    """Panels of parts with the same number of rows, the first of each, the second of each, ...: addresses and kinds."""
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


def _halves(weight: QuantisedBlocks | MixedBlocks) -> tuple[QuantisedBlocks, QuantisedBlocks]:
    """Gate's rows and up's. Raises ValueError where a form changes elsewhere than between them."""
    half = weight.shape[0] // 2
    if isinstance(weight, QuantisedBlocks):
        return weight.of_rows(lambda rows: rows[:half]), weight.of_rows(lambda rows: rows[half:])
    if [part.shape[0] for part in weight.parts] != [half, half]:
        raise ValueError(f"pack_blocks: parts of {[part.shape[0] for part in weight.parts]} rows are no gate and up")
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
    """`table`: the panels' addresses and kinds."""
    panels = torch.tensor(table, dtype=torch.int64)
    bias, scales = (None if each is None else each.float().contiguous() for each in (bias, scales))
    order = None if order is None else order.int().contiguous()
    is_quantised = any(kind not in (FLOAT32, FLOAT8.kind) for _, kind in table)
    if order is not None and not is_quantised:
        raise ValueError("pack_blocks: inputs in an order of their own are only built for integers")
    pointers = (None if each is None else each.data_ptr() for each in (bias, scales, order))
    view = MatrixView(panels.data_ptr(), *pointers, *shape, is_quantised)
    return PackedMatrix(library, packed, panels, bias, scales, order, view, is_gated)


def _aligned(num_floats: int) -> torch.Tensor:
    """Memory that begins on a cache line, so that a vector never lies in two. Of what is large enough the system is
    asked for huge pages: fewer to ask for while weights are packed, fewer to look up while they are read."""
    room = torch.empty(num_floats + ALIGNMENT // FLOAT_BYTES)
    skipped = -room.data_ptr() % ALIGNMENT // FLOAT_BYTES
    ask_for_huge_pages(room)
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
