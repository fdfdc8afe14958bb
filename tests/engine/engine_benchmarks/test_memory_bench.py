"""Memory growth of a server: the requests, and the slope."""

from collections import Counter

import pytest
from engine_benchmarks import memory_bench
from engine_benchmarks.memory_bench import Growth, main, make_request, table


def test_request_mix_covers_every_kind_and_is_deterministic() -> None:
    kinds = Counter(make_request(number)[0] for number in range(300))
    assert len(kinds) == 9
    assert min(kinds.values()) > 15
    assert make_request(17) == make_request(17)
    assert make_request(17) != make_request(18)


def test_slope_ignores_first_third() -> None:
    growth = Growth(
        requests=[50, 100, 150, 200, 250, 300],
        resident_kib={"core": [100, 900, 1000, 1000, 1000, 1000], "server": [0, 0, 100, 150, 200, 250]},
        answers={"whole 200": 300},
    )
    assert growth.slope("core") == pytest.approx(0.0)
    assert growth.slope("server") == pytest.approx(1.0)
    assert "| KiB per request after the first third | +0.00 | +1.00 |" in table(growth)


def test_too_few_requests_for_slope_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["model", "--requests", str(6 * memory_bench.EVERY - 1)])
    assert "at least 300 are needed" in capsys.readouterr().err
