"""The page of batches: figures of known times."""

from engine_benchmarks.batches_bench import MixedTimes, page


def test_page_has_the_ratio_of_p95() -> None:
    times = [number / 100 for number in range(101)]
    text = page((1000, 1000, [10, 20, 30], 99.6), MixedTimes(times, [1.2 * each for each in times], 77))
    assert "| interactive TTFT p95: alone, with a batch | 950 ms, 1140 ms | |" in text
    assert "| ratio of p95 | 1.20 | ≤ 1.1 |" in text
    assert "| answers of 1000 lines with 3 × SIGKILL | 1000, 1000 different | each line once |" in text
    assert "| lines answered next to 101 interactive requests | 77 | |" in text
