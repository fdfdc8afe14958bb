"""Placement of expert copies that balances the load of an expert group's ranks. Pure.

The published greedy idea (DeepSeek-AI's EPLB, 2025; own code): give each spare slot to a further copy of the expert
with the most load per copy, then pack the copies, heaviest first, each onto the least loaded rank with a free slot.
```
slots          rank 0 | 0 1 2 3 |   rank 1 | 4 5 0 1 |     E = 6 logical experts, 2 redundant: 8 slots, 4 per rank
placement      (0, 1, 2, 3, 4, 5, 0, 1): the logical expert in each slot
```
The copies of an expert share its tokens evenly. All ranks compute the same from the same loads.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

Placement = tuple[int, ...]
"""The logical expert in each slot; rank r has slots [r * n, (r + 1) * n)."""


def first_placement(num_experts: int, num_redundant: int) -> Placement:
    """Return the initial placement: in order, then the first experts again."""
    return tuple(range(num_experts)) + tuple(slot % num_experts for slot in range(num_redundant))


def replicate(loads: Sequence[int], num_slots: int) -> list[int]:
    """Return the number of copies of each expert, at least one, in total `num_slots`: each further copy goes to the
    expert with the most load per copy.
    """
    copies = [1] * len(loads)
    heaviest = [(-float(load), expert) for expert, load in enumerate(loads)]
    heapq.heapify(heaviest)
    for _ in range(num_slots - len(loads)):
        _, expert = heapq.heappop(heaviest)
        copies[expert] += 1
        heapq.heappush(heaviest, (-loads[expert] / copies[expert], expert))
    return copies


def pack(loads: Sequence[int], copies: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return the experts of each rank, equally many. Among equally loaded ranks one without a copy of the expert is
    preferred.
    """
    parts = [(loads[expert] / count, expert) for expert, count in enumerate(copies) for _ in range(count)]
    parts.sort(key=lambda part: (-part[0], part[1]))
    room = len(parts) // num_ranks
    packs: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for load, expert in parts:
        rank = min(
            (rank for rank in range(num_ranks) if len(packs[rank]) < room),
            key=lambda rank: (totals[rank], expert in packs[rank], rank),
        )
        packs[rank].append(expert)
        totals[rank] += load
    return packs


def rank_loads(loads: Sequence[int], placement: Placement, num_ranks: int) -> list[float]:
    """Return the load of each rank, with copies sharing evenly."""
    each = len(placement) // num_ranks
    copies = _copies(placement, len(loads))
    shares = [loads[expert] / copies[expert] for expert in placement]
    return [sum(shares[rank * each : (rank + 1) * each]) for rank in range(num_ranks)]


def balancedness(of_ranks: Sequence[Sequence[float]]) -> float | None:
    """Return mean over maximum of the ranks' loads, summed over layers (one row each): 1 is perfect.
    None without load.
    """
    most = sum(max(row) for row in of_ranks)
    return sum(sum(row) / len(row) for row in of_ranks) / most if most else None


def rebalance(loads: Sequence[int], present: Placement, num_ranks: int) -> Placement:
    """Return the placement for these loads of one layer: the greedy one, unless the present or the first one is as
    good.

    Never worse for `loads` than either of those, and the present one where nothing is better: moving costs.
    """
    packs = pack(loads, replicate(loads, len(present)), num_ranks)
    greedy = _settled(packs, present)
    first = first_placement(len(loads), len(present) - len(loads))
    return min((present, greedy, first), key=lambda placement: max(rank_loads(loads, placement, num_ranks)))


def _settled(packs: list[list[int]], present: Placement) -> Placement:
    """Return the assignment of packs to ranks, and of experts to slots, that needs the fewest moves."""
    each = len(packs[0])
    held = [list(present[rank * each : (rank + 1) * each]) for rank in range(len(packs))]
    overlaps = sorted(
        (
            (len(set(mine) & set(packed)), -rank, -pack)
            for rank, mine in enumerate(held)
            for pack, packed in enumerate(packs)
        ),
        reverse=True,
    )
    pack_of: dict[int, int] = {}
    for _, rank, index in overlaps:
        if -rank not in pack_of and -index not in pack_of.values():
            pack_of[-rank] = -index
    settled: list[int] = []
    for rank, mine in enumerate(held):
        left = list(packs[pack_of[rank]])
        slots: list[int | None] = []
        for expert in mine:
            slots.append(expert if expert in left else None)
            if expert in left:
                left.remove(expert)
        settled += [left.pop(0) if slot is None else slot for slot in slots]
    return tuple(settled)


@dataclass(frozen=True, slots=True)
class Move:
    """Move of one expert's weights from a slot of the old placement to one of the new."""

    source: int
    target: int


def moves(old: Placement, new: Placement, num_ranks: int) -> list[Move]:
    """Return the copies to make, by target slot. Sources are on the same rank if possible, otherwise the holders
    alternate. All sources are read before any target is written.
    """
    each = len(old) // num_ranks
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(old):
        holders.setdefault(expert, []).append(slot)
    made = []
    for target, expert in enumerate(new):
        if old[target] == expert:
            continue
        there = holders[expert]
        own = [slot for slot in there if slot // each == target // each]
        made.append(Move(own[0] if own else there[target % len(there)], target))
    return made


def _copies(placement: Placement, num_experts: int) -> list[int]:
    copies = [0] * num_experts
    for expert in placement:
        copies[expert] += 1
    return copies
