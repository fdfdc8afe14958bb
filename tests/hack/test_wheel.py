"""What setup.py adds to a wheel: compiled operators and a platform tag, or neither without a compiler."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType

import pytest
from trimtab_kernels.native.build import INSTRUCTION_SETS, compiler, library_name

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("trimtab_setup", REPOSITORY / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "trimtab_setup", module)
    spec.loader.exec_module(module)
    return module


def build(module: ModuleType, folder: Path, *, is_editable: bool = False) -> Path:
    """Run build_py for a distribution without packages, and return the folder of compiled operators."""
    distribution = importlib.import_module("setuptools").Distribution({"packages": []})
    command = module.BuildPy(distribution)
    command.build_lib = str(folder)
    command.ensure_finalized()
    command.editable_mode = is_editable
    command.run()
    return folder / "trimtab_kernels" / "native" / "compiled"


def test_wheel_contains_every_instruction_set(setup_module: ModuleType, tmp_path: Path) -> None:
    if compiler() is None:
        pytest.skip("no C compiler here")
    libraries = list(build(setup_module, tmp_path).glob("*.so"))
    expected = [library_name(name) for name in INSTRUCTION_SETS.get(platform.machine(), {})]
    assert sorted(path.name for path in libraries) == sorted(expected)
    assert setup_module.platform_tag(libraries).endswith(f"linux_2_17_{platform.machine()}")


def test_wheel_without_compiler_has_a_warning(
    setup_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert list(build(setup_module, tmp_path).glob("*.so")) == []
    assert "compiles them at first use" in capsys.readouterr().err


def test_editable_installation_compiles_nothing(setup_module: ModuleType, tmp_path: Path) -> None:
    assert not build(setup_module, tmp_path, is_editable=True).exists()


@pytest.mark.parametrize(
    ("symbols", "tag"), [(b"GLIBC_2.2.5\0GLIBC_2.14\0", "manylinux_2_17"), (b"GLIBC_2.34\0", "linux"), (b"", "linux")]
)
def test_platform_tag_follows_the_newest_glibc_symbol(
    setup_module: ModuleType, tmp_path: Path, symbols: bytes, tag: str
) -> None:
    (tmp_path / "a.so").write_bytes(symbols)
    assert setup_module.platform_tag([tmp_path / "a.so"]) == f"{tag}_{platform.machine()}"
