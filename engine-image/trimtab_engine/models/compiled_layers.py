"""A model's layers by the compiled operators (trimtab_kernels.native): all layers in one call on a single rank with
dense layers, or half a layer per call if ranks sum between halves or the MLP is an MoE.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.profiler import record_function
from trimtab_kernels.native.decoder import DecoderShape, LayerWeights, NativeDecoder, NativeStep, supports_head_size
from trimtab_kernels.native.library import NativeUnavailable, native_library
from trimtab_kernels.paged_attention import AttentionMetadata

from trimtab_engine.device.kv_cache import KVTensors
from trimtab_engine.parallel.groups import RankGroup

PROFILED_AS = "trimtab::decoder_layers"
"""The profiler sees torch's operators only; without this name most of a step would be a gap."""


class Layer(Protocol):
    """Interface that a model's layer must provide."""

    is_moe: bool

    def compiled_weights(self) -> LayerWeights | None: ...

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor: ...


class CompiledLayers:
    """One rank's layers."""

    def __init__(self, layers: Sequence[Layer], decoder: NativeDecoder, group: RankGroup | None) -> None:
        self._layers, self._decoder, self._group = layers, decoder, group
        self.instruction_set = decoder.instruction_set
        self._is_one_call = group is None and not any(layer.is_moe for layer in layers)

    def __call__(
        self,
        hidden: torch.Tensor,
        rotation: torch.Tensor,
        kv_cache: KVTensors,
        metadata: AttentionMetadata,
        num_layers: int | None = None,
    ) -> None:
        """hidden [rows, hidden_size], changed in place; rows from metadata.num_tokens on are padding."""
        assert metadata.native is not None
        caches = (kv_cache.keys, kv_cache.values)
        step = NativeStep(self._decoder, hidden, rotation, caches, metadata.slot_mapping, metadata.native)
        if self._is_one_call:
            with record_function(PROFILED_AS):
                self._decoder.run(step, num_layers)
            return
        adds = self._group is None
        for index, layer in enumerate(self._layers[:num_layers]):
            self._sum(hidden, self._decoder.attention(step, index, adds=adds))
            if layer.is_moe:
                hidden.add_(layer.mlp(hidden))
            else:
                self._sum(hidden, self._decoder.mlp(step, index, adds=adds))

    def _sum(self, hidden: torch.Tensor, partial: torch.Tensor | None) -> None:
        if partial is not None:
            assert self._group is not None
            hidden[: partial.shape[0]].add_(self._group.all_reduce(partial))


def compile_layers(layers: Sequence[Layer], shape: DecoderShape, group: RankGroup | None) -> CompiledLayers | None:
    """None where the compiled operators are not there, or do not take these layers."""
    weights = [compiled for layer in layers if (compiled := layer.compiled_weights()) is not None]
    if not weights or len(weights) < len(layers) or not supports_head_size(shape.head_size):
        return None
    return CompiledLayers(layers, NativeDecoder(weights[0].qkv.library, shape, weights), group)


def is_library_missing() -> bool:
    """Return True if this installation has no compiled operators for this CPU."""
    return isinstance(native_library(), NativeUnavailable)


def why_not(dtype: torch.dtype, shape: DecoderShape) -> str:
    """Return the reason why compile_layers returned None on the CPU, for the log."""
    library = native_library()
    if isinstance(library, NativeUnavailable):
        return library.reason
    if dtype != torch.float32:
        return f"they compute in float32 and the model in {str(dtype).removeprefix('torch.')}"
    return f"they do not take heads of {shape.head_size}"
