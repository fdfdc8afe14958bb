"""Dependent launches give the results of ordinary launches. Only a GPU overlaps kernels; the interpreter runs them in
order. kernel_benchmarks/aot/test_dependence.py checks in the compiled code what runs before the wait.
"""

import os

import pytest
import torch
from kernel_benchmarks.layer import rows
from kernel_benchmarks.row import check

ON_GPU = os.environ["TRITON_INTERPRET"] == "0"
REPETITIONS = 50


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU that starts kernels ahead")
@pytest.mark.parametrize("in_a_graph", [False, True])
def test_layer_results_do_not_depend_on_launch_mode(in_a_graph: bool) -> None:
    found = list(rows(torch.device("cuda"), tiny=True))
    if len(found) < 2:
        pytest.skip("before Hopper no kernel is started ahead")
    one_by_one, ahead = found
    check(one_by_one)
    check(ahead)
    expected = one_by_one.ours().clone()
    run = ahead.ours
    if in_a_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = ahead.ours()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        run = replay
    for _ in range(REPETITIONS):
        assert torch.equal(run(), expected)
