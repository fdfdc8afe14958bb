"""Weights stored as float8 or integers with scales, as compressed-tensors, AutoFP8 and ModelOpt write them, shown under
their original names and shapes: as blocks for the CPU's compiled matmuls, or dequantised to float32.

```
X.weight             [out, in] float8 (e4m3) or int8
X.weight_packed      [out, in / 8] int32               replaces X.weight: 4-bit integers plus 8,
                                                       or [out, in / 4] 8-bit integers plus 128
X.weight_scale       [] or [1], [out, 1], [out, groups] or [blocks of out, blocks of in]
X.weight_zero_point  like X.weight_scale, int8; with packed 4-bit integers [out / 8, groups] int32
X.weight_g_idx       [in] int32                        the group of each input
X.weight_shape       [2]                               of X.weight
X.input_scale                                          of activations, which are not quantised here
```

A tensor is quantised if and only if it has scales, independent of config.json's lists of modules.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trimtab_modelspec.scaled_format import ScaledFormat, Scheme

from trimtab_engine.errors import ModelError
from trimtab_engine.weights.four_bits import integers_of
from trimtab_engine.weights.integer_part import BLOCK, BLOCK_BYTES, ZEROS_BYTES, IntegerPart, check_numbers, in_blocks
from trimtab_engine.weights.packing import Packing
from trimtab_engine.weights.source import Span, WeightSource

if TYPE_CHECKING:
    import torch
    from trimtab_kernels.native.quantised import QuantisedBlocks

WEIGHT, PACKED, SCALE, ZERO_POINT = ".weight", ".weight_packed", ".weight_scale", ".weight_zero_point"
GROUPS, SHAPE = ".weight_g_idx", ".weight_shape"
OF_ACTIVATIONS = (".input_scale", ".input_zero_point")
"""Unused, since activations are not quantised."""
PARTS = (PACKED, SCALE, ZERO_POINT, GROUPS, SHAPE, *OF_ACTIVATIONS)
NAN = 0x7F
"""Largest float8 (e4m3) value."""


class ScaledSource:
    """Wrapper of another source that shows tensors stored in parts as one."""

    def __init__(self, stored: WeightSource, form: ScaledFormat, stored_name: Callable[[str], str] = str) -> None:
        """`stored_name`: what config.json calls a module that has another name here."""
        self._stored, self._form, self._stored_name = stored, form, stored_name
        self.format = stored.format
        held = stored.shapes()
        stems = {name.removesuffix(part) for part in (SCALE, PACKED) for name in held if name.endswith(part)}
        self._schemes = {stem: self._scheme(stem) for stem in sorted(stems)}
        parts = {stem + part for stem in stems for part in PARTS}
        self._shapes = {name: shape for name, shape in held.items() if name not in parts}
        self._shapes |= {stem + WEIGHT: self._checked_shape(stem) for stem in self._schemes}

    @property
    def stored(self) -> WeightSource:
        """Names of tensors whose parts are separate tensors."""
        return self._stored

    @property
    def form(self) -> ScaledFormat:
        """Storage layout of the parts."""
        return self._form

    @property
    def config(self) -> Mapping[str, Any]:
        """See WeightSource."""
        return self._stored.config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """See WeightSource."""
        return self._stored.generation_config

    @property
    def where(self) -> str:
        """See WeightSource."""
        return self._stored.where

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See WeightSource; for a tensor in parts, the weight's."""
        return self._shapes

    def map_files(self) -> None:
        """See WeightSource."""
        self._stored.map_files()

    def scheme_of(self, name: str) -> Scheme | None:
        """Return the format of a weight, or None if it is not quantised."""
        return self._schemes.get(name.removesuffix(WEIGHT)) if name.endswith(WEIGHT) else None

    @property
    def is_in_blocks(self) -> bool:
        """Return True if the compiled matmuls accept any of the formats in config.json."""
        return any(self._is_taken(scheme) for scheme in self._schemes.values())

    @staticmethod
    def _is_taken(scheme: Scheme) -> bool:
        if scheme.numbers == "float":
            return scheme.strategy in ("tensor", "channel")
        has_taken_zeros = scheme.is_symmetric or (scheme.bits == 4 and scheme.is_packed)
        return has_taken_zeros and scheme.strategy != "block" and (scheme.group_size or BLOCK) % BLOCK == 0

    def quantised_type(self, name: str) -> str | None:
        """The same in people's words."""
        scheme = self.scheme_of(name)
        return None if scheme is None else scheme.word

    def packing(self, name: str, columns: Span | None = None) -> Packing | None:
        """Return the packing with which these columns of a tensor are multiplied as stored, or None."""
        scheme = self.scheme_of(name)
        if scheme is None or not self._is_taken(scheme):
            return None
        span = columns or (0, self._shapes[name][1])
        if scheme.numbers == "float":
            return Packing("e4m3", 1.0)
        if span[0] % BLOCK or span[1] % BLOCK:
            return None
        order, groups = in_blocks(self._groups(name.removesuffix(WEIGHT), scheme, span))
        if groups is None:
            return None
        bits = scheme.bits if scheme.is_packed else 8
        size = BLOCK_BYTES[bits] if scheme.is_symmetric else ZEROS_BYTES
        form = {4: "Q4_0", 8: "Q8_0"}[bits] if scheme.is_symmetric else "zeros"
        return Packing(form, size / BLOCK, None if order is None else order.numpy().tobytes())

    def blocks(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> "QuantisedBlocks | None":
        """A matrix in blocks, or a part of it. None where it is not multiplied so: see `packing`, and scales of groups
        that float16 does not hold.
        """
        scheme = self.scheme_of(name)
        if scheme is None or self.packing(name, columns) is None:
            return None
        stem = name.removesuffix(WEIGHT)
        rows, columns = self._spans(name, rows, columns)
        if scheme.numbers == "int":
            return self._integer_part(stem, scheme, rows, columns).blocks()
        import torch
        from trimtab_kernels.native.quantised import FLOAT8, QuantisedBlocks

        values = self._values(stem, rows, columns)
        return QuantisedBlocks(FLOAT8, values.view(torch.uint8), self._scales(stem, scheme, rows, columns)[:, 0])

    def tensor(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> "torch.Tensor":
        """See WeightSource; tensors in parts become float32."""
        scheme = self.scheme_of(name)
        if scheme is None:
            return self._stored.tensor(name, rows=rows, columns=columns)
        stem = name.removesuffix(WEIGHT)
        rows, columns = self._spans(name, rows, columns)
        if scheme.numbers == "int" and scheme.strategy != "block":
            return self._integer_part(stem, scheme, rows, columns).restored()
        values, scales = self._values(stem, rows, columns).float(), self._scales(stem, scheme, rows, columns)
        return values.mul_(scales.index_select(1, self._groups(stem, scheme, columns)))

    def _spans(self, name: str, rows: Span | None, columns: Span | None) -> tuple[Span, Span]:
        height, width = self._shapes[name]
        return rows or (0, height), columns or (0, width)

    def _scheme(self, stem: str) -> Scheme:
        """Return the format of a module that is stored in parts.

        Raises:
            ModelError: a part is missing.
        """
        held = self._stored.shapes()
        if stem + SCALE not in held:
            raise ModelError(f"{self.where}: {stem + SCALE} is missing, but {stem + PACKED} exists")
        scheme = self._form.target_of(self._stored_name(stem)) or self._form.target_of(stem)
        if scheme is None:
            raise ModelError(
                f"{self.where}: {stem + SCALE} is stored, but no group of quantization_config has {stem} as a target"
            )
        values = stem + (PACKED if scheme.is_packed else WEIGHT)
        if values not in held:
            raise ModelError(f"{self.where}: {values} is missing, but {stem + SCALE} exists")
        return scheme

    def _checked_shape(self, stem: str) -> tuple[int, int]:
        """The weight's. Raises ModelError where its parts do not fit each other."""
        held, scheme = self._stored.shapes(), self._schemes[stem]
        values = stem + (PACKED if scheme.is_packed else WEIGHT)
        if len(held[values]) != 2:
            raise ModelError(f"{self.where}: {values} is {list(held[values])}; a matrix is needed")
        out, size = held[values]
        size *= 32 // scheme.bits if scheme.is_packed else 1
        scales = scheme.scales_shape(out, size)
        allowed = {SCALE: [scales, *_other_shapes(scheme, scales)]}
        if not scheme.is_symmetric:
            is_packed = scheme.is_packed and len(scales) == 2
            allowed[ZERO_POINT] = [(-(-out * scheme.bits // 32), scales[1])] if is_packed else allowed[SCALE]
        if scheme.is_ordered:
            allowed[GROUPS] = [(size,)]
        for part, shapes in allowed.items():
            found = held.get(stem + part)
            if found not in shapes:
                said = "missing" if found is None else f"{list(found)}"
                raise ModelError(
                    f"{self.where}: {stem + part} is {said}; {list(shapes[0])} is needed ({scheme.word}) with {values}"
                )
        return out, size

    def _groups(self, stem: str, scheme: Scheme, columns: Span) -> "torch.Tensor":
        """Return the group of each of these columns.

        Raises:
            ModelError: a group does not exist.
        """
        import torch

        if scheme.is_ordered:
            groups = self._stored.tensor(stem + GROUPS, rows=columns).long()
            count = self._stored.shapes()[stem + SCALE][-1]
            if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < count:
                raise ModelError(
                    f"{self.where}: {stem + GROUPS} names groups {int(groups.min())} to {int(groups.max())}; there are "
                    f"{count}"
                )
            return groups
        inputs = torch.arange(*columns)
        width = scheme.block[1] if scheme.block is not None else scheme.group_size
        return torch.zeros_like(inputs) if width is None else inputs // width

    def _values(self, stem: str, rows: Span, columns: Span) -> "torch.Tensor":
        """float8 or int8. Raises ModelError for another dtype, and for NaN."""
        import torch

        values, scheme = self._stored.tensor(stem + WEIGHT, rows=rows, columns=columns), self._schemes[stem]
        needed = torch.float8_e4m3fn if scheme.numbers == "float" else torch.int8
        if values.dtype != needed:
            raise ModelError(f"{self.where}: tensor {stem + WEIGHT} has scales, but is {values.dtype}, not {needed}")
        if scheme.numbers == "float" and bool((values.view(torch.uint8) & NAN == NAN).any()):
            raise ModelError(f"{self.where}: tensor {stem + WEIGHT} has NaN in it; download or quantise it again")
        return values

    def _scales(self, stem: str, scheme: Scheme, rows: Span, columns: Span) -> "torch.Tensor":
        """[rows, scales of a row] float32, of all columns."""
        scales = self._of_rows(self._stored.tensor(stem + SCALE).float(), scheme, rows)
        check_numbers(scales, stem + SCALE, self.where)
        return scales

    @staticmethod
    def _of_rows(factors: "torch.Tensor", scheme: Scheme, rows: Span) -> "torch.Tensor":
        """Return scales or zero points of these rows [rows, groups]."""
        import torch

        if scheme.strategy == "tensor":
            return factors.reshape(1, 1).expand(rows[1] - rows[0], 1)
        if scheme.block is not None:
            return factors.index_select(0, torch.arange(*rows) // scheme.block[0])
        return factors.reshape(factors.shape[0], -1)[rows[0] : rows[1]]

    def _integer_part(self, stem: str, scheme: Scheme, rows: Span, columns: Span) -> IntegerPart:
        scales, groups = self._scales(stem, scheme, rows, columns), self._groups(stem, scheme, columns)
        integers = (
            self._unpacked(stem, scheme, rows, columns) if scheme.is_packed else self._values(stem, rows, columns)
        )
        zeros = None if scheme.is_symmetric else self._zeros(stem, scheme, rows)
        return IntegerPart(integers, scales, zeros, groups)

    def _zeros(self, stem: str, scheme: Scheme, rows: Span) -> "torch.Tensor":
        """[rows, groups]: as integers of 4 bits have them, 0 to 15, of 8 bits -128 to 127."""
        import torch

        name = stem + ZERO_POINT
        if scheme.is_packed and scheme.strategy != "tensor":
            in_a_word = 32 // scheme.bits
            first = rows[0] // in_a_word
            words = self._stored.tensor(name, rows=(first, -(-rows[1] // in_a_word)))
            zeros = _numbers(words, scheme.bits).transpose(1, 2).reshape(-1, words.shape[1])
            begin = rows[0] - first * in_a_word
            zeros = zeros[begin : begin + rows[1] - rows[0]].to(torch.int16)
            return zeros if scheme.bits == 4 else zeros - 128
        zeros = self._of_rows(self._stored.tensor(name).to(torch.int16), scheme, rows)
        return zeros + 8 if scheme.is_packed and scheme.bits == 4 else zeros

    def _unpacked(self, stem: str, scheme: Scheme, rows: Span, columns: Span) -> "torch.Tensor":
        """[rows, columns] as IntegerPart has them."""
        import torch

        name, in_a_word = stem + PACKED, 32 // scheme.bits
        if stem + SHAPE in self._stored.shapes():
            said, found = self._stored.tensor(stem + SHAPE).flatten().tolist(), list(self._shapes[stem + WEIGHT])
            if said != found:
                raise ModelError(f"{self.where}: {stem + SHAPE} is {said}, but {name} has {found}")
        first, last = columns[0] // in_a_word, -(-columns[1] // in_a_word)
        words = self._stored.tensor(name, rows=rows, columns=(first, last))
        if words.dtype != torch.int32:
            raise ModelError(f"{self.where}: tensor {name} is {words.dtype}, not {torch.int32}")
        begin = columns[0] - first * in_a_word
        every = _numbers(words, scheme.bits).flatten(1)[:, begin : begin + columns[1] - columns[0]]
        return every if scheme.bits == 4 else (every.to(torch.int16) - 128).to(torch.int8)


def _other_shapes(scheme: Scheme, scales: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Integer type that may also hold scales."""
    if scheme.strategy == "tensor":
        return [(), (1, 1)]
    return [scales[:1]] if scheme.strategy == "channel" else []


def _numbers(words: "torch.Tensor", bits: int) -> "torch.Tensor":
    """[lines, words] int32 -> [lines, words, 32 / bits] uint8, the lowest bits first."""
    import torch

    if bits == 4:
        return integers_of(words)
    return words.contiguous().view(torch.uint8).view(*words.shape, 4)
