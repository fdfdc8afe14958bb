"""Planned graphs: vLLM's sizes, none above the budget, decode sizes for every request."""

from dataclasses import replace

import msgspec
import pytest
from trimtab_engine.config.adapters import AdapterConfig
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.graphs import CompilationConfig, CUDAGraphMode
from trimtab_engine.runner.graphs.plan import (
    NO_GRAPHS,
    GraphKey,
    GraphPlan,
    capture_sizes,
    cuda_graph_plan,
    decode_sizes,
    plan_graphs,
)

DEFAULT = CompilationConfig()


def a_plan(
    compilation: CompilationConfig = DEFAULT,
    *,
    eager: bool = False,
    level: int = 2,
    seqs: int = 8,
    tokens: int = 64,
    drafts: int = 0,
) -> GraphPlan:
    return plan_graphs(
        compilation,
        enforce_eager=eager,
        optimization_level=level,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        num_drafts=drafts,
    )


@pytest.mark.parametrize(
    ("seqs", "tokens", "drafts", "expected"),
    [
        (1, 2048, 0, (1, 2)),  # twice the requests
        (8, 2048, 0, (1, 2, 4, 8, 16)),
        (256, 8192, 0, (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))),
        (1024, 8192, 0, (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))),  # 512 at most
        (256, 100, 0, (1, 2, 4, *range(8, 100, 8), 100)),  # the token budget, itself a size
        (2, 2048, 4, (1, 2, 4, 8, 16, 20)),  # rows of drafts count
    ],
)
def test_default_sizes_are_vllms(seqs: int, tokens: int, drafts: int, expected: tuple[int, ...]) -> None:
    assert capture_sizes(DEFAULT, max_num_seqs=seqs, max_num_batched_tokens=tokens, num_drafts=drafts) == expected


def test_written_sizes_are_sorted_without_doubles_and_cut_at_the_budget() -> None:
    written = CompilationConfig(cudagraph_capture_sizes=(8, 1, 64, 8, 65))
    assert capture_sizes(written, max_num_seqs=4, max_num_batched_tokens=64) == (1, 8, 64)


def test_the_largest_size_may_be_written_alone() -> None:
    written = CompilationConfig(max_cudagraph_capture_size=20)
    assert capture_sizes(written, max_num_seqs=256, max_num_batched_tokens=2048) == (1, 2, 4, 8, 16, 20)


@pytest.mark.parametrize(
    ("sizes", "per_sequence", "seqs", "tokens", "expected"),
    [
        ((1, 2, 4, 8, 16), 1, 8, 64, (1, 2, 4, 8)),  # no batch has more than 8 rows
        ((1, 2, 4, 8, 16), 1, 6, 64, (1, 2, 4, 6)),  # the last one holds every request, without a row too much
        ((1, 2, 4), 1, 100, 64, (1, 2, 4)),  # written sizes are not added to
        ((1, 2, 4, 8, 16, 20), 5, 4, 64, (5, 10, 20)),  # multiples of the rows of one sequence
        ((1, 2, 4, 8), 5, 4, 12, (5, 10)),  # the budget holds two sequences of five
        ((1, 2), 5, 4, 4, ()),  # not even one
    ],
)
def test_decode_sizes_are_whole_sequences_up_to_all_requests(
    sizes: tuple[int, ...], per_sequence: int, seqs: int, tokens: int, expected: tuple[int, ...]
) -> None:
    assert decode_sizes(sizes, per_sequence, seqs, tokens) == expected


@pytest.mark.parametrize(
    ("level", "mode"),
    [
        (1, CUDAGraphMode.PIECEWISE),
        (2, CUDAGraphMode.FULL_AND_PIECEWISE),
        (3, CUDAGraphMode.FULL_AND_PIECEWISE),
    ],
)
def test_a_level_chooses_the_mode(level: int, mode: CUDAGraphMode) -> None:
    assert a_plan(level=level).mode is mode


def test_a_written_mode_wins_over_the_level() -> None:
    written = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)
    plan = a_plan(written, level=0)
    assert (plan.piecewise, plan.full) == ((), ((1, (1, 2, 4, 8)),))


@pytest.mark.parametrize(
    "plan",
    [
        a_plan(eager=True),
        a_plan(CompilationConfig(cudagraph_mode=CUDAGraphMode.PIECEWISE), eager=True),
        a_plan(level=0),
        a_plan(CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE)),
        a_plan(CompilationConfig(max_cudagraph_capture_size=0)),
        a_plan(CompilationConfig(cudagraph_capture_sizes=())),
    ],
    ids=["enforce eager", "enforce eager over a mode", "level 0", "mode none", "largest 0", "no sizes"],
)
def test_no_graphs_without_request(plan: GraphPlan) -> None:
    assert plan == NO_GRAPHS
    assert plan.keys == []
    assert plan.max_tokens == 0


@pytest.mark.parametrize(
    ("seqs", "beyond"),
    [
        (512, ()),
        (520, (520,)),
        (1024, (*range(576, 1024, 64), 1024)),
        (1536, (*range(576, 1024, 64), *range(1024, 1536, 128), 1536)),
    ],
)
def test_every_seat_decodes_in_a_graph_where_no_sizes_are_written(seqs: int, beyond: tuple[int, ...]) -> None:
    plan = a_plan(seqs=seqs, tokens=8192)
    assert max(plan.piecewise) == 512
    assert [size for size in dict(plan.full)[1] if size > 512] == list(beyond)


def test_a_written_end_is_the_end_of_whole_decode_graphs_too() -> None:
    plan = a_plan(CompilationConfig(max_cudagraph_capture_size=512), seqs=1024, tokens=8192)
    assert plan.max_tokens == 512


def test_drafts_bring_graphs_for_verifying_all_of_them() -> None:
    assert dict(a_plan(drafts=3, seqs=4, tokens=16).full) == {1: (1, 2, 4), 4: (4, 8, 16)}


def test_graphs_are_captured_largest_first_and_piecewise_before_whole() -> None:
    plan = a_plan(CompilationConfig(cudagraph_capture_sizes=(1, 4)))
    assert plan.keys == [GraphKey(4), GraphKey(1), GraphKey(4, 1), GraphKey(1, 1)]
    assert plan.max_tokens == 4


def test_each_graph_exists_with_and_without_adapters() -> None:
    config = EngineConfig(model="/model", device="cuda", adapters=AdapterConfig(), max_num_seqs=4)
    with_adapters, without = cuda_graph_plan(config), cuda_graph_plan(msgspec.structs.replace(config, adapters=None))
    assert set(with_adapters.keys) == {replace(key, with_adapters=w) for key in without.keys for w in (False, True)}
    assert with_adapters.max_tokens == without.max_tokens
    sizes = [key.num_tokens for key in with_adapters.keys if key.kind == "full"]
    assert sizes == sorted(sizes, reverse=True)
