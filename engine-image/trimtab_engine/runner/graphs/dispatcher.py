"""Selection of the graph for a step: a table from step shape to the smallest sufficient graph. Pure, so that all ranks
of a step select the same graph from equal plans and shapes.
"""

from bisect import bisect_left
from enum import Enum

from trimtab_engine.runner.graphs.plan import GraphKey, GraphPlan
from trimtab_engine.scheduling.step_inputs import StepShape


class Eager(Enum):
    """Reason why a step replays no graph: the label `reason` of trimtab_eager_steps_total."""

    OFF = "off"
    """There are no graphs: --enforce-eager, mode none, or ranks that talk through host memory."""
    TOO_LARGE = "too_large"
    """More tokens than the largest graph."""
    MIXED = "mixed"
    """Sequences have different token counts, and the mode has graphs for decode steps only."""
    IMAGES = "images"
    """Some tokens are of images or videos: graphs take all embeddings from the vocabulary's."""


class Dispatcher:
    """Chooses among the graphs of a plan. Whole-decode graphs come first: they leave no work to the host."""

    def __init__(self, plan: GraphPlan) -> None:
        self._full = dict(plan.full)
        self._piecewise = plan.piecewise
        self._largest = plan.max_tokens
        self._with_adapters = plan.with_adapters

    def dispatch(self, shape: StepShape) -> GraphKey | Eager:
        """Return the smallest graph that holds the step, or the reason why there is none."""
        if not self._largest or not shape.num_tokens:
            return Eager.OFF
        if shape.has_items:
            return Eager.IMAGES
        tokens, with_adapters = shape.tokens_per_sequence, shape.has_adapters and self._with_adapters
        size = None if tokens is None else _first_at_least(self._full.get(tokens, ()), shape.num_tokens)
        if size is not None:
            return GraphKey(size, tokens, with_adapters)
        size = _first_at_least(self._piecewise, shape.num_tokens)
        if size is not None:
            return GraphKey(size, None, with_adapters)
        if shape.num_tokens > self._largest or self._piecewise or tokens in self._full:
            return Eager.TOO_LARGE
        return Eager.MIXED


def _first_at_least(sizes: tuple[int, ...], num_tokens: int) -> int | None:
    place = bisect_left(sizes, num_tokens)
    return sizes[place] if place < len(sizes) else None
