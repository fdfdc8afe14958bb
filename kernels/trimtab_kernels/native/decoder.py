"""Compiled decoder layers of the Llama family: a step's attention and MLPs in one call, or as separate halves.

hidden                  [num_tokens, hidden_size]                          fp32, changed in place
rotation                [num_tokens, head_size // 2]                       complex64
key_cache, value_cache  [num_blocks, block_size, num_kv_heads, head_size]  fp32, per layer
The layers are split into halves if the ranks of a tensor-parallel group sum between them, or an MoE replaces the MLP.
The definition is the model's own layer (models/decoder.py of the engine), operator by operator.
"""

import ctypes
from dataclasses import dataclass

import torch

from trimtab_kernels.native.batch import NativeBatch
from trimtab_kernels.native.library import MatrixView, NativeLibrary
from trimtab_kernels.native.matrix import PackedMatrix

MAX_HEAD_SIZE = 256  # scratch memory per thread is sized for it
ATTENTION, MLP = 1, 2  # `enum layer_half` of layers.c


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Shape of this rank's part. intermediate_size 0: the layers have no compiled MLP."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    eps: float
    scale: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Norms [hidden_size], head norms [head_size] with pairs interleaved; gate_up is gated. None if the layer lacks
    it.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: PackedMatrix
    output: PackedMatrix
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    gate_up: PackedMatrix | None = None
    down: PackedMatrix | None = None


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("hidden", "heads", "kv_heads", "head", "intermediate")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "query_norm", "key_norm", "post_norm")),
        *((name, MatrixView) for name in ("qkv", "output", "gate_up", "down")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("hidden", "rotation", "slots", "sequences", "tables", "keys", "values")),
        *((n, ctypes.c_long) for n in ("num_tokens", "num_sequences", "block_size", "threads")),
        ("scratch", ctypes.c_void_p),
    )


def supports_head_size(head_size: int) -> bool:
    """Return True if the compiled layers support heads of this size."""
    return head_size % 2 == 0 and head_size <= MAX_HEAD_SIZE


class NativeStep:
    """One step's checked tensors, for all layers. Keeps them alive."""

    def __init__(
        self,
        decoder: "NativeDecoder",
        hidden: torch.Tensor,
        rotation: torch.Tensor,
        caches: tuple[list[torch.Tensor], list[torch.Tensor]],
        slots: torch.Tensor,
        batch: NativeBatch,
    ) -> None:
        """Check the tensors.

        Raises:
            ValueError: a shape, dtype or stride does not match.
        """
        num_tokens, shape = slots.shape[0], decoder.shape
        cache = (batch.block_size, shape.num_kv_heads, shape.head_size)
        if (
            hidden.dtype != torch.float32
            or hidden.shape[1:] != (shape.hidden_size,)
            or not hidden.is_contiguous()
            or not num_tokens <= min(hidden.shape[0], rotation.shape[0])
            or rotation.dtype != torch.complex64
            or rotation.shape[1:] != (shape.head_size // 2,)
            or not rotation.is_contiguous()
            or any(c.dtype != torch.float32 or c.shape[1:] != cache or not c.is_contiguous() for c in caches[0][:1])
        ):
            raise ValueError(
                f"compiled layers: hidden is {list(hidden.shape)} {hidden.dtype}, rotation {list(rotation.shape)}, "
                f"{num_tokens} slots, the cache {list(caches[0][0].shape)} {caches[0][0].dtype}; they do not fit "
                f"{shape} with blocks of {batch.block_size}, or are not contiguous"
            )
        self.hidden, self._rotation, self._slots, self._batch, self._caches = hidden, rotation, slots, batch, caches
        self.num_tokens = num_tokens
        pointers = ctypes.c_void_p * len(caches[0])
        self._keys = pointers(*(cache.data_ptr() for cache in caches[0]))
        self._values = pointers(*(cache.data_ptr() for cache in caches[1]))
        threads, scratch = decoder.scratch()
        self.view = _Step(
            hidden.data_ptr(), rotation.data_ptr(), slots.data_ptr(), batch.sequences.data_ptr(),
            batch.tables.data_ptr(), ctypes.addressof(self._keys), ctypes.addressof(self._values), num_tokens,
            batch.sequences.shape[0], batch.block_size, threads, scratch.data_ptr(),
        )  # fmt: skip


class NativeDecoder:
    """The layers of one rank. Not thread-safe: the scratch memory belongs to one step."""

    def __init__(self, library: NativeLibrary, shape: DecoderShape, layers: list[LayerWeights]) -> None:
        self.shape, self._library, self._weights = shape, library, layers
        self.instruction_set = library.instruction_set
        self._shape = _Shape(
            shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_size, shape.intermediate_size,
            shape.eps, shape.scale,
        )  # fmt: skip
        self._layers = (_Layer * len(layers))(*(_layer(weights) for weights in layers))
        self._threads = 0
        self._scratch = torch.empty(0)

    def scratch(self) -> tuple[int, torch.Tensor]:
        """Return the number of threads, and scratch memory for them."""
        threads = self._library.num_threads
        if threads != self._threads:
            self._scratch = torch.empty(self._library.functions.trimtab_scratch(ctypes.addressof(self._shape), threads))
            self._threads = threads
        return threads, self._scratch

    def run(self, step: NativeStep, num_layers: int | None = None) -> None:
        """Run all layers, or the first ones, and add to the step's hidden states."""
        self._call(step, 0, len(self._layers[:num_layers]), ATTENTION | MLP, None)

    def attention(self, step: NativeStep, layer: int, *, adds: bool) -> torch.Tensor | None:
        """Run the attention half and add to hidden; with adds=False, return its result [num_tokens, hidden_size]."""
        return self._half(step, layer, ATTENTION, adds=adds)

    def mlp(self, step: NativeStep, layer: int, *, adds: bool) -> torch.Tensor | None:
        """Run the MLP half, as `attention` does."""
        return self._half(step, layer, MLP, adds=adds)

    def _half(self, step: NativeStep, layer: int, part: int, *, adds: bool) -> torch.Tensor | None:
        partial = None if adds else torch.empty(step.num_tokens, self.shape.hidden_size)
        self._call(step, layer, 1, part, partial)
        return partial

    def _call(self, step: NativeStep, first: int, count: int, parts: int, partial: torch.Tensor | None) -> None:
        address = None if partial is None else partial.data_ptr()
        view, shape, layers = (ctypes.addressof(x) for x in (step.view, self._shape, self._layers))
        if self._library.functions.trimtab_layers(shape, layers, first, count, parts, view, address):
            raise MemoryError(f"no memory for the attention units of a step of {step.num_tokens} tokens")


def _layer(weights: LayerWeights) -> _Layer:
    norms = (weights.input_norm, weights.query_norm, weights.key_norm, weights.post_norm)
    matrices = (weights.qkv, weights.output, weights.gate_up, weights.down)
    return _Layer(
        *(None if norm is None else norm.data_ptr() for norm in norms),
        *(MatrixView() if matrix is None else matrix.view for matrix in matrices),
    )
