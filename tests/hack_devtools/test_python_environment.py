"""Detection of a virtual environment whose checkout was moved."""

from __future__ import annotations

from pathlib import Path

import pytest
from devtools.python_environment import is_in_place


def make_environment(folder: Path, first_lines: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "trimtab").write_text(f"{first_lines}\nimport sys\n")
    return folder


@pytest.mark.parametrize("form", ["#!{0}/bin/python", "#!/bin/sh\n'''exec' \"{0}/bin/python\" \"$0\" \"$@\"\n' '''"])
def test_moved_environment_is_detected(tmp_path: Path, form: str) -> None:
    here = make_environment(tmp_path / "my checkout" / ".venv", form.format(tmp_path / "my checkout" / ".venv"))
    assert is_in_place(here)
    moved = here.parent.rename(tmp_path / "elsewhere") / ".venv"
    assert not is_in_place(moved)


def test_linked_environment_is_in_place(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    link = tmp_path / "other" / ".venv"
    real = make_environment(tmp_path / "real", f"#!{link}/bin/python")
    link.symlink_to(real)
    assert is_in_place(link)
    assert is_in_place(real)


def test_missing_venv_is_not_reported_as_foreign(tmp_path: Path) -> None:
    assert is_in_place(tmp_path / ".venv")
