"""Images and videos on one rank: what a step has to compute of them, and the embeddings that it keeps for later steps.
What is computed when, and what goes, the scheduler says (scheduling/encoder_cache.py)."""

import torch

from trimtab_engine.layers.vocabulary import Placed
from trimtab_engine.models.family import Tower
from trimtab_engine.multimodal.patches import as_float32
from trimtab_engine.scheduling.step_inputs import StepInputs


class ItemEncoder:
    """Embeddings by key. They outlive the tower, whose weights may go and come back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[bytes, torch.Tensor] = {}

    def place(self, inputs: StepInputs, tower: Tower) -> Placed | None:
        """Drop and compute what the step says. Returns the embeddings of its tokens that are no text; None: it has
        none."""
        for key in inputs.displaced:
            del self._kept[key]
        for key, item in inputs.missing:
            assert item.patches is not None  # else it was refused at the core's door
            self._kept[key] = tower(torch.from_numpy(as_float32(item.patches)), item.grid)
        if not inputs.placed:
            return None
        index = [torch.arange(first, first + count) for first, count, _, _ in inputs.placed]
        rows = [self._kept[key][row : row + count] for _, count, key, row in inputs.placed]
        return torch.cat(index).to(self._device), torch.cat(rows)
