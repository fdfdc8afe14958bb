"""Rank tables: vLLM's examples, and invariants of every layout."""

import itertools

import pytest
from trimtab_engine.parallel.ranks import Layout

LAYOUTS = [
    Layout(tensor=t, pipeline=p, data=d, external=e)
    for t, p, d, e in itertools.product((1, 2, 4), (1, 2, 3), (1, 2), (1, 2))
]


def test_eight_gpus_as_tp2_pp4() -> None:
    layout = Layout(tensor=2, pipeline=4)
    assert layout.tensor_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.pipeline_groups() == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert layout.data_groups() == tuple((rank,) for rank in range(8))
    assert layout.expert_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_eight_gpus_as_tp2_pp2_dp2() -> None:
    layout = Layout(tensor=2, pipeline=2, data=2)
    assert layout.tensor_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.pipeline_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.data_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.expert_groups() == ((0, 1, 4, 5), (2, 3, 6, 7))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_groups_partition_the_world_and_places_name_ranks(layout: Layout) -> None:
    ranks = list(range(layout.world_size))
    assert [layout.rank(layout.place(rank)) for rank in ranks] == ranks
    for groups, size in (
        (layout.tensor_groups(), layout.tensor),
        (layout.pipeline_groups(), layout.pipeline),
        (layout.data_groups(), layout.data),
        (layout.expert_groups(), layout.tensor * layout.data),
    ):
        assert sorted(itertools.chain(*groups)) == ranks
        assert {len(group) for group in groups} == {size}


def test_core_holds_last_stage_and_processes_span_nodes() -> None:
    layout = Layout(tensor=2, pipeline=3, data=2)
    assert layout.driver() == 4
    assert [layout.rank_of_process(process) for process in range(6)] == [4, 5, 0, 1, 2, 3]
    assert [layout.rank_of_process(process, data=1) for process in range(6)] == [10, 11, 6, 7, 8, 9]
    assert layout.driver(1) == 10
