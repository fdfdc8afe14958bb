"""Messages on a machine without a GPU, or without torch."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_benchmarks import machine
from kernel_benchmarks.machine import main, missing_requirement

MAKEFILE = Path(__file__).parents[3] / "Makefile"


@pytest.mark.parametrize("absent", ["torch", "triton"])
def test_missing_package_is_named_with_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], absent: str
) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == absent else True)
    assert main(["test-gpu"]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"test-gpu: {absent} is not installed for {sys.executable}; name a Python that has torch ")
    assert "BENCH_PYTHON=PATH; nothing was run" in line


@pytest.mark.parametrize(
    ("cuda", "available", "expected"),
    [(None, False, "is built without CUDA"), ("13.0", False, "finds no CUDA device"), ("13.0", True, None)],
)
def test_missing_device_is_reported(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, available: bool, expected: str
) -> None:
    monkeypatch.setattr(torch, "version", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(machine, "find_spec", lambda name: True)  # triton is part of torch's CUDA builds
    missing = missing_requirement()
    assert missing is None if expected is None else expected in str(missing)


@pytest.mark.parametrize("target", ["bench-gpu", "test-gpu"])
def test_make_checks_machine_first(target: str) -> None:
    """With a Python without torch: one line and exit code 2."""
    command = ["make", "--no-print-directory", target, f"BENCH_PYTHON={sys.executable} -S"]
    ended = subprocess.run(command, cwd=MAKEFILE.parent, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"{target}: torch is not installed for ")
    assert "Traceback" not in ended.stderr
