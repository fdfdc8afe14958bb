"""gpt-oss experts in their published format, mxfp4 (OCP Microscaling Formats 1.0), shown under the names and shapes of
dequantised experts: as blocks for the CPU's compiled matmuls, or dequantised to float32.

```
P_blocks   [experts, out, in / 32, 16] uint8    two numbers of 4 bits (e2m1) in a byte, the first in the lower half; as
                                                transformers writes it [experts, out, in / 2]
P_scales   [experts, out, in / 32] uint8        the power of two of 32 numbers, 127 more than it is (e8m0)
P          [experts, in, out]                   the dequantised tensor
```
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trimtab_modelspec.scaled_format import Mxfp4

from trimtab_engine.errors import ModelError
from trimtab_engine.weights.packing import Packing
from trimtab_engine.weights.source import Span, WeightSource

if TYPE_CHECKING:
    import torch
    from trimtab_kernels.native.quantised import QuantisedBlocks

BLOCKS, SCALES = "_blocks", "_scales"
GROUP, GROUP_BYTES = 32, 16
BIAS = 127
NAN = 255
"""Exponent bias of scales."""
POWERS = (-24, 15)
"""Range of exponents that float16 can represent."""
PACKED_BYTES = 18 / 32


class Mxfp4Source:
    """Wrapper of another source that shows tensors stored in two parts as one."""

    def __init__(self, stored: WeightSource, form: Mxfp4) -> None:
        self._stored, self._form = stored, form
        self.format = stored.format
        held = stored.shapes()
        self._names = [name.removesuffix(BLOCKS) for name in held if name.endswith(BLOCKS)]
        parts = {name + part for name in self._names for part in (BLOCKS, SCALES)}
        self._shapes = {name: shape for name, shape in held.items() if name not in parts}
        self._shapes |= {name: self._checked_shape(name) for name in self._names}
        self._is_packed = frozenset(self._names)

    @property
    def stored(self) -> WeightSource:
        """Names of tensors whose parts are separate tensors."""
        return self._stored

    @property
    def form(self) -> Mxfp4:
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
        """See WeightSource; for a tensor in two parts, the weight's."""
        return self._shapes

    def map_files(self) -> None:
        """See WeightSource."""
        self._stored.map_files()

    @property
    def is_in_blocks(self) -> bool:
        """Return True if the compiled matmuls accept the tensor."""
        return True

    def quantised_type(self, name: str) -> str | None:
        """Return the name of a weight in mxfp4, or None for other tensors."""
        return self._form.name if name in self._is_packed else None

    def packing(self, name: str, columns: Span | None = None) -> Packing | None:
        """Return the packing with which these inputs of a tensor's experts are multiplied as stored, or None."""
        if name not in self._is_packed or any(column % GROUP for column in columns or ()):
            return None
        return Packing("e2m1", PACKED_BYTES)

    def blocks(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> "QuantisedBlocks | None":
        """Always None: experts' weights are not matrices; see `expert_blocks`."""
        return None

    def expert_blocks(self, name: str, expert: int, columns: Span | None = None) -> "QuantisedBlocks | None":
        """One expert's weight [out, in], or some of its inputs, in blocks. None where it is not multiplied so: inputs
        that cut a block, powers of two that float16 does not hold.
        """
        import torch
        from trimtab_kernels.native.quantised import MXFP4, QuantisedBlocks

        if self.packing(name, columns) is None:
            return None
        numbers, powers = self._parts(name, (expert, expert + 1))
        if columns is not None:
            first, last = (column // GROUP for column in columns)
            numbers, powers = numbers[:, :, first:last], powers[:, :, first:last]
        powers = powers[0] - 1  # the block's numbers are twice the e2m1 values
        is_nothing = (numbers[0] & 7 == 0).all(dim=-1)
        if bool(((powers < POWERS[0]) | (powers > POWERS[1])).logical_and_(~is_nothing).any()):
            return None
        scales = torch.ldexp(torch.ones(powers.shape), powers.masked_fill(is_nothing, 0)).half()
        data = numbers[0, ..., :GROUP_BYTES] | numbers[0, ..., GROUP_BYTES:] << 4
        whole = torch.cat([scales.unsqueeze(-1).view(torch.uint8), data], dim=-1)
        return QuantisedBlocks(MXFP4, whole.flatten(1))

    def tensor(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> "torch.Tensor":
        """See WeightSource; tensors in two parts become float32 (of the given experts)."""
        import torch

        if name not in self._is_packed:
            return self._stored.tensor(name, rows=rows, columns=columns)
        from trimtab_kernels.native.quantised import E2M1

        numbers, powers = self._parts(name, rows or (0, self._shapes[name][0]))
        values = (torch.tensor(E2M1) / 2)[numbers.long()]
        return torch.ldexp(values, powers.unsqueeze(-1)).flatten(2).transpose(1, 2)

    def _parts(self, name: str, experts: Span) -> "tuple[torch.Tensor, torch.Tensor]":
        """Numbers [experts, out, in / 32, 32] uint8 of 4 bits, in turn, and powers of two [experts, out, in / 32]
        int32. Raises ModelError.
        """
        import torch

        blocks = self._stored.tensor(name + BLOCKS, rows=experts)
        scales = self._stored.tensor(name + SCALES, rows=experts)
        for part, held in ((BLOCKS, blocks), (SCALES, scales)):
            if held.dtype != torch.uint8:
                raise ModelError(f"{self.where}: tensor {name + part} is {held.dtype}, not {torch.uint8}")
        if bool((scales == NAN).any()):
            raise ModelError(
                f"{self.where}: {name + SCALES} has scales that are NaN ({NAN}); download or quantise it again"
            )
        blocks = blocks.reshape(*scales.shape, GROUP_BYTES)
        return torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(3), scales.int() - BIAS

    def _checked_shape(self, name: str) -> tuple[int, int, int]:
        """The restored tensor's. Raises ModelError where its parts do not fit each other."""
        held = self._stored.shapes()
        blocks, scales = held[name + BLOCKS], held.get(name + SCALES)
        if len(blocks) == 3 and blocks[2] % GROUP_BYTES == 0:
            blocks = (*blocks[:2], blocks[2] // GROUP_BYTES, GROUP_BYTES)
        if len(blocks) != 4 or blocks[3] != GROUP_BYTES:
            raise ModelError(
                f"{self.where}: {name + BLOCKS} is {list(blocks)}; [experts, out, in / {GROUP}, {GROUP_BYTES}] is "
                f"needed"
            )
        if scales != blocks[:3]:
            said = "missing" if scales is None else f"{list(scales)}"
            raise ModelError(
                f"{self.where}: {name + SCALES} is {said}; {list(blocks[:3])} is needed with {name + BLOCKS}"
            )
        return blocks[0], blocks[2] * GROUP, blocks[1]
