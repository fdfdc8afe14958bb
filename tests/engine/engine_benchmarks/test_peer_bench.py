"""The comparison of two servers: same prompts in turns, ratios per round, and busy programs that end."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_benchmarks import peer_bench
from engine_benchmarks.peer_bench import Compared, busy_programs, compare, main, tokens_per_second


def test_ratio_is_median_of_rounds() -> None:
    compared = Compared(8, 128, 64, 1, [100.0, 300.0, 90.0], [50.0, 100.0, 90.0])
    assert compared.ratio == 2.0
    assert compared.row() == "| 8 × 128 + 64 | 1 | 100.0 | 90.0 | 2.00 |"


def test_compare_sends_same_prompts_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, Any, int]] = []

    async def rate(url: str, prompts: Any, num_output: int) -> float:
        sent.append((url, prompts, num_output))
        return 100.0 * len(sent)

    monkeypatch.setattr(peer_bench, "tokens_per_second", rate)
    compared = compare(("a", "b"), (2, 5, 7), busy=0, rounds=2)
    assert [url for url, _, _ in sent] == ["a", "b"] * 3
    assert (compared.first, compared.peer) == ([300.0, 500.0], [400.0, 600.0])  # the first round warms up
    for (_, first, length), (_, second, _) in zip(sent[::2], sent[1::2], strict=True):
        assert first == second
        assert [len(prompt) for prompt in first] == [5, 5]
        assert length == 7
    assert sent[0][1] != sent[2][1]


def test_busy_programs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def recorded(*arguments: Any) -> "subprocess.Popen[bytes]":
        started.append(start(*arguments))
        return started[-1]

    monkeypatch.setattr("engine_benchmarks.peer_bench.subprocess.Popen", recorded)
    with busy_programs(2):
        assert [program.poll() for program in started] == [None, None]
    assert all(program.poll() is not None for program in started)


@pytest.mark.parametrize(("found", "fails"), [(4, False), (3, True)])
def test_rate_requires_all_tokens(found: int, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        assert json.loads(request.content)["ignore_eos"] is True
        return httpx.Response(200, json={"usage": {"completion_tokens": found}})

    client = httpx.AsyncClient

    def on_transport(**options: Any) -> httpx.AsyncClient:
        return client(transport=httpx.MockTransport(answer), **options)

    monkeypatch.setattr("engine_benchmarks.peer_bench.httpx.AsyncClient", on_transport)
    if fails:
        with pytest.raises(RuntimeError, match="3 tokens instead of 4"):
            asyncio.run(tokens_per_second("http://a", [[1, 2]], 4))
    else:
        assert asyncio.run(tokens_per_second("http://a", [[1, 2], [3]], 4)) > 0


def test_main_prints_table_and_writes_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compared(urls: Any, load: tuple[int, int, int], busy: int, rounds: int) -> Compared:
        return Compared(*load, busy, [2.0] * rounds, [1.0] * rounds)

    monkeypatch.setattr(peer_bench, "compare", compared)
    file = tmp_path / "a" / "b.json"
    assert (
        main(["http://a", "http://b", "--busy", "0", "1", "--loads", "3", "--rounds", "2", "--output", str(file)]) == 0
    )
    assert capsys.readouterr().out.splitlines()[2:] == [f"| 4 × 1024 + 16 | {n} | 2.0 | 1.0 | 2.00 |" for n in (0, 1)]
    assert [one["first"] for one in json.loads(file.read_text())] == [[2.0, 2.0]] * 2
