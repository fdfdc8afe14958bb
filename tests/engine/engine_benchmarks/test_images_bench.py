"""What is sent of an image that a core knows, and how gaps are counted."""

from pathlib import Path

import pytest
from engine_benchmarks.images_bench import percentile, wire_bytes
from engine_benchmarks.seeing_folder import TINY, write_seeing_folder


def test_a_known_image_is_a_name_on_the_wire(tmp_path: Path) -> None:
    sent = wire_bytes(write_seeing_folder(tmp_path, **TINY))
    assert sent["new image"] > 100_000
    assert sent["known image"] - sent["text alone"] < 100


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([float(value) for value in range(100, 0, -1)], 99, 99.0),
        ([5.0], 99, 5.0),
    ],
)
def test_so_many_percent_do_not_exceed_a_percentile(values: list[float], percent: int, expected: float) -> None:
    assert percentile(values, percent) == expected
