"""Trimtab's paged attention as one of transformers' attention implementations: a layer's queries, keys and values come
in, its keys and values are written into the KV cache, and the sums over what each token sees go back.
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
"""The keyword by which the step reaches every layer: transformers hands through what it does not know."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a layer needs to know of a step beside its queries, keys and values."""

    places: Mapping[nn.Module, KVLayerIndex]
    """Where each attention module keeps its tokens."""
    kv_cache: KVTensors
    metadata: Sequence[AttentionMetadata]
    """An entry per KV group."""
    share: HeadShare | None = None
    """This rank's heads; None: it has all of them."""


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
    """query, key, value [1, heads, num_tokens, head_size] -> [1, num_tokens, heads, head_size]. s_aux [num_heads]: each
    head's sink; softcap: where scores are bent to. What else a layer may say changes nothing, or was refused when the
    model was tried out."""
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
