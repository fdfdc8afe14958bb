"""The generated index of the architecture decision records."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the script and the records, so that tests can change them."""
    shutil.copytree(REPOSITORY / "docs" / "adr", tmp_path / "docs" / "adr")
    (tmp_path / "hack").mkdir()
    shutil.copy(REPOSITORY / "hack" / "adr_index.py", tmp_path / "hack")
    return tmp_path


def run_script(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script in this copy of the repository."""
    command = [sys.executable, str(root / "hack" / "adr_index.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_adr_index_is_up_to_date() -> None:
    checked = run_script(REPOSITORY, "--check")
    assert checked.returncode == 0, checked.stderr


def test_check_with_outdated_index_fails_until_written(copy: Path) -> None:
    (copy / "docs/adr/README.md").write_text("outdated")
    assert "run: python hack/adr_index.py" in run_script(copy, "--check").stderr
    assert run_script(copy).returncode == 0
    assert run_script(copy, "--check").returncode == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("- Status: Accepted", "- Status: Approved"),
        ("- Area: operator", "- Area: kitchen"),
        ("# ADR-0005:", "# ADR-0006:"),
        ("## Consequences", "## Results"),
    ],
)
def test_check_with_malformed_record_names_the_file(copy: Path, old: str, new: str) -> None:
    (record,) = (copy / "docs/adr").glob("0005-*.md")
    record.write_text(record.read_text().replace(old, new))
    assert record.name in run_script(copy, "--check").stderr


def test_check_with_missing_number_fails(copy: Path) -> None:
    next((copy / "docs/adr").glob("0005-*.md")).unlink()
    assert "consecutive" in run_script(copy, "--check").stderr
