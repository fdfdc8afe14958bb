"""Trace files: the parsed fields of each format, and rejected lines with their numbers and reasons."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from trimtab_simulator.errors import BadTrace
from trimtab_simulator.trace.arrivals import Arrival
from trimtab_simulator.trace.formats import Format, load_text, read_lengths, read_log, read_rates

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
RATES = "client,window_start_s,rate,cv,pattern,arg1,arg2\n"
GOOD_ROW = "2023-11-16 18:17:03.9799600,4808,10\n"


def a_file(folder: Path, text: str, *, packed: bool = False) -> Path:
    path = folder / ("trace.gz" if packed else "trace")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_an_azure_log_starts_with_its_first_request(tmp_path: Path, packed: bool) -> None:
    path = a_file(tmp_path, AZURE + GOOD_ROW + "2023-11-16 18:17:05.2299600,110,27\n", packed=packed)
    text, kind = load_text(path)
    trace = read_log(path, text, kind)
    assert kind is Format.AZURE
    assert trace.arrivals[0] == Arrival(0.0, 4808, 10)
    assert trace.arrivals[1].at == pytest.approx(1.25)
    assert (trace.arrivals[1].prompt, trace.arrivals[1].output) == (110, 27)
    assert trace.seconds == pytest.approx(1.25)


def test_a_mooncake_log_names_its_prefix_blocks(tmp_path: Path) -> None:
    path = a_file(tmp_path, '{"timestamp": 27000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]}\n')
    assert read_log(path, *load_text(path)).arrivals == [Arrival(0.0, 600, 5, (7, 9))]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_json_rows_end_only_at_newlines(tmp_path: Path, end: str) -> None:
    row = '{"timestamp": 0, "input_length": 6, "output_length": 5, "name": "a\u2028b\u2029c\x85d"}'
    path = a_file(tmp_path, (row + end) * 2)
    assert read_log(path, *load_text(path)).arrivals == [Arrival(0.0, 6, 5)] * 2


def test_unordered_rows_are_sorted_with_a_note(tmp_path: Path) -> None:
    late = '{"timestamp": 2000, "input_length": 2, "output_length": 5}'
    path = a_file(tmp_path, late + '\n{"timestamp": 0, "input_length": 1, "output_length": 0}\n')
    trace = read_log(path, *load_text(path))
    assert [a.prompt for a in trace.arrivals] == [1, 2]
    assert len(trace.notes) == 2
    assert trace.arrivals[0].output == 1  # it had none


def test_rates_and_lengths_are_read_per_client_and_window(tmp_path: Path) -> None:
    path = a_file(tmp_path, RATES + "5,600,378.9,1.1,Gamma,0.79,0.003\n2,0,0.5,1.0,Gamma,0.9,11.3\n")
    assert [(w.client, w.start, w.rate, w.cv) for w in read_rates(path, load_text(path)[0])] == [
        ("2", 0, 0.5, 1.0),
        ("5", 600, 378.9, 1.1),
    ]
    row = '{"client": 2, "window_start_s": 0, "input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{0: 1.0}"}'
    (window,) = read_lengths(path, row)
    assert (window.prompts.values, window.prompts.cumulated) == ((10, 20), (0.25, 1.0))
    assert window.outputs.values == (1,)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (AZURE + GOOD_ROW + "2023-11-16 18:17:03,12\n", "line 3: GeneratedTokens is missing"),
        (AZURE + "yesterday,12,1\n", "line 2: TIMESTAMP is 'yesterday'"),
        (AZURE + "2023-11-16 18:17:03.1,-12,1\n", "line 2: ContextTokens is -12"),
        (AZURE + "2023-11-16 18:17:03.1,1.5,1\n", "line 2: ContextTokens is 1.5; it must be a whole number"),
        (AZURE + "2023-11-16 18:17:03.1,nan,1\n", "line 2: ContextTokens is nan"),
        (AZURE + "2023-11-16 18:17:03.1,0,1\n", "line 2: ContextTokens is 0"),
        (AZURE, "has no requests"),
        ("", "line 1: none of the known columns"),
        ("a,b,c\n1,2,3\n", "line 1: none of the known columns"),
        ('{"timestamp": 1\n', "line 1: this is not JSON"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1}\n{"timestamp"\n', "line 2: this is not JSON"),
        ('{"timestamp": true, "input_length": 5, "output_length": 1}\n', "line 1: timestamp is missing"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}\n', "names 2 blocks"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": "x"}\n', "is not a list"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, text: str, reason: str) -> None:
    path = a_file(tmp_path, text)
    with pytest.raises(BadTrace, match=reason) as rejected:
        read_log(path, *load_text(path))
    assert str(path) in str(rejected.value)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("5,0,-1,1,Gamma,1,1", "rate is -1"),
        ("5,0,inf,1,Gamma,1,1", "rate is inf"),
        ("5,0,1,,Gamma,1,1", "cv is missing"),
        ("5,0,1,1,Pareto,1,1", "pattern is 'Pareto'"),
        (",0,1,1,Gamma,1,1", "client is missing"),
        ("5,0,1,1,Gamma,1,1\n5,0,2,1,Gamma,1,1", "two rows for the window at 0 s"),
    ],
)
def test_a_bad_rate_is_refused(tmp_path: Path, row: str, reason: str) -> None:
    path = a_file(tmp_path, f"{RATES}{row}\n")
    with pytest.raises(BadTrace, match=reason):
        read_rates(path, load_text(path)[0])


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ("{1: 0.5}", "add up to 0.500"),
        ("{}", "is not {length: probability"),
        ("__import__('os')", "is not {length: probability"),
        ("{-1: 1.0}", "input_tokens is -1"),
        ("{1: -1.0, 2: 2.0}", "input_tokens is -1.0"),
    ],
)
def test_a_bad_distribution_is_refused(tmp_path: Path, tokens: str, reason: str) -> None:
    row = f'{{"client": 2, "window_start_s": 0, "input_tokens": "{tokens}", "output_tokens": "{{1: 1.0}}"}}'
    with pytest.raises(BadTrace, match=reason):
        read_lengths(tmp_path, row)


def test_bad_rows_are_counted_and_first_ones_listed(tmp_path: Path) -> None:
    path = a_file(tmp_path, AZURE + "x,1,1\n" * 9)
    with pytest.raises(BadTrace, match=r"line 6: .*; and 4 more bad lines\. Nothing was replayed"):
        read_log(path, *load_text(path))


BROKEN = {
    "no-gzip": b"\x1f\x8b\x08broken",
    "gzip-cut-off": gzip.compress(b"x" * 5000)[:-20],
    "no-text": b"TIMESTAMP\xff\n",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "broken"
    path.write_bytes(BROKEN[kind])
    with pytest.raises(BadTrace, match="broken"):
        load_text(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="No such file"):
        load_text(tmp_path / "none")
