"""What a machine without a GPU, or without torch, is told."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_benchmarks import machine
from kernel_benchmarks.machine import main, what_is_missing

MAKEFILE = Path(__file__).parents[3] / "Makefile"


@pytest.mark.parametrize("absent", ["torch", "triton"])
def test_what_that_python_lacks_is_named_with_how_to_name_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], absent: str
) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == absent else True)
    assert main(["test-gpu"]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"test-gpu: {absent} is not installed for {sys.executable}; name a Python that has torch ")
    assert "BENCH_PYTHON=PATH; nothing was run" in line


@pytest.mark.parametrize(
    ("cuda", "available", "told"),
    [(None, False, "is built without CUDA"), ("13.0", False, "finds no CUDA device here"), ("13.0", True, None)],
)
def test_a_device_is_looked_for(monkeypatch: pytest.MonkeyPatch, cuda: str | None, available: bool, told: str) -> None:
    monkeypatch.setattr(torch, "version", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(machine, "find_spec", lambda name: True)  # triton comes with torch's CUDA builds
    missing = what_is_missing()
    assert missing is None if told is None else told in str(missing)


@pytest.mark.parametrize("target", ["bench-gpu", "test-gpu"])
def test_make_asks_first(target: str) -> None:
    """With a Python that has no torch: one line and exit code 2, whatever else is there."""
    command = ["make", "--no-print-directory", target, f"BENCH_PYTHON={sys.executable} -S"]
    ended = subprocess.run(command, cwd=MAKEFILE.parent, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"{target}: torch is not installed for ")
    assert "Traceback" not in ended.stderr
