"""One run: the order of its phases, their share of the budget, and the exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_benchmarks.__main__ import END_SECONDS, main, parse
from kernel_benchmarks.engine_rows import GROUPS
from kernel_benchmarks.phase import DONE, FAILED, NO_GPU, OUT_OF_TIME, RUN_SECONDS
from kernel_benchmarks.report import Report


class Parts:
    """Fakes the processes: records the phases, and returns exit codes by module."""

    def __init__(self, **codes: int | list[int]) -> None:
        self.codes, self.calls = codes, list[tuple[str, list[str], float]]()

    def __call__(self, module: str, arguments: list[str], path: Path, run: str, *, deadline: float) -> int:
        name = module.removeprefix("kernel_benchmarks.")
        self.calls.append((name, arguments, deadline))
        if name == "limits" and "--at-end" not in arguments:
            Report(path, run).start(
                {"device": "one"}, arguments[arguments.index("--command") + 1], keep_rows=True, only=""
            )
        if name == "kernel_rows":
            Report(path, run).add("norm", {"error": "wrong"} if self.codes.get(name) == FAILED else {"share": 1.0})
        code = self.codes.get(name, DONE)
        return code.pop(0) if isinstance(code, list) else code

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]

    def value(self, number: int, option: str) -> str:
        arguments = self.calls[number][1]
        return arguments[arguments.index(option) + 1]


def a_run(folder: Path, parts: Parts, *arguments: str) -> int:
    return main(["--output", str(folder), "--wheels", str(folder / "none"), *arguments], parts)


def test_own_rows_run_before_peers_within_budget(tmp_path: Path) -> None:
    parts = Parts()
    assert a_run(tmp_path, parts, "--seed", "3") == DONE
    engines = ["end_to_end"] * len(GROUPS)
    assert parts.names()[: 2 + len(GROUPS)] == ["limits", "kernel_rows", *engines]
    assert parts.names()[-1] == "kernel_rows"
    assert "--peers" in parts.calls[-1][1]
    assert parts.names()[2 + len(GROUPS)] == "limits", "measured again, so that a drift is seen"
    assert "--at-end" in parts.calls[2 + len(GROUPS)][1]
    assert set(parts.names()[3 + len(GROUPS) : -1]) <= {"engine_peers"}
    started, deadline = float(parts.value(0, "--started")), parts.calls[0][2]
    assert deadline == pytest.approx(started + RUN_SECONDS - END_SECONDS)
    assert RUN_SECONDS < 600
    untils = [float(parts.value(number, "--until")) for number in range(len(parts.calls))]
    assert untils[1] < untils[2] < untils[-1] <= deadline
    assert parts.value(0, "--command") == "make bench-gpu (seed 3)"
    assert {"gpu.json", "gpu.md", "gpu.svg"} <= {path.name for path in tmp_path.iterdir()}


def test_interrupted_kernels_continue_after_engine(tmp_path: Path) -> None:
    parts = Parts(kernel_rows=[OUT_OF_TIME, DONE, OUT_OF_TIME])
    assert a_run(tmp_path, parts) == DONE, "that peers were not reached is no failure"
    assert parts.names()[1 + 1 + len(GROUPS)] == "kernel_rows"
    assert "--peers" not in parts.calls[2 + len(GROUPS)][1]


def test_run_with_missing_rows_reports_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert a_run(tmp_path, Parts(end_to_end=OUT_OF_TIME)) == OUT_OF_TIME
    assert "RESUME=1 continues" in capsys.readouterr().out


def test_wrong_kernel_fails_run_but_engine_is_measured(tmp_path: Path) -> None:
    parts = Parts(kernel_rows=FAILED)
    assert a_run(tmp_path, parts) == FAILED
    assert "end_to_end" in parts.names()
    assert "failed: wrong" in (tmp_path / "gpu.md").read_text()


def test_only_and_resume_are_passed_to_phases(tmp_path: Path) -> None:
    parts = Parts()
    assert a_run(tmp_path, parts, "--only", "paged", "--resume", "--seed", "3") == DONE
    assert parts.value(0, "--command") == "make bench-gpu ONLY=paged RESUME=1 (seed 3)"
    assert "--resume" in parts.calls[0][1]
    assert parts.value(1, "--only") == "paged"
    assert parts.names() == ["limits", "kernel_rows", "limits", "kernel_rows"], "no row of the engine is called so"


def test_kernels_only(tmp_path: Path) -> None:
    parts = Parts()
    assert a_run(tmp_path, parts, "--kernels") == DONE
    assert parts.names() == ["limits", "kernel_rows", "limits"]


def test_absent_peers_are_recorded_without_process(tmp_path: Path) -> None:
    parts = Parts()
    a_run(tmp_path, parts)
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    peer_results = rows["engine llama-3.1-8b prefill"]["peers"]
    assert "nanovllm is not installed" in peer_results["nano-vllm"]["not_run"]
    assert "minisgl is not installed" in peer_results["mini-sglang"]["not_run"]
    requested = [parts.value(n, "--peer") for n, name in enumerate(parts.names()) if name == "engine_peers"]
    assert set(requested) == {"transformers continuous batching"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_gpu_nothing_is_measured_or_written(tmp_path: Path) -> None:
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "kernel_benchmarks", "--output", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == NO_GPU
    assert "nothing was measured" in done.stderr
    assert not list(tmp_path.iterdir())


def test_parse_command_line() -> None:
    options = parse(["--only", "paged", "--resume", "--seed", "3"])
    assert (options.only, options.resume, options.seed) == ("paged", True, 3)
