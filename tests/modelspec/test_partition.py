"""Division of layers, heads, columns and experts."""

import pytest
from trimtab_engine.errors import ConfigError
from trimtab_engine.parallel.experts import expert_map, place_experts
from trimtab_modelspec.partition import equal_span, kv_head_span, layers_of_stages, vocabulary_span


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "counts"),
    [
        (8, 2, [4, 4]),
        (9, 2, [5, 4]),  # never to the last; here the first is the one before it
        (10, 4, [2, 3, 3, 2]),  # from the back, the last left out
        (11, 4, [3, 3, 3, 2]),  # the first gets one only when all others but the last have
        (126, 8, [15, 16, 16, 16, 16, 16, 16, 15]),  # Llama-3.1-405B
    ],
)
def test_layers_that_do_not_divide_go_to_the_stages_before_the_last(
    num_layers: int, num_stages: int, counts: list[int]
) -> None:
    assert [last - first for first, last in layers_of_stages(num_layers, num_stages)] == counts


def test_stages_are_contiguous_and_cover_all_layers() -> None:
    for num_layers in range(1, 40):
        for num_stages in range(1, num_layers + 1):
            spans = layers_of_stages(num_layers, num_stages)
            covered = [layer for first, last in spans for layer in range(first, last)]
            assert covered == list(range(num_layers))
            assert min(last - first for first, last in spans) >= 1


def test_valid_partition_override_is_used() -> None:
    assert layers_of_stages(8, 3, (1, 3, 4)) == ((0, 1), (1, 4), (4, 8))
    for wrong in ((1, 3, 3), (4, 4), (0, 4, 4)):
        with pytest.raises(ConfigError, match=r"must name 3 stages of 1 layer or more that sum to 8"):
            layers_of_stages(8, 3, wrong)


def test_more_stages_than_layers_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="--pipeline-parallel-size is 9, but the model has 8 layers"):
        layers_of_stages(8, 9)


def test_indivisible_heads_are_rejected_with_divisors() -> None:
    with pytest.raises(ConfigError, match=r"num_attention_heads 9 cannot be divided by 2; .*: 1$"):
        equal_span(9, 2, 0, "num_attention_heads")
    with pytest.raises(ConfigError, match=r"divisors up to \d+: 1, 3$"):
        equal_span(9, 8, 0, "num_attention_heads")


def test_kv_heads_are_split_or_held_by_several_ranks() -> None:
    assert [kv_head_span(4, 2, index) for index in range(2)] == [(0, 2), (2, 4)]
    assert [kv_head_span(2, 4, index) for index in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    with pytest.raises(ConfigError, match="num_key_value_heads 3"):
        kv_head_span(3, 2, 0)
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 4, no multiple of num_key_value_heads 3"):
        kv_head_span(3, 4, 0)


def test_the_vocabulary_is_cut_into_equal_parts_and_a_rest() -> None:
    assert [vocabulary_span(97, 2, index) for index in range(2)] == [(0, 49), (49, 97)]
    assert [vocabulary_span(5, 4, index) for index in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


def test_experts_are_placed_linearly_or_in_turn() -> None:
    assert place_experts(10, 4, "linear") == ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
    assert place_experts(10, 4, "round_robin") == ((0, 4, 8), (1, 5, 9), (2, 6), (3, 7))
    with pytest.raises(ConfigError, match="= 5 ranks, but the model has 4"):
        place_experts(4, 5, "linear")


def test_the_expert_map_names_local_places() -> None:
    assert expert_map(5, (3, 1)) == [-1, 1, -1, 0, -1]
