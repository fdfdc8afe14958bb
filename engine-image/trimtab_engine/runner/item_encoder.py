"""Vision encoder runs and cached embeddings of images and videos on one rank.
The scheduler controls computation and eviction (scheduling/encoder_cache.py).

Ranks with the whole vision encoder can divide a step's items, so that each is computed once; every rank keeps all
results:

```
patches        9 | 4 | 4 | 1            two ranks: 9, and 4 + 4 + 1
rank 0         9   0   0   0
rank 1         0   4   4   1            the sum of the two is what both keep
```
"""

import math
from collections.abc import Sequence

import torch

from trimtab_engine.config.vision import VisionConfig
from trimtab_engine.device.transfer import send
from trimtab_engine.layers.vocabulary import Placed
from trimtab_engine.models.family import VisionEncoder
from trimtab_engine.multimodal.items import MEANINGS_BYTES, MultiModalItem, Patches
from trimtab_engine.multimodal.patches import as_float32
from trimtab_engine.multimodal.processor_settings import NUM_LEVELS
from trimtab_engine.parallel.groups import RankGroup
from trimtab_engine.scheduling.step_inputs import StepInputs

Grid = tuple[int, int, int]


class ItemEncoder:
    """Embeddings by key. They outlive the encoder, whose weights may be dropped and reloaded. `group`: the ranks that
    divide items; None means this rank computes all. On CUDA it never waits for the device.
    """

    def __init__(self, device: torch.device, group: RankGroup | None = None) -> None:
        self._device, self._group = device, group
        self._kept: dict[bytes, torch.Tensor] = {}

    @property
    def are_divided(self) -> bool:
        """True if other ranks compute some of a step's items."""
        return self._group is not None

    def warm_up(self, tower: VisionEncoder, most_tokens: int) -> None:
        """Compute the largest and the smallest possible item with dummy pixels, so that memory is measured and kernels
        are compiled. The largest runs first, so that the smaller one fits into its memory.
        """
        for grid in reversed(tower.vision.extreme_grids(most_tokens)):
            self._computed(_black(grid, tower.vision), tower)

    def place(self, inputs: StepInputs, tower: VisionEncoder) -> Placed | None:
        """Drop and compute the step's items. Return the embeddings of its non-text tokens. None if it has none."""
        for key in inputs.displaced:
            del self._kept[key]
        items = [item for _, item in inputs.missing]
        alone = self._group is None
        embeddings = [self._computed(item, tower) for item in items] if alone else self._divided(items, tower)
        self._kept |= {key: rows for (key, _), rows in zip(inputs.missing, embeddings, strict=True)}
        if not inputs.placed:
            return None
        index = [torch.arange(first, first + count) for first, count, _, _ in inputs.placed]
        rows = [self._kept[key][row : row + count] for _, count, key, row in inputs.placed]
        return send(torch.cat(index), self._device), torch.cat(rows)

    def _divided(self, items: Sequence[MultiModalItem], tower: VisionEncoder) -> Sequence[torch.Tensor]:
        """Compute this rank's share of the items and gather all of them; every rank of the group calls this with the
        same items.
        """
        assert self._group is not None
        if not items:
            return []
        owners = shares([item.num_patches for item in items], self._group.size)
        own = {
            number: self._computed(items[number], tower)
            for number, owner in enumerate(owners)
            if owner == self._group.index
        }
        sizes = [item.num_tokens for item in items]
        whole = torch.zeros(sum(sizes), tower.vision.output_size, dtype=tower.dtype, device=self._device)
        parts = torch.split(whole, sizes)
        for number, rows in own.items():
            parts[number].copy_(rows)
        return [part.clone() for part in torch.split(self._group.all_reduce(whole), sizes)]  # each may go by itself

    def _computed(self, item: MultiModalItem, tower: VisionEncoder) -> torch.Tensor:
        assert item.patches is not None  # else it was refused at the core's door
        if self._device.type == "cpu":
            return tower(torch.from_numpy(as_float32(item.patches)), item.grid)
        return tower(convert_patches(item.patches, self._device, tower.dtype), item.grid)


def shares(costs: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank of each item: the costliest first, to the rank with the least cost so far."""
    loads, owners = [0] * num_ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owner = loads.index(min(loads))
        owners[number], loads[owner] = owner, loads[owner] + costs[number]
    return owners


def convert_patches(patches: Patches, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return [num_rows, row_size] of whole patches: as_float32() in this dtype, computed on the device from 8-bit
    values.
    """
    values = send(torch.frombuffer(bytearray(patches.values), dtype=torch.uint8), device)
    meanings = send(torch.frombuffer(bytearray(patches.meanings), dtype=torch.float32), device).to(dtype)
    tables = torch.arange(0, len(meanings), NUM_LEVELS, dtype=torch.int32, device=device)  # where each channel's begins
    places = values.view(patches.num_rows, patches.num_channels, -1).to(torch.int32).add_(tables.view(1, -1, 1))
    return meanings.index_select(0, places.flatten()).view(patches.num_rows, patches.row_size)


def _black(grid: Grid, vision: VisionConfig) -> MultiModalItem:
    """Return an item whose pixels are all 0."""
    patches = Patches(
        vision.row_size, bytes(math.prod(grid) * vision.row_size), bytes(MEANINGS_BYTES * vision.num_channels)
    )
    return MultiModalItem("image", b"", vision.num_tokens(grid) or 0, grid, patches)
