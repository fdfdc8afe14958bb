"""Pooling of hidden-state rows to one vector: sums, preemption, and the final vector."""

from array import array

import numpy as np
import pytest
import torch
from trimtab_engine.sampling.pooling import add_up, finished, is_finite, pool
from trimtab_engine.scheduling.pooling import Pooling, PoolingMethod
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling

HIDDEN = torch.arange(40, dtype=torch.float32).reshape(10, 4)


def a_request(method: PoolingMethod) -> Request:
    return Request.of("r", [1] * 9, Sampling(), arrival_time=0.0, pooling=Pooling(method))


def rows(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, np.float32)


def summed(request: Request) -> tuple[list[float], int]:
    return array("f", request.hidden_sum).tolist(), request.num_summed_tokens


def test_sums_come_in_the_order_in_which_they_were_asked_for() -> None:
    """A chunk, then a single token, and rows after a norm (here twice the hidden states)."""
    pooled = [(2, 3), (9, 1), (0, 2), (5, 1)]
    found = pool(HIDDEN, pooled, lambda hidden, index: 2 * hidden[index]).result()
    expected = [2 * HIDDEN[first : first + count].sum(0) for first, count in pooled]
    np.testing.assert_array_equal(found, torch.stack(expected).numpy())


def test_sums_of_half_precision_are_taken_in_single() -> None:
    """2,048 + 1 is 2,048 in float16."""
    hidden = torch.ones(4096, 1, dtype=torch.float16)
    (found,) = pool(hidden, [(0, 4096)], lambda hidden, index: hidden[index]).result()
    assert found.tolist() == [4096.0]
    assert found.dtype == np.float32


def test_chunks_add_up_and_what_is_computed_again_counts_from_there() -> None:
    request = a_request("mean")
    for position, count, value in ((0, 4, 10.0), (4, 2, 5.0)):
        add_up((request, position, count), rows(value))
    assert summed(request) == ([15.0], 6)
    add_up((request, 0, 3), rows(1.0))
    assert summed(request) == ([1.0], 3)
    add_up((request, 6, 3), rows(7.0))  # of the life before: it lands late
    assert summed(request) == ([1.0], 3)
    add_up((request, 3, 6), rows(2.0))
    assert summed(request) == ([3.0], 9)


def test_last_token_pooling_has_one_row() -> None:
    request = a_request("last")
    add_up((request, 8, 1), rows(3.0, 4.0))
    add_up((request, 8, 1), rows(6.0, 8.0))
    assert summed(request) == ([6.0, 8.0], 1)


@pytest.mark.parametrize(
    ("pooling", "num_tokens", "expected"),
    [
        (Pooling(normalize=False), 1, [3.0, 4.0, 12.0]),
        (Pooling(normalize=False), 2, [1.5, 2.0, 6.0]),
        (Pooling(dimensions=2), 7, [0.6, 0.8]),
        (Pooling(), 1, [3 / 13, 4 / 13, 12 / 13]),
        (Pooling(dimensions=2, normalize=False), 1, [3.0, 4.0]),
    ],
)
def test_a_vector_is_divided_cut_and_then_normalised(pooling: Pooling, num_tokens: int, expected: list[float]) -> None:
    found = finished(rows(3.0, 4.0, 12.0).tobytes(), num_tokens, pooling)
    assert array("f", found).tolist() == pytest.approx(expected, rel=1e-7)


def test_zeros_have_no_length_and_stay_zeros() -> None:
    assert array("f", finished(rows(0.0, 0.0).tobytes(), 3, Pooling())).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("value", "is_one"), [(1.0, True), (float("nan"), False), (float("inf"), False)])
def test_nan_is_detected(value: float, is_one: bool) -> None:
    assert is_finite(rows(1.0, value)) is is_one
