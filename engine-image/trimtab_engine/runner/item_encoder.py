"""Images and videos on one rank: what a step has to compute of them, and the embeddings that it keeps for later steps.
What is computed when, and what goes, the scheduler says (scheduling/encoder_cache.py).

Ranks that have the tower whole can divide a step's items, each of which is then computed once; all keep all of them:

```
patches        9 | 4 | 4 | 1            two ranks: 9, and 4 + 4 + 1
rank 0         9   0   0   0
rank 1         0   4   4   1            the sum of the two is what both keep
```
"""

from collections.abc import Sequence

import torch

from trimtab_engine.layers.vocabulary import Placed
from trimtab_engine.models.family import Tower
from trimtab_engine.multimodal.items import MultiModalItem
from trimtab_engine.multimodal.patches import as_float32
from trimtab_engine.parallel.groups import RankGroup
from trimtab_engine.scheduling.step_inputs import StepInputs


class ItemEncoder:
    """Embeddings by key. They outlive the tower, whose weights may go and come back. `group`: the ranks that divide
    items among them; None: this one computes all."""

    def __init__(self, device: torch.device, group: RankGroup | None = None) -> None:
        self._device, self._group = device, group
        self._kept: dict[bytes, torch.Tensor] = {}

    def place(self, inputs: StepInputs, tower: Tower) -> Placed | None:
        """Drop and compute what the step says. Returns the embeddings of its tokens that are no text; None: it has
        none."""
        for key in inputs.displaced:
            del self._kept[key]
        items = [item for _, item in inputs.missing]
        embeddings = [_computed(item, tower) for item in items] if self._group is None else self._divided(items, tower)
        self._kept |= {key: rows for (key, _), rows in zip(inputs.missing, embeddings, strict=True)}
        if not inputs.placed:
            return None
        index = [torch.arange(first, first + count) for first, count, _, _ in inputs.placed]
        rows = [self._kept[key][row : row + count] for _, count, key, row in inputs.placed]
        return torch.cat(index).to(self._device), torch.cat(rows)

    def _divided(self, items: Sequence[MultiModalItem], tower: Tower) -> Sequence[torch.Tensor]:
        """All of them, of which this rank computes its own; every rank of the group calls this with the same items."""
        assert self._group is not None
        if not items:
            return []
        owners = shares([item.num_patches for item in items], self._group.size)
        own = {
            number: _computed(items[number], tower) for number, owner in enumerate(owners) if owner == self._group.index
        }
        sizes = [item.num_tokens for item in items]
        whole = torch.zeros(sum(sizes), tower.vision.output_size, dtype=tower.dtype, device=self._device)
        parts = torch.split(whole, sizes)
        for number, rows in own.items():
            parts[number].copy_(rows)
        return [part.clone() for part in torch.split(self._group.all_reduce(whole), sizes)]  # each may go by itself


def shares(costs: Sequence[int], num_ranks: int) -> list[int]:
    """The rank of each item: the costliest first, to the rank that has least so far."""
    loads, owners = [0] * num_ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owner = loads.index(min(loads))
        owners[number], loads[owner] = owner, loads[owner] + costs[number]
    return owners


def _computed(item: MultiModalItem, tower: Tower) -> torch.Tensor:
    assert item.patches is not None  # else it was refused at the core's door
    return tower(torch.from_numpy(as_float32(item.patches)), item.grid)
