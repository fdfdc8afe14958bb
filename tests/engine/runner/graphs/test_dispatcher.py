"""Dispatch from step shape to graph."""

from dataclasses import replace

import pytest
from trimtab_engine.config.graphs import CUDAGraphMode
from trimtab_engine.runner.graphs.dispatcher import Dispatcher, Eager
from trimtab_engine.runner.graphs.plan import NO_GRAPHS, GraphKey, GraphPlan
from trimtab_engine.scheduling.step_inputs import GroupInputs, StepInputs, StepShape

BOTH = GraphPlan(CUDAGraphMode.FULL_AND_PIECEWISE, (1, 4, 16), ((1, (1, 4)), (3, (3, 12))))
DECODE_ONLY = GraphPlan(CUDAGraphMode.FULL_DECODE_ONLY, (), ((1, (1, 4)),))
PIECEWISE = GraphPlan(CUDAGraphMode.PIECEWISE, (1, 4, 16))


@pytest.mark.parametrize(
    ("plan", "num_tokens", "per_sequence", "expected"),
    [
        (BOTH, 1, 1, GraphKey(1, 1)),
        (BOTH, 2, 1, GraphKey(4, 1)),  # padded to the next size
        (BOTH, 4, 1, GraphKey(4, 1)),
        (BOTH, 5, 1, GraphKey(16)),  # too many requests for a whole graph: the pieces still fit
        (BOTH, 6, 3, GraphKey(12, 3)),  # two requests with two drafts each
        (BOTH, 4, 2, GraphKey(4)),  # no graph has two tokens per sequence
        (BOTH, 7, None, GraphKey(16)),
        (BOTH, 17, None, Eager.TOO_LARGE),
        (BOTH, 17, 1, Eager.TOO_LARGE),
        (BOTH, 0, None, Eager.OFF),
        (DECODE_ONLY, 3, 1, GraphKey(4, 1)),
        (DECODE_ONLY, 5, 1, Eager.TOO_LARGE),
        (DECODE_ONLY, 3, None, Eager.MIXED),
        (DECODE_ONLY, 50, None, Eager.TOO_LARGE),
        (PIECEWISE, 3, 1, GraphKey(4)),
        (NO_GRAPHS, 1, 1, Eager.OFF),
    ],
)
def test_a_step_takes_the_smallest_graph_that_holds_it(
    plan: GraphPlan, num_tokens: int, per_sequence: int | None, expected: GraphKey | Eager
) -> None:
    assert Dispatcher(plan).dispatch(StepShape(num_tokens, per_sequence)) == expected


def test_steps_with_adapters_use_adapter_graphs() -> None:
    dispatcher = Dispatcher(replace(BOTH, with_adapters=True))
    assert dispatcher.dispatch(StepShape(3, 1, has_adapters=True)) == GraphKey(4, 1, with_adapters=True)
    assert dispatcher.dispatch(StepShape(7, None, has_adapters=True)) == GraphKey(16, with_adapters=True)
    assert dispatcher.dispatch(StepShape(17, None, has_adapters=True)) == Eager.TOO_LARGE
    assert dispatcher.dispatch(StepShape(3, 1)) == GraphKey(4, 1)
    assert Dispatcher(BOTH).dispatch(StepShape(3, 1, has_adapters=True)) == GraphKey(4, 1), "a draft model has none"


def test_steps_with_images_are_eager_whatever_their_size() -> None:
    shape = StepShape(4, None, has_items=True)
    assert {Dispatcher(plan).dispatch(shape) for plan in (BOTH, DECODE_ONLY, PIECEWISE)} == {Eager.IMAGES}
    assert Dispatcher(NO_GRAPHS).dispatch(shape) == Eager.OFF


def inputs(num_decodes: int, *chunks: int) -> StepInputs:
    num_tokens = num_decodes + sum(chunks)
    return StepInputs(
        [0] * num_tokens,
        [0] * num_tokens,
        [],
        [GroupInputs([([0], 1)] * num_decodes, [([0], 0, now) for now in chunks])],
    )


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (inputs(3), StepShape(3, 1)),
        (inputs(0, 4, 4), StepShape(8, 4)),
        (inputs(0, 4, 5), StepShape(9, None)),
        (inputs(1, 4), StepShape(5, None)),
        (inputs(0), StepShape(0, None)),
    ],
)
def test_a_step_is_uniform_when_its_sequences_have_equally_many_tokens(step: StepInputs, expected: StepShape) -> None:
    assert step.shape == expected


def test_step_shape_with_images_omits_sequences() -> None:
    step = inputs(0, 4, 4)
    step.placed = [(1, 2, b"a picture", 0)]
    assert step.shape == StepShape(8, None, has_items=True)
