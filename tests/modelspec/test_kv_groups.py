"""KV groups: grouping of layers, shards of ranks, and maximum blocks per request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trimtab_modelspec.kv_groups import KVGroup, KVLayerIndex, LayerKV, groups_of, kv_layer_indices, uniform_group

ALL = LayerKV(num_kv_heads=8, key_size=64, value_size=64)
WINDOW = LayerKV(num_kv_heads=8, key_size=64, value_size=64, window=128)
WIDE = LayerKV(num_kv_heads=8, key_size=128, value_size=128)
LATENT = LayerKV(num_kv_heads=1, key_size=576, value_size=0)


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        ([ALL] * 5, [(((0, 5),), ALL)]),  # all alike
        ([LATENT] * 3, [(((0, 3),), LATENT)]),
        ([WINDOW, ALL] * 2, [(((0, 1), (2, 3)), WINDOW), (((1, 2), (3, 4)), ALL)]),  # as many of each
        (
            [WINDOW, WINDOW, WINDOW, ALL] * 2,  # three groups of windows, each as large as the one that sees all
            [
                (((0, 1), (4, 5)), WINDOW),
                (((1, 2), (5, 6)), WINDOW),
                (((2, 3), (6, 7)), WINDOW),
                (((3, 4), (7, 8)), ALL),
            ],
        ),
        ([WINDOW, WINDOW, WINDOW, ALL, ALL], [(((0, 1), (2, 3)), WINDOW), (((1, 2),), WINDOW), (((3, 5),), ALL)]),
        ([ALL, ALL, WIDE], [(((0, 2),), ALL), (((2, 3),), WIDE)]),  # two small layers fill a wide one's block
    ],
)
def test_groups_are_no_larger_than_the_smallest_kind(
    layers: list[LayerKV], groups: list[tuple[tuple[tuple[int, int], ...], LayerKV]]
) -> None:
    assert groups_of(layers) == tuple(KVGroup(spans, each) for spans, each in groups)


@given(st.lists(st.sampled_from([ALL, WINDOW, WIDE, LATENT]), min_size=1, max_size=60))
def test_layers_are_grouped_up_to_smallest_kind(layers: list[LayerKV]) -> None:
    groups = groups_of(layers)
    members = sorted(layer for group in groups for first, last in group.layers for layer in range(first, last))
    assert members == list(range(len(layers)))
    assert all(layers[first] == group.each for group in groups for first, _ in group.layers)
    smallest = min(layers.count(kind) * kind.num_elements for kind in set(layers))
    assert all(group.num_elements <= smallest or group.num_layers == 1 for group in groups)


@pytest.mark.parametrize(("tensor", "num_kv_heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_ranks_divide_or_share_heads(tensor: int, num_kv_heads: int) -> None:
    group = uniform_group(4, 8, 64).on_rank((0, 4), tensor)
    assert (group.num_layers, group.each.num_kv_heads) == (4, num_kv_heads)


def test_layers_of_several_groups_share_places_in_memory() -> None:
    """On the second stage each group's layers begin at place 0 again."""
    groups = groups_of([WINDOW, WINDOW, ALL, WINDOW, ALL, WINDOW])  # windows 0 and 3, 1 and 5; all 2 and 4
    assert kv_layer_indices(groups, (0, 6)) == [
        KVLayerIndex(*at) for at in ((0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (1, 1))
    ]
    assert kv_layer_indices(groups, (3, 6)) == [KVLayerIndex(*at) for at in ((0, 0), (2, 0), (1, 0))]


@given(st.lists(st.sampled_from([ALL, WINDOW]), min_size=1, max_size=40), st.data())
def test_layers_of_a_stage_have_distinct_indices(layers: list[LayerKV], data: st.DataObject) -> None:
    stage = tuple(sorted(data.draw(st.tuples(st.integers(0, len(layers)), st.integers(0, len(layers))))))
    groups = groups_of(layers)
    places = kv_layer_indices(groups, (stage[0], stage[1]))
    assert len(set(places)) == len(places) == stage[1] - stage[0]
    most = max((group.on_rank((stage[0], stage[1]), 1).num_layers for group in groups), default=0)
    assert all(place.index < most for place in places)


def test_a_latent_vector_is_whole_on_every_rank() -> None:
    assert groups_of([LATENT] * 3)[0].on_rank((0, 3), 8).num_elements == 3 * 576


def test_a_stage_has_its_layers_of_each_group_or_none() -> None:
    windows, alls = groups_of([WINDOW, ALL, WINDOW, ALL])
    assert windows.on_rank((0, 3), 1).layers == ((0, 1), (2, 3))
    assert alls.on_rank((0, 3), 1).layers == ((1, 2),)
    assert alls.on_rank((0, 1), 1).num_elements == 0


@given(
    window=st.integers(1, 70),
    is_chunked=st.booleans(),
    step=st.integers(1, 50),
    block_size=st.sampled_from([1, 8, 16]),
    data=st.data(),
)
def test_a_windows_blocks_suffice_for_steps_of_any_size(
    window: int, is_chunked: bool, step: int, block_size: int, data: st.DataObject
) -> None:
    """Needed before a step: blocks of its own tokens and of the first token's window; others are freed."""
    length = data.draw(st.integers(1, 300))
    each = LayerKV(num_kv_heads=1, key_size=1, value_size=1, window=window, is_chunked=is_chunked)
    group = KVGroup(((0, 1),), each)
    most = group.num_blocks(length, block_size=block_size, max_num_batched_tokens=step)
    computed = 0
    while computed < length:
        now = data.draw(st.integers(1, min(step, length - computed)))
        first_seen = computed // window * window if is_chunked else max(0, computed - window + 1)
        assert (computed + now - 1) // block_size - first_seen // block_size + 1 <= most
        computed += now


def test_a_windows_blocks_are_no_more_than_some_step_needs() -> None:
    """The bound is reached: a step that begins one token before the end of a block."""
    group = KVGroup(((0, 1),), LayerKV(num_kv_heads=1, key_size=1, value_size=1, window=10))
    assert group.num_blocks(1000, block_size=8, max_num_batched_tokens=8) == 3  # 17 tokens in sight, from 7 of 8 on
    assert group.num_blocks(1000, block_size=8, max_num_batched_tokens=9) == 4
    assert group.num_blocks(12, block_size=8, max_num_batched_tokens=9) == 2  # not all of it is there
