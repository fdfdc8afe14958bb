"""Transformations of a trace: cut, speed, copies, scaling and sampling from rates. Seeds are deterministic."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from statistics import mean, pstdev

import pytest
from trimtab_simulator.errors import BadRequest, BadTrace
from trimtab_simulator.trace.load import Transform, highest_rate, load_trace


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A request each second for 100 s, each with another prefix."""
    path = tmp_path / "log.jsonl"
    rows = [
        f'{{"timestamp": {i * 1000}, "input_length": {i + 1}, "output_length": 3, "hash_ids": [{i}]}}'
        for i in range(101)
    ]
    path.write_text("\n".join(rows))
    return path


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    """Two clients over two windows: 10 a second together, then 30."""
    path = tmp_path / "rates.csv"
    path.write_text("client,window_start_s,rate,cv\n1,0,5,1\n2,0,5,1\n1,600,25,1\n2,600,5,1\n")
    return path


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """Client 1 sends short prompts, and nothing is known of client 2."""
    path = tmp_path / "lengths.jsonl"
    path.write_text(
        '{"client": 1, "window_start_s": 0, "input_tokens": "{10: 1.0}", "output_tokens": "{4: 0.5, 6: 0.5}"}'
    )
    return path


def test_a_part_is_cut_out_in_the_traces_time_and_then_sped_up(log: Path) -> None:
    trace = load_trace(log, Transform(start=20, duration=50, speed=10))
    assert (trace.seconds, len(trace.arrivals)) == (5.0, 50)
    assert trace.arrivals[0][:2] == (0.0, 21)
    assert trace.arrivals[-1].at == pytest.approx(4.9)


def test_copies_are_moved_and_share_no_prefixes(log: Path) -> None:
    trace = load_trace(log, Transform(copies=3, jitter=2.0))
    assert len(trace.arrivals) == 303
    assert [a.at for a in trace.arrivals] == sorted(a.at for a in trace.arrivals)
    assert len({a.prefix for a in trace.arrivals}) == 303
    assert all(0 <= a.at <= 100 and abs(a.at - (a.prompt - 1)) <= 2 for a in trace.arrivals)


@pytest.mark.parametrize("peak", [0.5, 3.0])
def test_a_log_is_thinned_or_laid_over_itself_up_to_its_peak(log: Path, peak: float) -> None:
    trace = load_trace(log, Transform(peak=peak))
    assert highest_rate(trace.arrivals) == pytest.approx(peak, rel=0.25)


def test_rates_are_drawn_at_their_peak_and_for_their_time(rates: Path, lengths: Path) -> None:
    trace = load_trace(rates, Transform(speed=2, peak=15), lengths=lengths)
    assert trace.seconds == 600
    early = [a for a in trace.arrivals if a.at < 300]
    assert len(early) == pytest.approx(5 * 300, rel=0.1)
    assert len(trace.arrivals) - len(early) == pytest.approx(15 * 300, rel=0.1)
    assert {(a.prompt, a.output) for a in trace.arrivals} == {(10, 4), (10, 6)}


def test_lengths_are_sampled_from_another_log(rates: Path, log: Path) -> None:
    trace = load_trace(rates, Transform(duration=600), lengths=log)
    assert {a.output for a in trace.arrivals} == {3}
    assert len({a.prompt for a in trace.arrivals}) == 101


def test_a_log_may_get_the_lengths_of_another(log: Path, lengths: Path) -> None:
    assert {a.prompt for a in load_trace(log, Transform(), lengths=lengths).arrivals} == {10}


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_arrivals_have_the_requested_variation(rates: Path, lengths: Path, cv: float) -> None:
    arrivals = load_trace(rates, Transform(duration=600, cv=cv), lengths=lengths, seed=3).arrivals
    gaps = [b.at - a.at for a, b in itertools.pairwise(arrivals)]
    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.15)


def test_a_small_share_of_an_uneven_client_is_nearly_even(tmp_path: Path, lengths: Path) -> None:
    path = tmp_path / "rates.csv"
    path.write_text("client,window_start_s,rate,cv\n1,0,1000,5\n")
    arrivals = load_trace(path, Transform(peak=10), lengths=lengths).arrivals
    gaps = [b.at - a.at for a, b in itertools.pairwise(arrivals)]
    assert pstdev(gaps) / mean(gaps) == pytest.approx((1 + 0.01 * 24) ** 0.5, rel=0.05)


def test_seeds_repeat_and_differ(rates: Path, lengths: Path) -> None:
    def drawn(seed: int) -> list[float]:
        return [a.at for a in load_trace(rates, Transform(), lengths=lengths, seed=seed).arrivals]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"speed": 0.0}, "--speed"),
        ({"speed": float("nan")}, "--speed"),
        ({"start": -1.0}, "--from"),
        ({"duration": 0.0}, "--duration"),
        ({"copies": 0}, "--copies"),
        ({"jitter": -1.0}, "--jitter"),
        ({"peak": 0.0}, "--peak"),
        ({"cv": 2.0}, "--cv is for rate files"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_their_flag(log: Path, change: dict[str, float], flag: str) -> None:
    with pytest.raises(BadRequest, match=flag):
        load_trace(log, replace(Transform(), **change))  # type: ignore[arg-type]


def test_rates_need_lengths_and_lengths_are_no_trace(rates: Path, lengths: Path) -> None:
    with pytest.raises(BadRequest, match="give --lengths"):
        load_trace(rates, Transform())
    with pytest.raises(BadRequest, match="rates as --trace"):
        load_trace(lengths, Transform())
    with pytest.raises(BadRequest, match="holds rates"):
        load_trace(rates, Transform(), lengths=rates)
    with pytest.raises(BadRequest, match="scaled by --peak"):
        load_trace(rates, Transform(copies=2), lengths=lengths)


def test_a_part_without_requests_is_refused(log: Path) -> None:
    with pytest.raises(BadTrace, match="no requests between"):
        load_trace(log, Transform(start=500))
