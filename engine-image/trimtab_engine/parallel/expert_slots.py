"""Expert slots of one layer on one rank whose expert copies may move: slot of each expert, and tokens per slot.

Every rank sees all tokens, so every rank knows the load of every slot. The map is a tensor changed in place, so that
users of its address, such as a CUDA graph, see a new placement.
"""

import torch

from trimtab_engine.parallel.expert_balance import Placement

PATTERNS = 60  # rows of the tables: up to six copies of an expert share its tokens evenly, more of them nearly so


class ExpertSlots:
    """The slots of all ranks, as rank `index` of `num_ranks` sees them."""

    def __init__(
        self, placement: Placement, *, num_experts: int, num_ranks: int, index: int, device: torch.device
    ) -> None:
        self.each = len(placement) // num_ranks
        self._num_experts, self._index = num_experts, index
        patterns = 1 if len(placement) == num_experts else PATTERNS
        self._slot_of = torch.zeros(patterns, num_experts, dtype=torch.int64, device=device)
        self.expert_map = torch.zeros_like(self._slot_of)
        """[patterns, num_experts], read by the kernel: a slot of this rank, or -1 for experts of other ranks."""
        self._load = torch.zeros(len(placement), dtype=torch.int64, device=device)
        self.place(placement)

    def place(self, placement: Placement) -> None:
        """Set the experts of the slots."""
        self.placement = placement
        places: list[list[int]] = [[] for _ in range(self._num_experts)]
        for slot, expert in enumerate(placement):
            places[expert].append(slot)
        rows = [[there[row % len(there)] for there in places] for row in range(self._slot_of.shape[0])]
        slot_of = torch.tensor(rows, dtype=torch.int64)
        first = self._index * self.each
        is_own = (slot_of >= first) & (slot_of < first + self.each)
        self._slot_of.copy_(slot_of)
        self.expert_map.copy_(torch.where(is_own, slot_of - first, -1))

    def count(self, experts: torch.Tensor) -> None:
        """Note that tokens go to these experts [num_tokens, top_k]."""
        rows = torch.arange(experts.shape[0], device=experts.device) % self._slot_of.shape[0]
        slots = self._slot_of[rows[:, None], experts].flatten()
        self._load.index_add_(0, slots, torch.ones_like(slots))

    def take_load(self) -> torch.Tensor:
        """Return the tokens of each slot of all ranks since the last call, in host memory."""
        load = self._load.to("cpu", copy=True)
        self._load.zero_()
        return load
