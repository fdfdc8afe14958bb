"""Selection of the library, and the errors if there is none."""

import logging
from pathlib import Path

import pytest
import trimtab_kernels.native.build as build_module
import trimtab_kernels.native.library as library_module
from trimtab_kernels.native.build import build, compiler, library_name
from trimtab_kernels.native.library import (
    NativeLibrary,
    NativeUnavailable,
    load_library,
    native_library,
    usable_instruction_sets,
)


def test_best_instruction_set_is_selected(compiled: Path) -> None:
    found = load_library(compiled)
    assert isinstance(found, NativeLibrary)
    assert found.instruction_set == usable_instruction_sets()[0]


def test_library_uses_torchs_threads(compiled: Path) -> None:
    found = load_library(compiled)
    assert isinstance(found, NativeLibrary)
    assert found.has_threads
    runtimes = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(runtimes) == 1


def test_empty_folder_error_names_build_command(tmp_path: Path) -> None:
    assert load_library(tmp_path) == NativeUnavailable(
        "they were not compiled; run python -m trimtab_kernels.native.build"
    )


def test_broken_library_error_names_file(tmp_path: Path) -> None:
    name = library_name(usable_instruction_sets()[0])
    (tmp_path / name).write_text("no library")
    found = load_library(tmp_path)
    assert isinstance(found, NativeUnavailable)
    assert f"{name} does not load" in found.reason


def test_library_of_other_sources_is_rejected(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "sources_hash", lambda: "changed since")
    found = load_library(compiled)
    assert isinstance(found, NativeUnavailable)
    assert "from other sources" in found.reason


def test_unknown_machine_error_names_machine(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "abacus")
    assert load_library(compiled) == NativeUnavailable("there are none for this CPU (abacus)")


def test_build_without_compiler_error_names_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="install one, or name it in CC"):
        build(tmp_path)


def test_failed_build_quotes_compiler_and_leaves_nothing(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "FLAGS", ("-no-such-flag",))
    with pytest.raises(RuntimeError, match=r"no-such-flag"):
        build(tmp_path)
    assert not list(tmp_path.iterdir())


def test_library_is_compiled_into_the_cache_at_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wheel that was built without a compiler contains no libraries; one is compiled for this CPU, once."""
    if compiler() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(library_module, "FOLDER", tmp_path / "package")
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO)
    found = native_library.__wrapped__()
    assert isinstance(found, NativeLibrary)
    assert found.instruction_set == usable_instruction_sets()[0]
    assert [path.name for path in (tmp_path / "cache").rglob("*.so")] == [library_name(found.instruction_set)]
    assert "CPU operators: compiling" in caplog.text
    monkeypatch.setenv("CC", "no-such-compiler")
    assert isinstance(native_library.__wrapped__(), NativeLibrary)


def test_missing_library_names_the_compiler_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "FOLDER", tmp_path / "package")
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "no-such-compiler")
    found = native_library.__wrapped__()
    assert isinstance(found, NativeUnavailable)
    assert "compiling them failed: no C compiler" in found.reason


def test_unwritable_cache_returns_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(library_module, "FOLDER", tmp_path / "package")
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "file"))
    found = native_library.__wrapped__()
    assert isinstance(found, NativeUnavailable)
    assert "Not a directory" in found.reason
