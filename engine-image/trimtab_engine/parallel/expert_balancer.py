"""Expert parallel load balancing while serving: measures, decides and moves between two steps, on every rank.

All ranks of an expert group run the same steps, so each counts them itself and rearranges after the same one. Decisions
are equal because they use one sum of all measurements (expert_balance.py). Expert placement does not change results,
except for the order in which the ranks' parts are summed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trimtab_engine.config.experts import EplbConfig
from trimtab_engine.messages.requests import ExpertBalance
from trimtab_engine.parallel.expert_balance import Move, balancedness, moves, rebalance
from trimtab_engine.parallel.expert_slots import ExpertSlots
from trimtab_engine.parallel.groups import RankGroup

PARTS_OF_WINDOW = 10  # so coarsely the window moves on and the gauge is set, unless each line of the log does it

logger = logging.getLogger("trimtab_engine.eplb")


class BalancedLayer(Protocol):
    """An MoE layer whose experts can move. `expert_tensors` have one entry per slot of this rank, contiguous."""

    @property
    def slots(self) -> ExpertSlots: ...

    @property
    def expert_tensors(self) -> Sequence[torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens by layer and logical expert in some steps."""

    num_steps: int
    loads: torch.Tensor
    """[layers, experts] int64"""


class ExpertBalancer:
    """Balances the experts of this rank's layers, which the ranks of `group` share."""

    def __init__(self, config: EplbConfig, layers: Sequence[BalancedLayer], num_experts: int, group: RankGroup) -> None:
        self._config, self._layers, self._group = config, layers, group
        own_steps = max(1, config.window_size // PARTS_OF_WINDOW)
        self._part_steps = config.log_balancedness_interval if config.log_balancedness else own_steps
        self._window: deque[_Part] = deque()
        self._loads = torch.zeros(len(layers), num_experts, dtype=torch.int64)
        """Tokens for each layer and expert over the whole window."""
        self._window_steps = 0
        self._num_steps = 0
        self._steps_of_part = 0
        self._news = ExpertBalance()
        self._news_lock = threading.Lock()  # steps may run in a separate thread

    @torch.inference_mode()
    def on_step(self) -> None:
        """A step was run: all ranks of the group call this after the same one."""
        if self._num_steps == 0:  # profiling and warm-up steps do not count as load
            for layer in self._layers:
                layer.slots.take_load()
        self._num_steps += 1
        self._steps_of_part += 1
        is_due = self._num_steps % self._config.step_interval == 0
        if is_due or self._steps_of_part >= self._part_steps:
            self._end_part()
        if is_due:
            self._rearrange()

    def take_report(self) -> ExpertBalance | None:
        """Return measurements and moves since the last call. None if there are none."""
        with self._news_lock:
            news, self._news = self._news, ExpertBalance()
        return None if news == ExpertBalance() else news

    def _end_part(self) -> None:
        """Record the load of the newest steps."""
        by_slot = torch.stack([layer.slots.take_load() for layer in self._layers])
        of_ranks = by_slot.view(len(by_slot), self._group.size, -1).sum(dim=-1)
        placements = torch.tensor([layer.slots.placement for layer in self._layers])
        loads = torch.zeros_like(self._loads).scatter_add_(1, placements, by_slot)
        part, self._steps_of_part = _Part(self._steps_of_part, loads), 0
        self._window.append(part)
        self._loads += loads
        self._window_steps += part.num_steps
        while self._window_steps - self._window[0].num_steps >= self._config.window_size:
            oldest = self._window.popleft()
            self._loads -= oldest.loads
            self._window_steps -= oldest.num_steps
        found = balancedness(of_ranks.tolist())
        if found is not None:
            with self._news_lock:
                self._news.balancedness = found
            if self._config.log_balancedness and self._group.index == 0:
                self._log(of_ranks, found, part.num_steps)

    def _log(self, of_ranks: torch.Tensor, found: float, num_steps: int) -> None:
        """Log vLLM's line; of_ranks [layers, ranks]."""
        logger.info(
            "EPLB step: %d, avg_tokens=%.2f, max_tokens=%d, balancedness=%.4f, steps until the next rearrangement: %d",
            self._num_steps,
            of_ranks.double().mean(dim=1).sum().item() / num_steps,
            of_ranks.amax(dim=1).sum().item() // num_steps,
            found,
            -self._num_steps % self._config.step_interval,
        )

    def _rearrange(self) -> None:
        began = time.perf_counter()
        loads = self._agreed_loads()
        num_moved = received = 0
        for layer, load in zip(self._layers, loads, strict=True):
            slots = layer.slots
            placement = rebalance(load, slots.placement, self._group.size)
            if placement != slots.placement:
                made = moves(slots.placement, placement, self._group.size)
                received += self._move(layer, made)
                slots.place(placement)
                num_moved += len(made)
        seconds = time.perf_counter() - began
        with self._news_lock:
            self._news.num_rearrangements += 1
            self._news.moved_bytes += received
            self._news.seconds += seconds
        if self._group.index == 0:
            logger.info("Rearranged experts in %.2f seconds: %d of them moved", seconds, num_moved)

    def _agreed_loads(self) -> list[list[int]]:
        """Return [layers, experts] summed over the ranks, so that all decide on the same data."""
        gathered = self._group.all_gather(self._loads.flatten().to(self._group.device))
        summed: list[list[int]] = gathered.view(self._group.size, *self._loads.shape).sum(dim=0).tolist()
        return summed

    def _move(self, layer: BalancedLayer, made: list[Move]) -> int:
        """Carry out this rank's part of the moves. Return the bytes received from other ranks."""
        each, own = layer.slots.each, self._group.index
        sending: dict[int, list[int]] = {}
        receiving: dict[int, list[int]] = {}
        near: list[tuple[int, int]] = []
        for move in made:  # both ends see a pair's moves in this order
            source, target = move.source // each, move.target // each
            if source == own == target:
                near.append((move.source % each, move.target % each))
            elif source == own:
                sending.setdefault(target, []).append(move.source % each)
            elif target == own:
                receiving.setdefault(source, []).append(move.target % each)
        tensors = layer.expert_tensors
        outgoing = {rank: _packed(tensors, slots) for rank, slots in sending.items()}
        kept = _packed(tensors, [source for source, _ in near]) if near else None
        row_bytes = sum(tensor[0].nbytes for tensor in tensors)
        sizes = {rank: (len(slots), row_bytes) for rank, slots in receiving.items()}
        incoming = self._group.exchange(outgoing, sizes)
        if kept is not None:
            _unpack(kept, tensors, [target for _, target in near])
        for rank, slots in receiving.items():
            _unpack(incoming[rank], tensors, slots)
        return sum(part.nbytes for part in incoming.values())


def _packed(tensors: Sequence[torch.Tensor], slots: list[int]) -> torch.Tensor:
    """Return all weights of these slots as [slots, bytes], a copy."""
    wanted = torch.tensor(slots, dtype=torch.int64, device=tensors[0].device)
    return torch.cat([_as_bytes(tensor.index_select(0, wanted)) for tensor in tensors], dim=1)


def _unpack(packed: torch.Tensor, tensors: Sequence[torch.Tensor], slots: list[int]) -> None:
    """Write the result of _packed into these slots."""
    first = 0
    for tensor in tensors:
        end = first + tensor[0].nbytes
        own = packed[:, first:end].contiguous().to(tensor.device)
        for row, slot in enumerate(slots):
            _as_bytes(tensor[slot : slot + 1]).copy_(own[row : row + 1])
        first = end


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return [slots, ...] as [slots, bytes], the same memory."""
    return tensor.flatten(1).view(torch.uint8)
