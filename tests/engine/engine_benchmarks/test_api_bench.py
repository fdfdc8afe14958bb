"""The page of the API server's figures."""

from typing import Any

from engine_benchmarks.api_bench import page


def test_page_contains_every_figure_and_the_command() -> None:
    rate: dict[str, Any] = {"per_second": 1234.5, "cpu_microseconds": 432.1, "rounds": (1200, 1235, 1300)}
    servers = {"requests": rate, "chunks": {**rate, "per_second": 16_000.0}}
    results = {"detokenize_microseconds": {"median": 1.25, "best": 1.0}, "servers_1": servers, "servers_2": servers}
    text = page(results, "the command")
    assert text.count("| 1,234 | 432 | 1,200, 1,235, 1,300 |") == 2
    assert text.count("| 16,000 |") == 2
    assert "1.2 µs per token (best 1.0)" in text
    assert "`the command`" in text
