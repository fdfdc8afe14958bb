"""What setup.py adds to a wheel: compiled operators and a platform tag, or neither without a compiler."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from trimtab_kernels.native.build import INSTRUCTION_SETS, compiler, library_name

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = """
from setuptools import Distribution
command = setup["BuildPy"](Distribution({"packages": []}))
command.build_lib = folder
command.ensure_finalized()
command.editable_mode = is_editable
command.run()
"""
TAG = """
from pathlib import Path
print(setup["platform_tag"](sorted(Path(folder).rglob("*.so"))))
"""


def run_with_setup(script: str, folder: Path, *, is_editable: bool = False, **environment: str) -> tuple[str, str]:
    """Run `script` with the names of setup.py in a process of its own, and return its standard output and error.

    setuptools replaces distutils for a whole process, which fails if another module has imported pip before.
    """
    prefix = f"import runpy; setup = runpy.run_path('setup.py'); folder = {str(folder)!r}; is_editable = {is_editable}"
    completed = subprocess.run(
        [sys.executable, "-c", f"{prefix}\n{script}"],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return completed.stdout.strip(), completed.stderr


def test_wheel_contains_every_instruction_set(tmp_path: Path) -> None:
    if compiler() is None:
        pytest.skip("no C compiler here")
    run_with_setup(BUILD, tmp_path)
    libraries = tmp_path.rglob("*.so")
    expected = [library_name(name) for name in INSTRUCTION_SETS.get(platform.machine(), {})]
    assert sorted(path.name for path in libraries) == sorted(expected)
    assert run_with_setup(TAG, tmp_path)[0].endswith(f"linux_2_17_{platform.machine()}")


def test_wheel_without_compiler_has_a_warning(tmp_path: Path) -> None:
    _, error = run_with_setup(BUILD, tmp_path, CC="no-such-compiler")
    assert list(tmp_path.rglob("*.so")) == []
    assert "compiles them at first use" in error


def test_editable_installation_compiles_nothing(tmp_path: Path) -> None:
    run_with_setup(BUILD, tmp_path, is_editable=True)
    assert list(tmp_path.rglob("*.so")) == []


@pytest.mark.parametrize(
    ("symbols", "tag"), [(b"GLIBC_2.2.5\0GLIBC_2.14\0", "manylinux_2_17"), (b"GLIBC_2.34\0", "linux"), (b"", "linux")]
)
def test_platform_tag_follows_the_newest_glibc_symbol(tmp_path: Path, symbols: bytes, tag: str) -> None:
    (tmp_path / "a.so").write_bytes(symbols)
    assert run_with_setup(TAG, tmp_path)[0] == f"{tag}_{platform.machine()}"
