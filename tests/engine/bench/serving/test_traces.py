"""Traces: the three formats, cuts, scaled lengths, shared prefixes."""

import gzip
import json
from pathlib import Path

import pytest
from trimtab_engine.bench.serving.samples import Words
from trimtab_engine.bench.serving.traces import Cut, TraceRequest, read_trace, samples_of, scale_to_fit
from trimtab_engine.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:03.9799600,110,27
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 12]},
    {"timestamp": 2500, "input_length": 1030, "output_length": 6, "hash_ids": [7, 8, 31]},
    {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [7, 40]},
]
RATES = "client,window_start_s,rate,cv,pattern,arg1,arg2\n"


def written(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def mooncake(tmp_path: Path) -> list[TraceRequest]:
    path = written(tmp_path / "m.jsonl", "".join(json.dumps(line) + "\n" for line in MOONCAKE))
    return read_trace(path, cut=Cut(), seed=0)


@pytest.mark.parametrize("name", ["azure.csv", "azure.csv.gz"])
def test_azure_times_start_at_zero(tmp_path: Path, name: str) -> None:
    requests = read_trace(written(tmp_path / name, AZURE), cut=Cut(), seed=0)
    assert [one.timestamp for one in requests] == pytest.approx([0.0, 0.052, 60.0])
    assert [(one.input_len, one.output_len) for one in requests] == [(4808, 10), (3180, 8), (110, 27)]


def test_cut_keeps_its_part_and_starts_at_zero(tmp_path: Path) -> None:
    path = written(tmp_path / "azure.csv", AZURE)
    assert len(read_trace(path, cut=Cut(duration=60.0), seed=0)) == 2
    (last,) = read_trace(path, cut=Cut(start=50.0), seed=0)
    assert last.timestamp == pytest.approx(10.0)


def test_fraction_keeps_about_that_share(tmp_path: Path) -> None:
    rows = "".join(f"2023-11-16 18:{m:02}:{s:02}.0,5,5\n" for m in range(10) for s in range(60))
    path = written(tmp_path / "azure.csv", AZURE.splitlines()[0] + "\n" + rows)
    kept = read_trace(path, cut=Cut(fraction=0.25), seed=0)
    assert 100 < len(kept) < 200
    assert kept == read_trace(path, cut=Cut(fraction=0.25), seed=0)


def test_equal_leading_hash_ids_give_shared_prefix(tmp_path: Path) -> None:
    samples = samples_of(mooncake(tmp_path), Words(None, seed=0), scale=1.0, speedup=2.0)
    first, second, third = (sample.prompt for sample in samples)
    assert [len(first), len(second), len(third)] == [1200, 1030, 600]
    assert first[:1024] == second[:1024]
    assert first[1024:1030] != second[1024:]
    assert third[:512] == first[:512]
    assert [sample.timestamp for sample in samples] == [0.0, 1.25, 1.5]


def test_scaled_lengths_keep_shared_prefixes(tmp_path: Path) -> None:
    scale, requests = scale_to_fit(mooncake(tmp_path), max_model_len=242, scale=None)
    assert scale == pytest.approx(0.2)
    first, second, _ = (sample.prompt for sample in samples_of(requests, Words(None, seed=0), scale=scale, speedup=1.0))
    assert (len(first), len(second)) == (240, 206)
    assert first[:204] == second[:204]  # two blocks of 102


def test_short_traces_are_not_stretched(tmp_path: Path) -> None:
    requests = mooncake(tmp_path)
    assert scale_to_fit(requests, max_model_len=8192, scale=None) == (1.0, requests)
    assert scale_to_fit(requests, max_model_len=None, scale=None) == (1.0, requests)


def test_given_scale_truncates_long_requests() -> None:
    _, fitted = scale_to_fit([TraceRequest(0.0, 900, 50), TraceRequest(0.0, 10, 5000)], max_model_len=100, scale=1.0)
    assert [(one.input_len, one.output_len) for one in fitted] == [(49, 50), (1, 98)]


def servegen(tmp_path: Path, rows: str, lengths: list[dict[str, object]], cut: Cut) -> list[TraceRequest]:
    rates = written(tmp_path / "rates.csv", RATES + rows)
    path = written(tmp_path / "lengths.jsonl", "".join(json.dumps(line) + "\n" for line in lengths))
    return read_trace(rates, cut=cut, seed=0, lengths=path)


LENGTHS: list[dict[str, object]] = [
    {"client": 1, "window_start_s": 0, "input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{3: 1.0}"},
]


@pytest.mark.parametrize("row", ["1,0,2.0,1.0,Gamma,1.0,0.5\n", "1,0,2.0,1.0,Weibull,1.0,0.5\n"])
def test_servegen_draws_requests_at_each_window_rate(tmp_path: Path, row: str) -> None:
    requests = servegen(tmp_path, row, LENGTHS, Cut())
    assert 1050 < len(requests) < 1350  # 2 per second for 600 s
    assert {(one.input_len, one.output_len) for one in requests} == {(10, 3), (20, 3)}
    assert all(0 <= one.timestamp < 600 for one in requests)
    assert 100 < len(servegen(tmp_path, row, LENGTHS, Cut(fraction=0.1))) < 150


def test_slow_clients_arrive_at_their_rate(tmp_path: Path) -> None:
    rows = "".join(f"{client},0,0.001,1.0,Gamma,1.0,1000.0\n" for client in range(500))
    assert 240 < len(servegen(tmp_path, rows, LENGTHS, Cut())) < 360  # 0.6 each


def test_client_without_lengths_uses_those_of_another(tmp_path: Path) -> None:
    requests = servegen(tmp_path, "9,0,2.0,1.0,Gamma,1.0,0.5\n", LENGTHS, Cut(duration=10.0))
    assert {one.output_len for one in requests} == {3}


def test_windows_outside_the_cut_are_skipped(tmp_path: Path) -> None:
    rows = "1,0,1.0,1.0,Gamma,1.0,1.0\n1,600,1.0,1.0,Gamma,1.0,1.0\n1,1200,1.0,1.0,Gamma,1.0,1.0\n"
    requests = servegen(tmp_path, rows, LENGTHS, Cut(start=600.0, duration=600.0))
    assert 500 < len(requests) < 700
    assert max(one.timestamp for one in requests) < 600


def test_servegen_trace_requires_lengths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--trace-lengths"):
        read_trace(written(tmp_path / "rates.csv", RATES), cut=Cut(), seed=0)


def test_unknown_trace_format_is_rejected_with_its_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="begins with 'hello"):
        read_trace(written(tmp_path / "x.csv", "hello\n"), cut=Cut(), seed=0)
    with pytest.raises(ConfigError, match="--trace-path"):
        read_trace(tmp_path / "nothing", cut=Cut(), seed=0)
