"""The page of repeated starts: equality, and contents. No engine is started here."""

from collections import Counter
from dataclasses import replace

from engine_benchmarks.same_start import API_SERVERS, CONDITIONS, STARTS, Start, differing_counts, page, plan

SAME = Start(2, CONDITIONS[0], 1699, 500 << 20, 513 << 20, 60 << 20, 900 << 20, 8.0)


def test_every_condition_has_equally_many_starts() -> None:
    tried = Counter(plan())
    assert len(tried) == len(API_SERVERS) * len(CONDITIONS)
    assert set(tried.values()) == {STARTS // len(CONDITIONS)}


def test_kernel_memory_and_time_may_differ() -> None:
    assert differing_counts([SAME, replace(SAME, driver_used_bytes=1, seconds=80.0)]) == []


def test_other_number_of_blocks_is_a_difference() -> None:
    other = replace(SAME, condition=CONDITIONS[3], num_blocks=1700)
    assert differing_counts([SAME, other, replace(SAME, api_servers=1, num_blocks=1)]) == [2]


def test_page_shows_each_value_once_and_the_result() -> None:
    starts = [SAME, replace(SAME, driver_used_bytes=800 << 20)]
    text = page(starts, model="/models/m", is_contained=True, machine="a machine")
    assert "| 2 | idle | 2 | 1,699 | 524,288,000 |" in text
    assert "800 to 900 MiB" in text
    assert "same engine every time" in text
    assert "/models" not in text
    bad = page([SAME, replace(SAME, num_blocks=3)], model="m", is_contained=False, machine="a machine")
    assert "Starts differ** with 2 API servers" in bad
    assert "| 3, 1,699 |" in bad
    assert "no control group" in bad
