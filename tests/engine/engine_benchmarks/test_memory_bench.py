"""Whether a server grows: what is sent, and the slope."""

from collections import Counter

import pytest
from engine_benchmarks import memory_bench
from engine_benchmarks.memory_bench import Growth, a_request, main, table


def test_every_kind_of_request_comes_and_each_number_is_the_same_request_again() -> None:
    kinds = Counter(a_request(number)[0] for number in range(300))
    assert len(kinds) == 9
    assert min(kinds.values()) > 15
    assert a_request(17) == a_request(17)
    assert a_request(17) != a_request(18)


def test_the_slope_leaves_out_the_first_third_in_which_caches_fill() -> None:
    growth = Growth(
        requests=[50, 100, 150, 200, 250, 300],
        resident_kib={"core": [100, 900, 1000, 1000, 1000, 1000], "server": [0, 0, 100, 150, 200, 250]},
        answers={"whole 200": 300},
    )
    assert growth.slope("core") == pytest.approx(0.0)
    assert growth.slope("server") == pytest.approx(1.0)
    assert "| KiB per request after the first third | +0.00 | +1.00 |" in table(growth)


def test_too_few_requests_for_a_slope_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["model", "--requests", str(6 * memory_bench.EVERY - 1)])
    assert "at least 300 are needed" in capsys.readouterr().err
