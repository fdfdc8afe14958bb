"""Reads one rank's part of a checkpoint into the computing dtype and onto the device, and reports what was loaded."""

import re
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from trimtab_kernels.native.matrix import StoredRows
from trimtab_kernels.native.quantised import MixedBlocks, QuantisedBlocks
from trimtab_kernels.native.quantised import joined as joined_rows
from trimtab_kernels.reshape_and_cache import FLOAT8
from trimtab_kernels.rotary_embedding import interleave_pairs
from trimtab_modelspec.quantization import BLOCK, SCALE_SUFFIX, Quantization, check_aligned

from trimtab_engine.errors import ModelError, NotSupportedError
from trimtab_engine.layers.adapted import AdaptedPart, AdapterRows, Adapting
from trimtab_engine.layers.linear import GatedLinear, Linear, RowParallelLinear, library_for, takes_stored_rows
from trimtab_engine.layers.quantized import (
    BlockFp8,
    BlockFp8Linear,
    GatedBlockFp8Linear,
    Projection,
    joined_blocks,
    multiplies_float8,
)
from trimtab_engine.layers.vocabulary import Table
from trimtab_engine.parallel.groups import RankGroup
from trimtab_engine.weights.four_bits import FourBitsSource
from trimtab_engine.weights.gguf_file import GgufSource
from trimtab_engine.weights.mxfp4 import Mxfp4Source
from trimtab_engine.weights.scaled import ScaledSource
from trimtab_engine.weights.source import Span, WeightSource

Progress = Callable[[int], None]
"""Called with numbers of elements."""
Weight = torch.Tensor | BlockFp8 | QuantisedBlocks
"""A weight as stored, or in the computing dtype."""
Joined = torch.Tensor | StoredRows | list[BlockFp8] | QuantisedBlocks | MixedBlocks
"""Rows that are multiplied together."""
NUMBER = re.compile(r"(?<=\blayers\.)\d+|(?<=\bexperts\.)\d+")
EXPERT = ".experts."
"""Name part of the projections of MoE experts."""


PackedSource = GgufSource | FourBitsSource | ScaledSource | Mxfp4Source
"""Weights that may be multiplied as stored."""


def packed_source(
    source: WeightSource, dtype: torch.dtype, device: torch.device, quantization: Quantization | None
) -> PackedSource | None:
    """Weights of 4 to 8 bits that are multiplied as stored, if possible: by the CPU's compiled matmuls, unless another
    backend was requested.
    """
    if not isinstance(source, PackedSource) or quantization is not None or library_for(dtype, device) is None:
        return None
    return source if isinstance(source, GgufSource) or source.is_in_blocks else None


class Loader:
    """Tensors by name, whole or in part; linear layers of several projections."""

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        quantization: Quantization | None = None,
        adapting: Adapting | None = None,
    ) -> None:
        """`adapting` builds the projections that can have adapters; None if there are none."""
        self._adapting = adapting
        self.adapter_rows = AdapterRows() if adapting is None else adapting.rows
        """Rows of a step with adapters; code that computes rows in parts announces its part there."""
        self._source, self.dtype, self.device, self._progress = source, dtype, device, progress
        self._quantization = quantization
        self._multiplies_float8 = quantization is not None and multiplies_float8(device)
        self._packed = packed_source(source, dtype, device, quantization)
        self._packs_rows = takes_stored_rows(dtype, device)
        self._restored_types: dict[str, str] = {}
        self._scratch = torch.empty(0, dtype=dtype)

    def __call__(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> torch.Tensor:
        """One tensor or a part of it; it may be a view of the file."""
        tensor = self._source.tensor(name, rows=rows, columns=columns)
        self._check_dtype(name, tensor)
        self._progress(tensor.numel())
        self._remember_restored([name])
        return tensor.to(device=self.device, dtype=self.dtype)

    @property
    def restored(self) -> list[str]:
        """Return the tensors that were dequantised while loading, with their type and the number of layers and
        experts.
        """
        named = Counter(f"{NUMBER.sub('*', name)} ({kind})" for name, kind in self._restored_types.items())
        return [name if count == 1 else f"{count} x {name}" for name, count in sorted(named.items())]

    @property
    def where(self) -> str:
        """The file to name in a message."""
        return self._source.where

    @property
    def is_quantized(self) -> bool:
        """Return True if projections are stored smaller than in the computing dtype, or quantised while loading."""
        return self._quantization is not None

    @property
    def is_packed(self) -> bool:
        """Return True if weights are multiplied in blocks where the checkpoint has blocks."""
        return self._packed is not None

    def names(self) -> list[str]:
        """All tensors that the checkpoint has."""
        return list(self._source.shapes())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return one of these tensors, unsharded."""
        return self._source.shapes()[name]

    def stored(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> torch.Tensor:
        """One tensor as the checkpoint has it, or a part of it; it may be a view of the file."""
        tensor = self._source.tensor(name, rows=rows, columns=columns)
        self._check_dtype(name, tensor)
        self._progress(tensor.numel())
        return tensor

    def _check_dtype(self, name: str, tensor: torch.Tensor) -> None:
        """Raise ModelError for numbers that mean nothing without scales."""
        if tensor.dtype == FLOAT8 or not tensor.is_floating_point():
            kind = "float8" if tensor.dtype == FLOAT8 else str(tensor.dtype).removeprefix("torch.")
            stem = name.removesuffix(".weight")
            raise ModelError(
                f"{self._source.where}: tensor {name} is {kind} without {name}{SCALE_SUFFIX} or {stem}.weight_scale"
            )

    def kv_scale(self, attention: str, which: str) -> float:
        """The checkpoint's scale of this layer's keys (k) or values (v) in a float8 KV cache; 1 where it has none."""
        places = (f"{which}_scale", f"{which}_proj.{which}_scale", f"attn.{which}_scale", f"{which}_proj.output_scale")
        found = (attention + place for place in places)
        name = next((name for name in found if name in self._source.shapes()), None)
        if name is None:
            return 1.0
        scales = self._source.tensor(name).float().flatten()
        if scales.numel() != 1 or not 0 < float(scales[0]) < float("inf"):
            raise ModelError(f"{self._source.where}: {name} is {scales.tolist()[:4]}; one number above 0 is needed")
        return float(scales[0])

    def dense(self, name: str, *, rows: Span) -> torch.Tensor:
        """Rows of a weight in the computing dtype, however it is stored."""
        return self._restored(self._weight(name, rows=rows))

    def vocabulary(self, name: str, *, rows: Span | None) -> Table:
        """Rows of a table as wide as the vocabulary; it may be a view of the file."""
        blocks = self._blocks(name, rows=rows)
        if blocks is not None:
            return blocks
        table = self._plain(name, rows=rows) if self._packs_rows else self(name, rows=rows)
        return StoredRows((table,)) if self._packs_rows else table

    def wide(self, name: str) -> torch.Tensor:
        """Return a tensor in float32, independent of the computing dtype."""
        tensor = self._source.tensor(name)
        self._progress(tensor.numel())
        return tensor.to(device=self.device, dtype=torch.float32, copy=True)

    def copy(self, name: str) -> torch.Tensor:
        """Return a tensor in newly allocated memory, for small weights."""
        return self(name).clone()

    def joined(
        self, prefix: str, parts: dict[str, Span], *, has_bias: bool = False, pairs: int | None = None
    ) -> Projection:
        """Rows of several projections as one. `pairs`: head size, to interleave the first two (q and k)."""
        names = [f"{prefix}{name}.weight" for name in parts]
        weights = [self._weight(name, rows=rows) for name, rows in zip(names, parts.values(), strict=True)]
        biases = [self(f"{prefix}{name}.bias", rows=rows) for name, rows in parts.items()] if has_bias else []
        if pairs is not None:
            weights[:2] = [self._interleaved(weight, pairs) for weight in weights[:2]]
            biases[:2] = [interleave_pairs(bias, pairs) for bias in biases[:2]]
        weight, bias = self._as_computed(names, weights), torch.cat(biases) if biases else None
        projection = BlockFp8Linear(weight, bias, self.dtype) if isinstance(weight, list) else Linear(weight, bias)
        own = [
            AdaptedPart(prefix + name, rows, pairs=pairs if place < 2 else None)
            for place, (name, rows) in enumerate(parts.items())
        ]
        return self._adapted(projection, own, [rows[1] - rows[0] for rows in parts.values()])

    def gated(self, prefix: str, gate: str, up: str, rows: Span, *, has_bias: bool = False) -> Projection:
        """Rows of the two projections of a gated MLP."""
        names = [f"{prefix}{name}.weight" for name in (gate, up)]
        weight = self._as_computed(names, [self._weight(name, rows=rows) for name in names])
        bias = torch.cat([self(f"{prefix}{name}.bias", rows=rows) for name in (gate, up)]) if has_bias else None
        projection: Linear | BlockFp8Linear
        if isinstance(weight, list):
            projection = GatedBlockFp8Linear(weight, bias, self.dtype)
        else:
            projection = GatedLinear(weight, bias)
        own = [AdaptedPart(prefix + name, rows) for name in (gate, up)]
        return self._adapted(projection, own, [rows[1] - rows[0]] * 2)

    def router(self, name: str, num_experts: int, *, bias: str | None = None) -> Linear:
        """A MoE's, never quantised: which experts a token gets hangs on small differences."""
        return Linear(self(name, rows=(0, num_experts)), None if bias is None else self(bias))

    def summed(self, name: str, columns: Span, group: RankGroup | None, *, has_bias: bool = False) -> Projection:
        """Return the columns of a projection whose results the group sums."""
        bias = self(f"{name}.bias") if has_bias else None
        weight = self._projection(f"{name}.weight", None if group is None else columns)
        projection: Linear | BlockFp8Linear
        if isinstance(weight, list):
            projection = BlockFp8Linear(weight, bias, self.dtype, group)
        else:
            projection = Linear(weight, bias) if group is None else RowParallelLinear(weight, bias, group)
        part = AdaptedPart(name, columns=None if group is None else columns)
        return self._adapted(projection, [part], [projection.out_features])

    def part_of_sum(self, name: str, columns: Span) -> Projection:
        """Return the columns of a projection without a bias, whose result is this rank's part of a sum that the caller
        makes.
        """
        weight = self._projection(f"{name}.weight", columns)
        projection = BlockFp8Linear(weight, None, self.dtype) if isinstance(weight, list) else Linear(weight)
        return self._adapted(projection, [AdaptedPart(name, columns=columns)], [projection.out_features])

    def _adapted(
        self, projection: Linear | BlockFp8Linear, parts: Sequence[AdaptedPart], num_rows: Sequence[int]
    ) -> Projection:
        """Return the projection with room for adapters if they are enabled. Experts have none."""
        if self._adapting is None or EXPERT in parts[0].name:
            return projection
        return self._adapting.take(projection, parts, num_rows)

    def expert(
        self, prefix: str, names: tuple[str, ...], *, rows: Span | None = None, columns: Span | None = None
    ) -> torch.Tensor | BlockFp8:
        """Return one expert's part of these projections, rows concatenated."""
        whole = [f"{prefix}{name}.weight" for name in names]
        weights = [self._weight(name, rows=rows, columns=columns) for name in whole]
        weights = [self._restored(weight) if isinstance(weight, QuantisedBlocks) else weight for weight in weights]
        weight = self._as_computed(whole, weights, is_expert=True)
        assert not isinstance(weight, StoredRows | QuantisedBlocks | MixedBlocks)
        if isinstance(weight, list) and len(weight) > 1:
            raise NotSupportedError(
                f"{prefix}: experts of {weight[0].values.shape[0]} rows per rank are no multiple of the fp8 block of "
                f"{BLOCK}, which is not supported; use --enable-expert-parallel or fewer tensor-parallel ranks"
            )
        return weight if isinstance(weight, torch.Tensor) else weight[0]

    def stacked_expert(self, name: str, expert: int, *, columns: Span | None = None) -> torch.Tensor | QuantisedBlocks:
        """One expert's weight [out, in], or some of its inputs, of a tensor [experts, in, out]."""
        if isinstance(self._packed, Mxfp4Source):
            blocks = self._packed.expert_blocks(name, expert, columns)
            if blocks is not None:
                self._progress(blocks.shape[0] * blocks.shape[1])
                return blocks
        whole = self(name, rows=(expert, expert + 1))[0]
        return (whole if columns is None else whole[columns[0] : columns[1]]).t()

    def _weight(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Weight:
        """Return the weight as stored, if it is multiplied as stored: with scales if the checkpoint has them."""
        blocks = self._blocks(name, rows=rows, columns=columns)
        if blocks is not None:
            return blocks
        shapes = self._source.shapes()
        if name + SCALE_SUFFIX not in shapes:
            return self._plain(name, rows=rows, columns=columns)
        for span, total in zip((rows, columns), shapes[name], strict=True):
            check_aligned(name, span or (0, total), total)
        values = self._source.tensor(name, rows=rows, columns=columns)
        scales = self._source.tensor(name + SCALE_SUFFIX, rows=_blocks(rows), columns=_blocks(columns))
        if values.dtype != FLOAT8:
            raise ModelError(f"{self._source.where}: tensor {name} has scales, but is {values.dtype}, not {FLOAT8}")
        self._progress(values.numel())
        return BlockFp8(values.to(self.device), scales.to(device=self.device, dtype=torch.float32))

    def _plain(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> torch.Tensor:
        """A tensor in the dtype that it is stored in, where the computing dtype is made of several at once."""
        if self.device.type != "cpu":
            return self(name, rows=rows, columns=columns)
        tensor = self._source.tensor(name, rows=rows, columns=columns)
        if tensor.dtype == FLOAT8 or not tensor.is_floating_point():
            return self(name, rows=rows, columns=columns)  # which refuses it
        self._progress(tensor.numel())
        self._remember_restored([name])
        return tensor

    def _blocks(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> QuantisedBlocks | None:
        blocks = None if self._packed is None else self._packed.blocks(name, rows=rows, columns=columns)
        if blocks is not None:
            self._progress(blocks.shape[0] * blocks.shape[1])
        return blocks

    def _restored(self, weight: Weight) -> torch.Tensor:
        """Return the weight in the computing dtype."""
        return weight.to(self.dtype) if isinstance(weight, torch.Tensor) else weight.restored(self.dtype)

    def _remember_restored(self, names: Sequence[str]) -> None:
        if isinstance(self._source, GgufSource) or self._packed is not None:
            assert isinstance(self._source, PackedSource)
            types = {name: self._source.quantised_type(name) for name in names}
            self._restored_types |= {name: kind for name, kind in types.items() if kind is not None}

    def _projection(self, name: str, columns: Span | None) -> Joined:
        return self._as_computed([name], [self._weight(name, columns=columns)])

    def _as_computed(self, names: Sequence[str], weights: list[Weight], *, is_expert: bool = False) -> Joined:
        """Return rows concatenated: float8 if this device multiplies it, blocks if the CPU does, otherwise the
        computing dtype, with the same values. The caller owns an expert's rows, and rows quantised here have blocks
        over all of them; other rows must be packed before the next call.
        """
        packed = [weight for weight in weights if isinstance(weight, QuantisedBlocks)]
        if packed and len(packed) == len(weights) and (whole := joined_rows(packed)) is not None:
            return whole
        self._remember_restored(
            [name for name, weight in zip(names, weights, strict=True) if isinstance(weight, QuantisedBlocks)]
        )
        if self._quantization is not None and not self._quantization.is_stored:
            dense = [self._restored(weight) for weight in weights if isinstance(weight, torch.Tensor)]
            weights = [BlockFp8.of(weight) for weight in ([torch.cat(dense)] if is_expert else dense)]
        blocks = [weight for weight in weights if isinstance(weight, BlockFp8)]
        if self._multiplies_float8 and len(blocks) == len(weights):
            return joined_blocks(blocks)
        if self.device.type == "cpu" and not is_expert:
            return self._stored_rows(weights) if self._packs_rows else self._in_scratch(weights)
        restored = [self._restored(weight) for weight in weights]
        return restored[0] if len(restored) == 1 else torch.cat(restored)

    def _stored_rows(self, weights: Sequence[Weight]) -> StoredRows:
        """Return rows concatenated without a copy, for callers that join and convert them while packing."""
        return StoredRows(
            tuple(each if isinstance(each, torch.Tensor) else each.restored(self.dtype) for each in weights)
        )

    def _interleaved(self, weight: Weight, head_size: int) -> Weight:
        """Return rows of each head in another order; as a view if rows are packed without a copy."""
        if isinstance(weight, torch.Tensor) and self._packs_rows and self._quantization is None:
            return weight.view(-1, 2, head_size // 2, weight.shape[1]).transpose(1, 2)
        return _interleaved(weight, head_size)

    def _in_scratch(self, weights: Sequence[Weight]) -> torch.Tensor:
        """Return rows concatenated in a buffer that the next call overwrites: converting and joining is one pass, and
        no page is allocated and freed again, which would take as long as the pass itself. CPU matmuls make a packed
        copy.
        """
        parts = [weight if isinstance(weight, torch.Tensor) else weight.restored(self.dtype) for weight in weights]
        if len(parts) == 1 and parts[0].dtype == self.dtype:
            return parts[0]
        if 1 in parts[0].shape:
            return torch.cat([part.to(self.dtype) for part in parts])
        rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
        if self._scratch.numel() < rows * columns:
            self._scratch = torch.empty(rows * columns, dtype=self.dtype)
        joined = self._scratch[: rows * columns].view(rows, columns)
        for part, own in zip(parts, torch.split(joined, [part.shape[0] for part in parts]), strict=True):
            own.copy_(part)
        return joined


def _blocks(span: Span | None) -> Span | None:
    """Return the blocks that contain these rows or columns."""
    return None if span is None else (span[0] // BLOCK, -(-span[1] // BLOCK))


def _interleaved(weight: Weight, head_size: int) -> Weight:
    """Rows of each head in another order, which must not leave a block of float8; others are of one row."""
    if isinstance(weight, torch.Tensor):
        return interleave_pairs(weight, head_size)
    if isinstance(weight, QuantisedBlocks):
        return weight.select_rows(lambda rows: interleave_pairs(rows, head_size))
    if BLOCK % head_size:
        raise NotSupportedError(f"fp8 blocks with head_dim {head_size} are not supported: it must divide {BLOCK}")
    values = interleave_pairs(weight.values.view(torch.uint8), head_size)
    return BlockFp8(values.view(weight.values.dtype), weight.scales)
