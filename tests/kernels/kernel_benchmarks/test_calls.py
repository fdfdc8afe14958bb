"""The three commands of a borrowed GPU's half hour, run to their end against a stand-in for the device."""

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
"""Names of files that every machine gives back."""
FILES_BACK = 8
ROOT = Path(__file__).parents[3]


def python(name: str, program: str, seconds: float = 30.0) -> Step:
    return Step(name, (sys.executable, "-c", program), seconds)


def results(folder: Path, call: str = "gate") -> dict[str, str]:
    """What is said of each step, or its exit code."""
    return {
        entry["step"]: entry["said"] or str(entry["code"])
        for entry in json.loads((folder / f"call-{call}.json").read_text())
    }


@pytest.mark.parametrize("call", CALLS)
def test_a_dry_run_goes_through_all_steps_and_leaves_log_and_summary(
    call: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([call, "--dry-run", "--output", str(tmp_path)]) == DONE
    names = [step.name for step in steps_of(call, tmp_path, jobs=2)]
    assert list(results(tmp_path, call)) == names
    log = "".join(path.read_text() for path in sorted(tmp_path.glob(f"call-{call}*.log")))
    assert all(f"=== {name}: " in log for name in names)
    assert log.count("would run:") == 2 * len(names), "in the command that is told, and by it"
    assert capsys.readouterr().out.count("passed") == len(names)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) <= FILES_BACK
    assert all(BACK.fullmatch(path.name) for path in files)


@pytest.mark.parametrize("call", CALLS)
def test_what_is_run_exists(call: str, tmp_path: Path) -> None:
    for step in steps_of(call, tmp_path, jobs=2):
        for part in step.command:
            if part.startswith(("tests/", "kernels/", "--ignore=")):
                assert (ROOT / part.removeprefix("--ignore=")).exists(), part


def test_the_riskiest_questions_come_first() -> None:
    names = [step.name for step in steps_of("gate", Path(), jobs=2)]
    assert names.index("mapped memory and swap") < names.index("graphs") < names.index("layouts")


def test_what_counts_the_memory_of_the_device_has_it_alone_and_leaves_time_for_the_others() -> None:
    """In one process where its tests count that of other processes too."""
    steps = steps_of("gate", Path(), jobs=8)
    alone = [step for step in steps if step.lane == 1]
    files = {f"tests/engine/cuda/{path.name}" for path in (ROOT / "tests" / "engine" / "cuda").glob("test_*.py")}
    beside = {part for step in steps if step.lane > 1 for part in step.command if "engine/cuda" in part}
    assert beside == {"tests/engine/cuda/test_families.py"}, "which says how much of the device it may have"
    assert files - beside == {part for step in alone for part in step.command if part.startswith("tests/")}
    jobs = {step.name: step.command[step.command.index("-n") + 1] for step in alone if "-n" in step.command}
    assert jobs == {"graphs": "1", "layouts": "3", "images": "1"}
    assert sum(step.seconds for step in alone) <= 0.7 * CALL_SECONDS


def test_the_first_lane_runs_alone_and_the_others_side_by_side_behind_it(tmp_path: Path) -> None:
    """Each step of the second lane waits for a step of the third that would run after it, were there one lane. The
    first lane's last step takes long enough for another to begin, if one might."""
    ended, met = tmp_path / "ended", tmp_path / "met"
    ends = f"import pathlib, time; time.sleep(0.3); pathlib.Path({str(ended)!r}).touch()"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(met)!r}).exists(): time.sleep(0.01)"
    meets = f"import pathlib; assert pathlib.Path({str(ended)!r}).exists(); pathlib.Path({str(met)!r}).touch()"
    steps = [
        python("alone", ends),
        replace(python("first", waits), lane=2),
        replace(python("second", "raise SystemExit('wrong')"), lane=2),
        replace(python("beside", meets), lane=3),
    ]
    said: list[str] = []
    assert run_call("gate", steps, tmp_path / "found", said.append, kernels=tmp_path / "kernels") == FAILED
    assert results(tmp_path / "found") == {"alone": "0", "first": "0", "second": "1", "beside": "0"}
    assert "=== alone" in (tmp_path / "found" / "call-gate.log").read_text()
    assert "wrong" in (tmp_path / "found" / "call-gate-2.log").read_text()
    assert "=== beside" in (tmp_path / "found" / "call-gate-3.log").read_text()
    assert said[-1] == "failed: second; its output begins at '=== second' in call-gate-2.log"


def test_a_step_that_fails_does_not_keep_the_next_from_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [python("bad", "raise SystemExit('the kernel is wrong')"), python("good", "print('right')")]
    assert run_call("gate", steps, tmp_path, print, kernels=tmp_path / "kernels") == FAILED
    assert results(tmp_path) == {"bad": "1", "good": "0"}
    assert "the kernel is wrong" in (tmp_path / "call-gate.log").read_text()
    assert "failed: bad; its output begins at '=== bad' in call-gate.log" in capsys.readouterr().out


def test_a_step_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = f"""
import subprocess, time
child = subprocess.Popen(["sleep", "600"])
open({str(pids)!r}, "w").write(f"{{child.pid}}\\n")
time.sleep(600)
"""
    hangs = python("hangs", program, seconds=2.0)
    assert run_call("gate", [hangs, python("good", "pass")], tmp_path, print, kernels=tmp_path / "kernels") == FAILED
    assert results(tmp_path) == {"hangs": "ended after its 2 s", "good": "0"}
    if pids.exists():  # in two seconds most machines start it
        waiting.until_gone(map(int, pids.read_text().split()))


def test_what_the_time_does_not_suffice_for_is_named(tmp_path: Path) -> None:
    assert (
        run_call("gate", [python("late", "pass")], tmp_path, print, budget=15.5, kernels=tmp_path / "kernels")
        == OUT_OF_TIME
    )
    assert results(tmp_path) == {"late": "left out: the time is over"}


def test_a_program_that_is_not_there_leaves_its_step_out(tmp_path: Path) -> None:
    step = Step("checked", ("no-such-program",), 9.0, needs="no-such-program")
    assert run_call("gate", [step], tmp_path, print, kernels=tmp_path / "kernels") == DONE
    assert results(tmp_path) == {"checked": "left out: there is no no-such-program"}


def test_tuned_configurations_come_back_as_one_file(tmp_path: Path) -> None:
    made = tmp_path / "configs" / "N=4096,K=4096,device_name=H100.json"
    program = f"import pathlib; p = pathlib.Path({str(made)!r}); p.parent.mkdir(); p.write_text('{{}}')"
    assert run_call("rest", [python("tune", program)], tmp_path, print, kernels=tmp_path / "kernels") == DONE
    with tarfile.open(tmp_path / "call-rest.tar.gz") as archive:
        names = archive.getnames()
    assert {"./configs/N=4096,K=4096,device_name=H100.json", "./call-rest.log", "./call-rest.json"} <= set(names)
    assert not [name for name in names if name.endswith(".tar.gz")], "the archive before is not in the next"


def test_all_steps_fit_the_time_where_they_are_as_quick_as_planned() -> None:
    assert CALL_SECONDS < 600
    for call in ("rows", "rest"):
        assert sum(step.seconds for step in steps_of(call, Path(), jobs=2)) <= CALL_SECONDS - LAST_SECONDS


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run")
def test_without_a_gpu_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "--output", str(tmp_path)]) == NO_GPU
    assert "nothing was run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
