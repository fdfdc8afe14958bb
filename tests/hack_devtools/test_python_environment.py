"""The checkout's virtual environment: one whose checkout was moved is made anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from devtools.python_environment import is_of_here


def an_environment(folder: Path, first_lines: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "trimtab").write_text(f"{first_lines}\nimport sys\n")
    return folder


@pytest.mark.parametrize("form", ["#!{0}/bin/python", "#!/bin/sh\n'''exec' \"{0}/bin/python\" \"$0\" \"$@\"\n' '''"])
def test_programs_that_run_the_interpreter_of_another_place_are_told(tmp_path: Path, form: str) -> None:
    here = an_environment(tmp_path / "my checkout" / ".venv", form.format(tmp_path / "my checkout" / ".venv"))
    assert is_of_here(here)
    moved = here.parent.rename(tmp_path / "elsewhere") / ".venv"
    assert not is_of_here(moved)


def test_an_environment_that_is_linked_is_of_here(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    link = tmp_path / "other" / ".venv"
    real = an_environment(tmp_path / "real", f"#!{link}/bin/python")
    link.symlink_to(real)
    assert is_of_here(link)
    assert is_of_here(real)


def test_what_is_not_there_yet_is_not_of_elsewhere(tmp_path: Path) -> None:
    assert is_of_here(tmp_path / ".venv")
