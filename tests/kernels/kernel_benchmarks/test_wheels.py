"""Wheels replace packages that are not installed, in this process and its children."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "kernel_benchmarks.wheels", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a wheel of a package that is not installed, and one of an installed package."""
    for name in ("only_in_a_wheel", "PyYAML"):
        with zipfile.ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "import sys; print('arguments', *sys.argv[1:])\n")
    return tmp_path


def test_module_runs_with_missing_packages_from_wheels(folder: Path) -> None:
    done = run(str(folder), "only_in_a_wheel", "a", "b")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"from {folder}: only-in-a-wheel", "arguments a b"]


def test_child_processes_use_wheels(folder: Path) -> None:
    script = folder / "parent.py"
    script.write_text("import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'only_in_a_wheel'], check=True)\n")
    with zipfile.ZipFile(folder / "parent-1-py3-none-any.whl", "w") as wheel:
        wheel.write(script, "parent.py")
    assert run(str(folder), "parent").stdout.splitlines()[-1] == "arguments"


def test_missing_wheel_folder_is_no_error(tmp_path: Path) -> None:
    assert "nothing is needed" in run(str(tmp_path / "none"), "this").stdout
    assert "usage" in run().stderr


def test_missing_module_is_named(folder: Path) -> None:
    done = run(str(folder), "no_such_module")
    assert done.returncode == 1
    assert done.stderr.startswith(f"no_such_module is neither installed for {sys.executable} nor in {folder}: ")
