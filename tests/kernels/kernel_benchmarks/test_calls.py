"""The three commands for a GPU machine, run to their end with a fake device."""

import json
import re
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import waiting
from kernel_benchmarks.calls import CALL_SECONDS, LAST_SECONDS, Step, main, run_call, steps_of
from kernel_benchmarks.phase import DONE, FAILED, NO_GPU, OUT_OF_TIME

CALLS = ("gate", "rows", "rest")
BACK = re.compile(r"[A-Za-z0-9._-]+")
"""File names that every machine returns."""
FILES_BACK = 8
ROOT = Path(__file__).parents[3]


def python(name: str, program: str, seconds: float = 30.0) -> Step:
    return Step(name, (sys.executable, "-c", program), seconds)


def results(folder: Path, call: str = "gate") -> dict[str, str]:
    """Return each step's note, or its exit code."""
    return {
        entry["step"]: entry["note"] or str(entry["code"])
        for entry in json.loads((folder / f"call-{call}.json").read_text())
    }


@pytest.mark.parametrize("call", CALLS)
def test_dry_run_lists_all_steps_and_writes_log_and_summary(
    call: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([call, "--dry-run", "--output", str(tmp_path)]) == DONE
    names = [step.name for step in steps_of(call, tmp_path, jobs=2)]
    assert list(results(tmp_path, call)) == names
    log = "".join(path.read_text() for path in sorted(tmp_path.glob(f"call-{call}*.log")))
    assert all(f"=== {name}: " in log for name in names)
    assert log.count("would run:") == 2 * len(names), "in the printed command, and in its output"
    assert capsys.readouterr().out.count("passed") == len(names)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) <= FILES_BACK
    assert all(BACK.fullmatch(path.name) for path in files)


@pytest.mark.parametrize("call", CALLS)
def test_commands_of_steps_exist(call: str, tmp_path: Path) -> None:
    for step in steps_of(call, tmp_path, jobs=2):
        for part in step.command:
            if part.startswith(("tests/", "kernels/", "--ignore=")):
                assert (ROOT / part.removeprefix("--ignore=")).exists(), part


def test_riskiest_steps_run_first() -> None:
    names = [step.name for step in steps_of("gate", Path(), jobs=2)]
    assert names.index("mapped memory and swap") < names.index("graphs") < names.index("layouts")


def test_device_memory_tests_run_exclusively() -> None:
    """Exclusive in one process, because these tests count the memory of other processes too."""
    steps = steps_of("gate", Path(), jobs=8)
    exclusive = [step for step in steps if step.lane == 1]
    files = {f"tests/engine/cuda/{path.name}" for path in (ROOT / "tests" / "engine" / "cuda").glob("test_*.py")}
    concurrent = {part for step in steps if step.lane > 1 for part in step.command if "engine/cuda" in part}
    assert concurrent == {"tests/engine/cuda/test_families.py"}, "which limits its share of the device"
    assert files - concurrent == {part for step in exclusive for part in step.command if part.startswith("tests/")}
    jobs = {step.name: step.command[step.command.index("-n") + 1] for step in exclusive if "-n" in step.command}
    assert jobs == {"graphs": "1", "layouts": "3", "images": "1"}
    assert sum(step.seconds for step in exclusive) <= 0.7 * CALL_SECONDS


def test_first_lane_runs_exclusively_then_others_in_parallel(tmp_path: Path) -> None:
    """Each step of the second lane waits for a step of the third, which would run after it with one lane. The first
    lane's last step is long enough for another to start, if that were allowed.
    """
    ended, met = tmp_path / "ended", tmp_path / "met"
    ends = f"import pathlib, time; time.sleep(0.3); pathlib.Path({str(ended)!r}).touch()"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(met)!r}).exists(): time.sleep(0.01)"
    meets = f"import pathlib; assert pathlib.Path({str(ended)!r}).exists(); pathlib.Path({str(met)!r}).touch()"
    steps = [
        python("exclusive", ends),
        replace(python("first", waits), lane=2),
        replace(python("second", "raise SystemExit('wrong')"), lane=2),
        replace(python("concurrent", meets), lane=3),
    ]
    note: list[str] = []
    assert run_call("gate", steps, tmp_path / "found", note.append, kernels=tmp_path / "kernels") == FAILED
    assert results(tmp_path / "found") == {"exclusive": "0", "first": "0", "second": "1", "concurrent": "0"}
    assert "=== exclusive" in (tmp_path / "found" / "call-gate.log").read_text()
    assert "wrong" in (tmp_path / "found" / "call-gate-2.log").read_text()
    assert "=== concurrent" in (tmp_path / "found" / "call-gate-3.log").read_text()
    assert note[-1] == "failed: second; its output begins at '=== second' in call-gate-2.log"


def test_failed_step_does_not_prevent_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [python("bad", "raise SystemExit('the kernel is wrong')"), python("good", "print('right')")]
    assert run_call("gate", steps, tmp_path, print, kernels=tmp_path / "kernels") == FAILED
    assert results(tmp_path) == {"bad": "1", "good": "0"}
    assert "the kernel is wrong" in (tmp_path / "call-gate.log").read_text()
    assert "failed: bad; its output begins at '=== bad' in call-gate.log" in capsys.readouterr().out


def test_hanging_step_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = f"""
import subprocess, time
child = subprocess.Popen(["sleep", "600"])
open({str(pids)!r}, "w").write(f"{{child.pid}}\\n")
time.sleep(600)
"""
    hangs = python("hangs", program, seconds=2.0)
    assert run_call("gate", [hangs, python("good", "pass")], tmp_path, print, kernels=tmp_path / "kernels") == FAILED
    assert results(tmp_path) == {"hangs": "stopped after 2 s", "good": "0"}
    if pids.exists():  # in two seconds, most machines start it
        waiting.until_gone(map(int, pids.read_text().split()))


def test_steps_without_remaining_time_are_listed(tmp_path: Path) -> None:
    assert (
        run_call("gate", [python("late", "pass")], tmp_path, print, budget=15.5, kernels=tmp_path / "kernels")
        == OUT_OF_TIME
    )
    assert results(tmp_path) == {"late": "skipped: out of time"}


def test_step_with_missing_program_is_skipped(tmp_path: Path) -> None:
    step = Step("checked", ("no-such-program",), 9.0, needs="no-such-program")
    assert run_call("gate", [step], tmp_path, print, kernels=tmp_path / "kernels") == DONE
    assert results(tmp_path) == {"checked": "skipped: no-such-program is not installed"}


def test_tuned_configurations_are_archived_as_one_file(tmp_path: Path) -> None:
    made = tmp_path / "configs" / "N=4096,K=4096,device_name=H100.json"
    program = f"import pathlib; p = pathlib.Path({str(made)!r}); p.parent.mkdir(); p.write_text('{{}}')"
    assert run_call("rest", [python("tune", program)], tmp_path, print, kernels=tmp_path / "kernels") == DONE
    with tarfile.open(tmp_path / "call-rest.tar.gz") as archive:
        names = archive.getnames()
    assert {"./configs/N=4096,K=4096,device_name=H100.json", "./call-rest.log", "./call-rest.json"} <= set(names)
    assert not [name for name in names if name.endswith(".tar.gz")], "the archive before is not in the next"


def test_planned_durations_fit_time_limit() -> None:
    assert CALL_SECONDS < 600
    for call in ("rows", "rest"):
        assert sum(step.seconds for step in steps_of(call, Path(), jobs=2)) <= CALL_SECONDS - LAST_SECONDS


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run")
def test_calls_without_gpu_run_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "--output", str(tmp_path)]) == NO_GPU
    assert "nothing was run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
