"""What preempting a request costs, and which one to preempt: pure.

A victim's KV cache is either computed again, which costs compute per token, or moved to host memory and back, which
costs copies per block. What other requests share with it, or what lies in the swap space already, costs nothing and
frees nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_engine.scheduling.block_manager import BlockManager
from trimtab_engine.scheduling.policy import PreemptionMode
from trimtab_engine.scheduling.request import Request

VICTIM_CANDIDATES = 8  # of the requests last in line: looking at all costs more than a better victim saves


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Measured while serving. The defaults are for an engine that has measured nothing yet."""

    recompute_seconds_per_token: float = 1e-3
    swap_seconds_per_block: float = 1e-4
    """One way."""


def recompute_seconds(request: Request, blocks: BlockManager, costs: PreemptionCosts) -> float:
    """To compute again what would be lost."""
    num_tokens = max(0, request.num_computed_tokens - blocks.num_shared_tokens(request))
    return num_tokens * costs.recompute_seconds_per_token


def swap_seconds(request: Request, blocks: BlockManager, costs: PreemptionCosts) -> float:
    """To move out, and in again, what only this request holds."""
    return 2 * blocks.num_exclusive(request) * costs.swap_seconds_per_block


def cheaper_mode(
    request: Request, blocks: BlockManager, costs: PreemptionCosts, mode: PreemptionMode
) -> PreemptionMode:
    """`mode`, or for auto the cheaper of the other two for this request. Whether swap has room is another question."""
    if mode != "auto":
        return mode
    if swap_seconds(request, blocks, costs) < recompute_seconds(request, blocks, costs):
        return "swap"
    return "recompute"


def choose_victim(
    candidates: Sequence[Request], blocks: BlockManager, costs: PreemptionCosts, mode: PreemptionMode
) -> Request:
    """The candidate with the lowest cost per block that it would free; among equals the one served last.

    They are in the order in which they are served. One that would free nothing goes only when all are like that.
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
