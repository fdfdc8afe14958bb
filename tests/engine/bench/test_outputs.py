"""Result files on a full disk: a one-line error, and existing files are kept."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from trimtab_engine.bench.outputs import write_file
from trimtab_engine.errors import TrimtabError

FULL_DISK_PROGRAM = """
import resource, sys
from pathlib import Path
from trimtab_engine.bench.outputs import write_file

resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
try:
    write_file(Path(sys.argv[1]), bytes(65))
except Exception as error:
    print(type(error).__name__, error)
"""  # a process that may write 64 bytes of a file meets the error of a disk that has no more


def error_on_full_disk(path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK_PROGRAM, str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_existing_file_survives_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text("earlier runs")
    error = error_on_full_disk(path)
    assert error.startswith(f"TrimtabError {path}: cannot write the file: File too large; free space")
    assert path.read_text() == "earlier runs"


def test_no_partial_file_is_left_on_a_full_disk(tmp_path: Path) -> None:
    assert "cannot write the file" in error_on_full_disk(tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []


def test_full_device_is_named_and_kept() -> None:
    with pytest.raises(TrimtabError, match="/dev/full: cannot write the file: No space left on device; free space"):
        write_file(Path("/dev/full"), b"a")
    assert Path("/dev/full").exists()


def test_file_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("longer than the new content")
    write_file(tmp_path / "run.json", b"now")
    assert (tmp_path / "run.json").read_text() == "now"
