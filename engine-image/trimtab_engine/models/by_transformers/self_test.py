"""Self-test of transformers models before they serve: two requests computed together, in chunks and over a paged cache,
must give the same results as transformers' own attention for each request by itself. The trial run shows which
attention layers need; only numbers can show that no other part of the model mixes tokens of a step, which belong to
several requests.

```
step 0    request 0: tokens 0 to 5      request 1: tokens 0 to 3
step 1    request 0: tokens 6 to 12     request 1: tokens 4 to 7
step 2    request 0: token 13           request 1: token 8
```
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from trimtab_kernels.paged_attention import AttentionMetadata, build_attention_metadata
from trimtab_modelspec.kv_groups import KVGroup, KVLayerIndex

from trimtab_engine.device.kv_cache import LayerTensors
from trimtab_engine.models.by_transformers.attention import STEP, Step
from trimtab_engine.models.by_transformers.division import HeadShare
from trimtab_engine.models.by_transformers.halves import Halves

BLOCK_SIZE = 16
STOPS = ((6, 13, 14), (4, 8, 9))
"""Per request how many of its tokens are computed after each step: all of them fit into one block."""
OWN = "eager"
"""transformers' own attention, which every model has."""
TOLERANCE = {torch.float32: 1e-3}
TOLERANCE_OF_16_BITS = 0.1
"""Relative to the norm of the hidden states; wrong positions or mixed-up tokens cause differences of several tenths."""


Places = Mapping[nn.Module, KVLayerIndex]


def largest_difference(
    halves: Halves, places: Places, groups: Sequence[KVGroup], dtype: torch.dtype, share: HeadShare | None = None
) -> float:
    """The difference of what both requests get, relative to its norm. `groups` are of one rank; all ranks that share
    the heads compare at once.
    """
    device = next(halves.decoder.parameters()).device
    generator = torch.Generator().manual_seed(0)
    vocabulary = halves.decoder.get_input_embeddings().num_embeddings
    requests = [
        torch.randint(vocabulary, (stops[-1],), generator=generator).to(device=device, dtype=torch.int64)
        for stops in STOPS
    ]
    together = _together(halves, places, groups, requests, dtype, share)
    with _attention(halves, OWN):
        alone = [halves.hidden(ids, torch.arange(len(ids), device=device)) for ids in requests]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(together, alone, strict=True))


def is_too_far(difference: float, dtype: torch.dtype) -> bool:
    """Return True if the difference is larger than rounding explains, or NaN."""
    return not difference <= TOLERANCE.get(dtype, TOLERANCE_OF_16_BITS)


def _together(
    halves: Halves,
    places: Places,
    groups: Sequence[KVGroup],
    requests: Sequence[torch.Tensor],
    dtype: torch.dtype,
    share: HeadShare | None,
) -> list[torch.Tensor]:
    device = requests[0].device
    cache = _cache(groups, len(requests), dtype, device)
    parts: list[list[torch.Tensor]] = [[] for _ in requests]
    begun = [0] * len(requests)
    for number in range(len(STOPS[0])):
        ends = [stops[number] for stops in STOPS]
        spans = list(zip(begun, ends, strict=True))
        metadata = [_metadata(spans, index, group, device) for index, group in enumerate(groups)]
        hidden = halves.hidden(
            torch.cat([ids[first:last] for ids, (first, last) in zip(requests, spans, strict=True)]),
            torch.cat([torch.arange(first, last, device=device) for first, last in spans]),
            placed=None,
            **{STEP: Step(places, cache, metadata, share)},
        )
        for part, rows in zip(parts, torch.split(hidden, [last - first for first, last in spans]), strict=True):
            part.append(rows)
        begun = ends
    return [torch.cat(part) for part in parts]


def _cache(groups: Sequence[KVGroup], num_requests: int, dtype: torch.dtype, device: torch.device) -> LayerTensors:
    """A block of each group for each request."""
    each, num_layers = groups[0].each, max(group.num_layers for group in groups)
    shape = (len(groups) * num_requests, BLOCK_SIZE, each.num_kv_heads, each.key_size)
    keys, values = ([torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)] for _ in range(2))
    return LayerTensors(keys, values)


def _metadata(spans: Sequence[tuple[int, int]], index: int, group: KVGroup, device: torch.device) -> AttentionMetadata:
    blocks = [index * len(spans) + number for number in range(len(spans))]
    slots = [
        block * BLOCK_SIZE + position
        for block, (first, last) in zip(blocks, spans, strict=True)
        for position in range(first, last)
    ]
    each = [([block], first, last - first) for block, (first, last) in zip(blocks, spans, strict=True)]
    is_decode = all(now == 1 for _, _, now in each)
    return build_attention_metadata(
        slots,
        [(table, before + 1) for table, before, _ in each] if is_decode else [],
        [] if is_decode else each,
        block_size=BLOCK_SIZE,
        device=device,
        window=group.each.window,
    )


@contextmanager
def _attention(halves: Halves, implementation: str) -> Iterator[None]:
    """Run all layers with another attention implementation, then restore Trimtab's."""
    configs: list[Any] = list({id(config): config for config in map(_config_of, halves.modules.values())}.values())
    before = [None if config is None else config._attn_implementation for config in configs]
    try:
        for config in configs:
            if config is not None:
                config._attn_implementation = implementation
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            if config is not None:
                config._attn_implementation = own


def _config_of(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    return config if hasattr(config, "_attn_implementation") else None
