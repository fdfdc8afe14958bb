"""`trimtab simulate`: output, streams and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trimtab_operator.cli.trimtab_command import app
from typer.testing import CliRunner, Result

PROMISES = ("--ttft", "2s+1/8000", "--itl-mean", "80ms")
FIGURES = [
    "policy",
    "gpu_hours",
    "requests",
    "met",
    "attainment",
    "goodput_tokens_per_s",
    "ttft_mean",
    "ttft_p50",
    "ttft_p95",
    "ttft_p99",
    "itl_p50",
    "itl_p95",
    "itl_p99",
    "preempted_token_share",
    "decisions",
    "reversals_per_knob_per_10min",
    "max_replicas",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two requests a second for two minutes."""
    path = tmp_path / "log.jsonl"
    row = '{{"timestamp": {}, "input_length": {}, "output_length": 20}}'
    path.write_text("\n".join(row.format(i * 500, 100 + i) for i in range(240)))
    return path


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_json_has_a_score_for_each_policy_and_nothing_else_on_standard_output(log: Path) -> None:
    done = simulate("--trace", log, *PROMISES, "--policy", "static-default,kubeai@20,aimd", "-o", "json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [policy["policy"] for policy in told["policies"]] == ["static-default", "kubeai@20", "aimd"]
    for policy in told["policies"]:
        assert set(FIGURES) <= set(policy)
        assert (policy["requests"], policy["met"], policy["attainment"]) == (240, 240, 1.0)
    assert told["policies"][0]["gpu_hours"] == pytest.approx(119.5 / 3600)
    assert told["objectives"]["itl_mean"] == 0.08
    assert "kubeai@20: " in done.stderr


def test_a_table_names_the_target_that_was_best_in_hindsight(log: Path) -> None:
    done = simulate("--trace", log, *PROMISES, "--policy", "hpa-running,static-n", "--max-replicas", 2)
    assert done.exit_code == 0, done.output
    assert "hpa-running (best: " in done.stdout
    assert "static-n" in done.stdout


def test_a_report_is_one_page_with_everybody_in_it(log: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = simulate("--trace", log, *PROMISES, "--policy", "static-default,aimd", "--report", page)
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "static-default" in text
    assert text.count("<svg") >= 3
    assert "<script" not in text


@pytest.mark.parametrize(
    ("flag", "name", "said"),
    [
        ("--report", "none/r.html", "does not exist; create it"),
        ("--report", ".", "is a directory; pass a file"),
        ("--calibration", "none.json", "file not found"),
        ("--lengths", "none.csv", "file not found"),
        ("--lengths", ".", "is a directory; pass a file"),
    ],
)
def test_files_are_looked_at_before_the_trace_is_read(flag: str, name: str, said: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("no trace")
    done = simulate("--trace", trace, *PROMISES, "--policy", "aimd", flag, tmp_path / name)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{flag} {tmp_path / name}")
    assert said in done.stderr


def test_simulate_prints_objectives_with_units(log: Path) -> None:
    done = simulate("--trace", log, "--ttft", "2s+1/8000", "--itl-mean", "80", "--policy", "static-default")
    assert (
        "objectives: first token within 2 s + 125 us per prompt token, mean gap between tokens within 80 s, for 99 %"
        in done.stderr
    )


def test_equal_seeds_print_equal_figures(log: Path) -> None:
    arguments = ("--trace", log, *PROMISES, "--policy", "static-default", "--router", "service", "--start-replicas", 2)
    runs = [simulate(*arguments, "--seed", seed, "-o", "json").stdout for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("more", [(), ("--routers", 2, "--router-state-interval", 0.5)])
def test_router_finds_prefixes_that_a_service_misses(tmp_path: Path, more: tuple[object, ...]) -> None:
    log = tmp_path / "prefixes.jsonl"
    row = '{{"timestamp": {}, "input_length": 4200, "output_length": 20, "hash_ids": {}}}'
    log.write_text("\n".join(row.format(i * 500, [10 * (i % 6) + k for k in range(8)]) for i in range(120)))
    arguments = ("--trace", log, *PROMISES, "--policy", "static-default", "--start-replicas", 3, "-o", "json")
    shares = [
        json.loads(simulate(*arguments, *router).stdout)["policies"][0]["prefix_hit_share"]
        for router in (("--router", "trimtab", *more), ("--router", "service"))
    ]
    assert shares[0] > shares[1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--policy", "static-default"), "no objective is set"),
        ((*PROMISES, "--policy", "hpa"), "--policy has 'hpa'; known are static-default"),
        ((*PROMISES, "--speed", "0"), "--speed is 0.0"),
        ((*PROMISES, "--model", "m"), "no step times are known for m on h200"),
        ((*PROMISES, "--min-replicas", "3", "--max-replicas", "2"), "--start-replicas 3 must be within"),
        ((*PROMISES, "--calibration", "none.json"), "none.json: file not found"),
        ((*PROMISES, "--max-num-seqs", "64", "--max-num-batched-tokens", "32"), "--max-num-seqs 64 is above"),
        (("--ttft", "soon"), "--ttft is 'soon'"),
        ((*PROMISES, "--router", "llm-d", "--routers", "2"), "--router: llm-d has no --routers"),
    ],
)
def test_simulate_rejects_invalid_flags_before_replay(log: Path, arguments: tuple[str, ...], reason: str) -> None:
    done = simulate("--trace", log, *arguments)
    assert done.exit_code == 2
    assert reason in done.stderr
    assert done.stdout == ""


def test_a_bad_row_is_refused_with_its_line(log: Path) -> None:
    log.write_text(log.read_text() + '\n{"timestamp": 1, "input_length": -5, "output_length": 20}')
    done = simulate("--trace", log, *PROMISES, "--policy", "static-default")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "line 241: input_length is -5" in done.stderr


def test_prefixes_that_a_log_names_are_shared_unless_that_is_switched_off(log: Path) -> None:
    row = '{{"timestamp": {}, "input_length": 1100, "output_length": 2, "hash_ids": [1, 2]}}'
    log.write_text("\n".join(row.format(i * 1000) for i in range(50)))
    shares = []
    for flags in ((), ("--no-prefix-caching",)):
        done = simulate("--trace", log, *PROMISES, "--policy", "static-default", "-o", "json", *flags)
        shares.append(json.loads(done.stdout)["policies"][0]["prefix_hit_share"])
    assert shares == [pytest.approx(49 * 1024 / (50 * 1100)), 0.0]
