"""Prefix index: leading keys by replica, expectations, evictions and the price of displaced keys."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from trimtab_router.scoring.prefix_index import MIN_REUSE_WINDOW, PrefixIndex


def test_match_counts_leading_keys_of_each_replica() -> None:
    index = PrefixIndex()
    index.add(0, [1, 2, 3])
    index.add(5, [1])
    index.add(7, [2, 3])  # without the first key the others are of no use
    assert index.match([1, 2, 3, 4], 0.0) == {0: 3, 5: 1}
    assert index.match([9, 1], 0.0) == {}
    assert index.match([], 0.0) == {}


def test_removed_keys_no_longer_match() -> None:
    index = PrefixIndex()
    index.add(0, [1, 2, 3])
    index.add(1, [1, 2, 3])
    index.remove(0, [3, 99])
    assert index.match([1, 2, 3], 0.0) == {0: 2, 1: 3}
    assert (index.num_keys(0), index.num_keys(1)) == (2, 3)


def test_expected_keys_match_until_they_expire() -> None:
    index = PrefixIndex()
    index.expect(3, [1, 2], 5.0)
    assert index.match([1, 2], 4.9) == {3: 2}
    assert index.match([1, 2], 5.0) == {}


def test_expected_keys_that_arrive_stay() -> None:
    index = PrefixIndex()
    index.expect(3, [1, 2], 5.0)
    index.add(3, [1])
    assert index.match([1, 2], 6.0) == {3: 1}
    assert index.num_keys(3) == 1


def test_later_expectation_outlives_earlier_one() -> None:
    index = PrefixIndex()
    index.expect(0, [1], 5.0)
    index.expect(0, [1, 2], 8.0)
    index.expect(0, [1], 6.0)
    assert index.match([1, 2], 7.0) == {0: 2}
    assert index.match([1, 2], 8.0) == {}


def test_expectation_of_held_keys_does_not_remove_them() -> None:
    index = PrefixIndex()
    index.add(0, [1])
    index.expect(0, [1], 5.0)
    assert index.match([1], 6.0) == {0: 1}


def test_clear_forgets_only_that_replica() -> None:
    index = PrefixIndex()
    index.add(0, [1, 2])
    index.add(1, [1])
    index.expect(0, [7], 9.0)
    index.clear(0)
    assert index.match([1, 2], 0.0) == {1: 1}
    assert index.match([7], 20.0) == {}
    assert index.num_keys(0) == 0


def test_reuse_share_counts_recomputed_evictions() -> None:
    index = PrefixIndex()
    index.add(0, range(10))
    index.remove(0, range(10))
    assert index.reuse_shares == {}
    index.add(1, range(4))  # wherever they are computed again, replica 0 lost them
    assert index.reuse_shares == {0: 0.4}


def test_evicted_copy_of_a_held_key_costs_nothing() -> None:
    index = PrefixIndex()
    index.add(0, range(10))
    index.add(1, range(10))
    index.remove(0, range(10))
    index.add(0, range(10))
    assert index.reuse_shares == {}


def test_reuse_share_follows_recent_evictions() -> None:
    index = PrefixIndex()
    index.add(0, range(10))
    index.remove(0, range(10))
    index.add(0, range(10))
    before = index.reuse_shares[0]
    for start in range(1000, 1000 + 4 * MIN_REUSE_WINDOW, 64):
        index.add(0, range(start, start + 64))
        index.remove(0, range(start, start + 64))
    assert before == 1.0
    assert index.reuse_shares[0] < 0.01


Operation = st.tuples(
    st.sampled_from(["add", "remove", "expect", "clear"]),
    st.integers(0, 2),
    st.lists(st.integers(0, 6), max_size=4),
    st.integers(1, 9),
)


@given(st.lists(Operation, max_size=30), st.lists(st.integers(0, 6), max_size=5, unique=True))
def test_match_equals_a_plain_model(operations: list[tuple[str, int, list[int], int]], keys: list[int]) -> None:
    index = PrefixIndex()
    held: set[tuple[int, int]] = set()
    expected: dict[tuple[int, int], float] = {}
    now = 0.0
    for name, replica, its, seconds in operations:
        now += 1.0
        index.match([], now)
        expected = {entry: until for entry, until in expected.items() if until > now}
        entries = {(key, replica) for key in its}
        if name == "add":
            index.add(replica, its)
            held |= entries
            expected = {entry: until for entry, until in expected.items() if entry not in entries}
        elif name == "remove":
            index.remove(replica, its)
            held -= entries
        elif name == "expect":
            index.expect(replica, its, now + seconds)
            for entry in entries - held:
                expected[entry] = max(expected.get(entry, 0.0), now + seconds)
        else:
            index.clear(replica)
            held = {entry for entry in held if entry[1] != replica}
            expected = {entry: until for entry, until in expected.items() if entry[1] != replica}
    wanted = {}
    for replica in range(3):
        count = 0
        while count < len(keys) and ((keys[count], replica) in held or (keys[count], replica) in expected):
            count += 1
        if count:
            wanted[replica] = count
    assert index.match(keys, now) == wanted
    assert [index.num_keys(replica) for replica in range(3)] == [
        sum(entry[1] == replica for entry in held) for replica in range(3)
    ]
