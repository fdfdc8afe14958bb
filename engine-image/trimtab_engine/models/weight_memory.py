"""Device memory of loaded weights, from names, shapes and a rank's spans only: mirrors the Loader's decisions
(loading.py) before any weight is read.
"""

from collections.abc import Mapping

import torch
from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.quantization import Quantization
from trimtab_modelspec.tensors import StoredTensor, Tensors, num_elements, num_quantizable

from trimtab_engine.layers.quantized import multiplies_float8
from trimtab_engine.models.loading import PackedSource, packed_source
from trimtab_engine.parallel.shard import ModelShard
from trimtab_engine.weights.packing import Packing
from trimtab_engine.weights.source import Span, WeightSource

SUMMED = (".o_proj.weight", ".down_proj.weight", ".experts.down_proj")
"""Name suffixes of projections whose columns are divided."""
TOGETHER: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("q_proj", "k_proj", "v_proj")),
    **dict.fromkeys(("gate_proj", "up_proj"), ("gate_proj", "up_proj")),
}
"""Projections whose rows are one matmul."""
ALWAYS_RESTORED = (".kv_b_proj.weight", ".gate.weight", ".router.weight")
"""Weights that stay unquantised: per-head projections, and routers, which are sensitive to small differences."""
PANEL_ROWS = 32
"""Row multiple at which packed parts can be concatenated as whole panels."""


def weight_memory_bytes(
    source: WeightSource,
    tensors: Tensors,
    quantization: Quantization | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    config: ModelConfig | None = None,
    shard: ModelShard | None = None,
) -> int:
    """Return the approximate memory of all ranks together. Weights that this device does not multiply as stored are
    dequantised while loading, and so are experts that move among ranks and rank parts that are not multiplied as stored
    (`shard`: one rank's; None for a single rank).
    """
    packed = packed_source(source, dtype, device, quantization)
    if packed is not None:
        held = _Held(packed, tensors, dtype, config, shard)
        return sum(held.num_bytes(name, tensor) for name, tensor in tensors.items())
    plain = num_elements(tensors.values()) * dtype.itemsize
    if quantization is None or not multiplies_float8(device):
        return plain
    return plain - int(num_quantizable(tensors) * (dtype.itemsize - quantization.weight_bytes))


class _Held:
    """Return the memory of each tensor."""

    def __init__(
        self,
        source: PackedSource,
        tensors: Tensors,
        dtype: torch.dtype,
        config: ModelConfig | None,
        shard: ModelShard | None,
    ) -> None:
        self._source, self._tensors, self._dtype = source, tensors, dtype
        self._config, self._shard = config, shard
        self._packings: dict[str, Packing | None] = {}

    def num_bytes(self, name: str, tensor: StoredTensor) -> int:
        packing = self._packing(name, tensor)
        if packing is None or not self._is_whole_matmul_packed(name, packing):
            return tensor.num_elements * self._dtype.itemsize
        return round(tensor.num_elements * packing.element_bytes)

    def _packing(self, name: str, tensor: StoredTensor) -> Packing | None:
        if name not in self._packings:
            moves = tensor.part == "experts" and self._shard is not None and self._shard.expert_placement is not None
            is_restored = moves or name.endswith(ALWAYS_RESTORED)
            self._packings[name] = None if is_restored else self._source.packing(name, self._columns(name, tensor))
        return self._packings[name]

    def _columns(self, name: str, tensor: StoredTensor) -> Span | None:
        """The rank's tensors; None for all."""
        if not name.endswith(SUMMED) or self._shard is None or self._config is None:
            return None
        if tensor.part == "experts":
            return self._shard.expert_mlp
        if tensor.part == "shared_experts":
            return self._shard.shared_mlp
        if tensor.part == "dense_mlp":
            return self._shard.mlp
        size = tensor.shape[1] // self._config.num_attention_heads
        return self._shard.heads[0] * size, self._shard.heads[1] * size

    def _is_whole_matmul_packed(self, name: str, packing: Packing) -> bool:
        """Return True if all weights of the same matmul are packed too, in one order, and in whole panels where packing
        differs.
        """
        module = name.removesuffix(".weight")
        prefix, _, last = module.rpartition(".")
        names = [f"{prefix}.{other}.weight" for other in TOGETHER.get(last, (last,))]
        beside = [other for other in names if other in self._tensors]
        if not beside:
            return True
        packings = [self._packing(other, self._tensors[other]) for other in beside]
        if any(other is None or other.order != packing.order for other in packings):
            return False
        forms = [other.form for other in packings if other is not None]
        if len({*forms}) == 1:
            return True
        if "e4m3" in forms:
            return False
        runs = [
            self._rows(other) for other, form, after in zip(beside, forms, forms[1:], strict=False) if form != after
        ]
        return not any(rows % PANEL_ROWS for rows in runs)

    def _rows(self, name: str) -> int:
        """The rank's rows of a projection."""
        tensor = self._tensors[name]
        if self._shard is None or self._config is None:
            return tensor.shape[0]
        spans = {
            "attention": (self._shard.heads, self._config.num_attention_heads),
            "kv_projection": (self._shard.kv_heads, self._config.num_kv_heads),
            "dense_mlp": (self._shard.mlp, self._config.intermediate_size),
            "shared_experts": (self._shard.shared_mlp, tensor.shape[0]),
            "experts": (self._shard.expert_mlp, tensor.shape[0]),
        }
        if tensor.part not in spans:
            return tensor.shape[0]
        span, whole = spans[tensor.part]
        return tensor.shape[0] * (span[1] - span[0]) // whole
