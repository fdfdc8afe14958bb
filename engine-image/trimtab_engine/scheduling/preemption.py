"""Preemption cost model and victim selection. Pure.

A victim's KV cache is either recomputed, which costs compute per token, or swapped to host memory and back, which costs
copies per block. Blocks shared with other requests or already in the swap space cost nothing and free nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_engine.scheduling.block_manager import BlockManager
from trimtab_engine.scheduling.policy import PreemptionMode
from trimtab_engine.scheduling.request import Request

VICTIM_CANDIDATES = 8  # of the requests last in line: looking at all costs more than a better victim saves


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Costs measured while serving. The defaults apply before the first measurement."""

    recompute_seconds_per_token: float = 1e-3
    swap_seconds_per_block: float = 1e-4
    """Seconds for one direction."""


def recompute_seconds(request: Request, blocks: BlockManager, costs: PreemptionCosts) -> float:
    """Return the seconds to recompute what preemption would lose."""
    num_tokens = max(0, request.num_computed_tokens - blocks.num_shared_tokens(request))
    return num_tokens * costs.recompute_seconds_per_token


def swap_seconds(request: Request, blocks: BlockManager, costs: PreemptionCosts) -> float:
    """Return the seconds to swap out and in the blocks that only this request holds."""
    return 2 * blocks.num_exclusive(request) * costs.swap_seconds_per_block


def cheaper_mode(
    request: Request, blocks: BlockManager, costs: PreemptionCosts, mode: PreemptionMode
) -> PreemptionMode:
    """Return `mode`, or for auto the cheaper of the other two for this request, regardless of swap space."""
    if mode != "auto":
        return mode
    if swap_seconds(request, blocks, costs) < recompute_seconds(request, blocks, costs):
        return "swap"
    return "recompute"


def choose_victim(
    candidates: Sequence[Request], blocks: BlockManager, costs: PreemptionCosts, mode: PreemptionMode
) -> Request:
    """Return the candidate with the lowest cost per freed block; on a tie the last one in `candidates`, which are in
    scheduling order. A candidate that would free nothing is chosen only if all would free nothing.
    """
    best, best_cost = candidates[-1], float("inf")
    for request in reversed(candidates):
        num_freed = blocks.num_exclusive(request)
        if not num_freed:
            continue
        recompute = recompute_seconds(request, blocks, costs)
        swap = swap_seconds(request, blocks, costs)
        cost = {"recompute": recompute, "swap": swap, "auto": min(recompute, swap)}[mode] / num_freed
        if cost < best_cost:
            best, best_cost = request, cost
    return best
