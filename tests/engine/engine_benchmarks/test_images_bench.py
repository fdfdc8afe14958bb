"""Wire bytes of cached images, and percentiles of gaps."""

from pathlib import Path

import pytest
from engine_benchmarks.images_bench import percentile, wire_bytes
from engine_benchmarks.vision_checkpoint import TINY, write_vision_checkpoint


def test_cached_image_is_sent_by_name(tmp_path: Path) -> None:
    sent = wire_bytes(write_vision_checkpoint(tmp_path, **TINY))
    assert sent["new image"] > 100_000
    assert sent["known image"] - sent["text only"] < 100


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([float(value) for value in range(100, 0, -1)], 99, 99.0),
        ([5.0], 99, 5.0),
    ],
)
def test_percentile_is_smallest_value_covering_percent(values: list[float], percent: int, expected: float) -> None:
    assert percentile(values, percent) == expected
