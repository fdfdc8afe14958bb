"""Trimtab's paged attention as an attention implementation of transformers: it takes a layer's queries, keys and
values, writes keys and values into the KV cache, and returns the attention output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from trimtab_kernels.paged_attention import AttentionMetadata, paged_attention
from trimtab_kernels.reshape_and_cache import reshape_and_cache
from trimtab_modelspec.kv_groups import KVLayerIndex

from trimtab_engine.device.kv_cache import KVTensors
from trimtab_engine.models.by_transformers.division import HeadShare

IMPLEMENTATION = "trimtab_paged"
STEP = "trimtab_step"
"""Keyword argument that carries the step to every layer: transformers passes unknown keywords through."""


@dataclass(frozen=True, slots=True)
class Step:
    """A layer's inputs for a step, in addition to its queries, keys and values."""

    places: Mapping[nn.Module, KVLayerIndex]
    """KV layer index of each attention module."""
    kv_cache: KVTensors
    metadata: Sequence[AttentionMetadata]
    """An entry per KV group."""
    share: HeadShare | None = None
    """This rank's heads; None if the rank has all heads."""


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    trimtab_step: Step,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Write keys and values, then attend: query, key, value [1, heads, num_tokens, head_size] -> [1, num_tokens, heads,
    head_size]. s_aux [num_heads]: the sink of each head; softcap: the soft cap of the scores. All other arguments have
    no effect, or were rejected by the trial run.
    """
    place = trimtab_step.places[module]
    keys, values = trimtab_step.kv_cache.keys[place.index], trimtab_step.kv_cache.values[place.index]
    metadata = trimtab_step.metadata[place.group]
    share = trimtab_step.share
    if share is not None and query.shape[1] == share.num_heads:  # by the model's plan every rank gets all heads
        query, key, value = query[:, share.own], key[:, share.own_kv], value[:, share.own_kv]
        s_aux = None if s_aux is None else s_aux[share.own]
    else:
        share = None
    rows, new_keys, new_values = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    slots = metadata.slot_mapping
    reshape_and_cache(new_keys[: len(slots)], new_values[: len(slots)], keys, values, slots)
    scale = rows.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sinks = None if s_aux is None else s_aux.float()
    output = paged_attention(rows, new_keys, new_values, keys, values, metadata, scale, sinks=sinks, softcap=softcap)
    return (output if share is None else share.gathered(output)).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attend)
