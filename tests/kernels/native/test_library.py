"""The library that is found, and what is said where there is none."""

from pathlib import Path

import pytest
import trimtab_kernels.native.build as build_module
import trimtab_kernels.native.library as library_module
from trimtab_kernels.native.build import build, library_name
from trimtab_kernels.native.library import Missing, NativeLibrary, load_library, usable_instruction_sets


def test_the_best_instruction_set_is_taken(compiled: Path) -> None:
    found = load_library(compiled)
    assert isinstance(found, NativeLibrary)
    assert found.instruction_set == usable_instruction_sets()[0]


def test_the_threads_are_torch_s_own(compiled: Path) -> None:
    found = load_library(compiled)
    assert isinstance(found, NativeLibrary)
    assert found.has_threads
    runtimes = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(runtimes) == 1


def test_an_empty_folder_says_how_to_fill_it(tmp_path: Path) -> None:
    assert load_library(tmp_path) == Missing("they were not compiled; python -m trimtab_kernels.native.build does it")


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    name = library_name(usable_instruction_sets()[0])
    (tmp_path / name).write_text("no library")
    found = load_library(tmp_path)
    assert isinstance(found, Missing)
    assert f"{name} does not load" in found.reason


def test_a_library_of_other_sources_is_not_used(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "sources_hash", lambda: "changed since")
    found = load_library(compiled)
    assert isinstance(found, Missing)
    assert "from other sources" in found.reason


def test_an_unknown_machine_is_named(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "abacus")
    assert load_library(compiled) == Missing("there are none for this CPU (abacus)")


def test_without_a_compiler_the_build_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="install one, or name it in CC"):
        build(tmp_path)


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "FLAGS", ("-no-such-flag",))
    with pytest.raises(RuntimeError, match=r"no-such-flag"):
        build(tmp_path)
    assert not list(tmp_path.iterdir())
