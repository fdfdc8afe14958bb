"""Ahead-of-time compilation: the sample compiles, and a kernel that cannot start is rejected."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from kernel_benchmarks.aot.__main__ import completed_futures, main
from kernel_benchmarks.aot.cases import all_cases
from kernel_benchmarks.aot.compiler import CannotLaunch, Compiled, Serialised, check_fits, check_overlaps, load, store
from kernel_benchmarks.aot.machine_code import Loop
from kernel_benchmarks.aot.other_versions import file_name
from kernel_benchmarks.aot.report import markdown, write_report
from kernel_benchmarks.aot.specialisation import DIVISIBLE, specialise
from trimtab_kernels.launch.device_facts import A100, H200
from trimtab_kernels.launch.jit import kernel, record_launches, tl, triton

REPOSITORY = Path(__file__).parents[4]
CACHE = Path(os.environ.get("TRIMTAB_CACHE", "~/.cache/trimtab")).expanduser() / "aot"
RESULT = Compiled("case", "kernel", 90, 8, 3, 128, 0, 200_000, True, "source", "key")
LOOP = Loop(instructions=800, products=12, flops=1 << 19, waits=1, load_bytes=4096)


@pytest.mark.timeout(600)  # 45 s on 2 idle cores the first time; cached then
def test_sample_and_changed_kernels_compile_for_sm_90() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(REPOSITORY / "kernels")
    command = [sys.executable, "-m", "kernel_benchmarks.aot", "--sample", "--cache", str(CACHE)]
    command += ["--budget-seconds", "45", "--results", str(REPOSITORY / "docs" / "results")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_jobs_not_started_by_deadline_are_cancelled() -> None:
    ended, running, waiting = Future[Compiled](), Future[Compiled](), Future[Compiled]()
    ended.set_result(RESULT)
    assert running.set_running_or_notify_cancel()
    found = completed_futures({ended, running, waiting}, deadline=time.monotonic())
    assert next(found) is ended
    running.set_result(RESULT)
    # The generator cancels before it yields the next one, so nothing is waited for.
    assert list(found) == [running]
    assert waiting.cancelled()


@kernel("count")
def _example(
    x: tl.tensor, y: tl.tensor, count: tl.tensor, stride: tl.tensor, scale: tl.tensor, N: tl.constexpr
) -> None:
    """Never launched."""


def test_specialise_follows_tritons_rules() -> None:
    x = torch.empty(64, dtype=torch.bfloat16, device="meta")
    with record_launches() as launches:
        _example[(1,)](x, x[3:], 16, 32, 0.5, N=64, num_warps=8)
        _example[(1,)](None, x[8:], 1, 1, 0.5, N=64)
    first, second = (specialise(launch) for launch in launches)
    assert first.signature == {
        "x": "*bf16", "y": "*bf16", "count": "i32", "stride": "i32", "scale": "fp32", "N": "constexpr"
    }  # fmt: skip
    assert first.constants == {(5,): 64}
    assert first.attributes == {(0,): DIVISIBLE, (3,): DIVISIBLE}, "x[3:] is not aligned, count varies"
    assert launches[0].options == {"num_warps": 8}
    assert second.constants == {(0,): None, (3,): 1, (5,): 64}, "an integer 1 is a constant unless it varies"
    assert second.attributes == {(1,): DIVISIBLE}


def test_specialise_rejects_missing_argument() -> None:
    with record_launches() as launches:
        _example[(1,)](None, None, 1, 1, 0.5)
    with pytest.raises(KeyError, match="without N"):
        specialise(launches[0])


def test_kernel_exceeding_target_resources_is_an_error() -> None:
    check_fits(RESULT, H200)
    with pytest.raises(CannotLaunch, match="shared memory"):
        check_fits(RESULT, A100)
    with pytest.raises(CannotLaunch, match="registers"):
        check_fits(replace(RESULT, registers=255, num_warps=16), H200)


def test_serialised_matrix_instructions_are_an_error() -> None:
    check_overlaps(replace(RESULT, hot_loop=LOOP))
    with pytest.raises(Serialised, match="waits 12 times for 12"):
        check_overlaps(replace(RESULT, hot_loop=replace(LOOP, waits=12)))


def test_results_are_stored_by_key(tmp_path: Path) -> None:
    assert load(tmp_path, "key") is None
    for result in (RESULT, replace(RESULT, hot_loop=LOOP)):
        store(tmp_path, result)
        assert load(tmp_path, "key") == result
    (tmp_path / "key.json").write_text('{"case": "of another version"}')
    assert load(tmp_path, "key") is None


def test_case_names_are_distinct_and_sample_covers_every_kernel() -> None:
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    launched = {launch.kernel.name for case in cases for launch in case.launches(H200)}
    sampled = {launch.kernel.name for case in cases if case.in_sample for launch in case.launches(H200)}
    assert launched == sampled


def test_every_case_launches_on_its_targets() -> None:
    for case in all_cases():
        assert bool(case.launches(A100)) is not (case.needs_float8 or case.needs_hopper)
        assert case.launches(H200)


def test_report_shows_spills_and_missing_targets() -> None:
    other = replace(RESULT, target=80, registers=255, spill_bytes=64, wgmma=False)
    page = markdown("3.9.0", [asdict(RESULT), asdict(other)])
    assert "| case | kernel | 8, 3 | 255 · 195, spills 64 | – | 128 · 195 w | – |" in page


def test_only_without_match_is_rejected_with_valid_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["--cache", str(tmp_path), "--only", "no such kernel"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("aot: no kernel's name contains 'no such kernel'; they are paged_decode, ")


def test_run_of_some_targets_keeps_figures_of_others(tmp_path: Path) -> None:
    file = tmp_path / file_name(triton.__version__)
    write_report(tmp_path, [RESULT, replace(RESULT, target=80)])
    write_report(tmp_path, [replace(RESULT, registers=96)])
    kept = [(entry["target"], entry["registers"]) for entry in json.loads(file.read_text())["kernels"]]
    assert kept == [(90, 96), (80, RESULT.registers)]
