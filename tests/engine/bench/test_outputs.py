"""A measurement's files on a disk that is full: one sentence, and what was there before stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from trimtab_engine.bench.outputs import write_file
from trimtab_engine.errors import TrimtabError

ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from trimtab_engine.bench.outputs import write_file

resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
try:
    write_file(Path(sys.argv[1]), bytes(65))
except Exception as error:
    print(type(error).__name__, error)
"""  # a process that may write 64 bytes of a file meets the error of a disk that has no more


def said_on_a_full_disk(path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ON_A_FULL_DISK, str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_what_a_file_held_survives_a_disk_that_is_full(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text("earlier runs")
    said = said_on_a_full_disk(path)
    assert said.startswith(f"TrimtabError {path}: cannot be written: File too large; make room")
    assert path.read_text() == "earlier runs"


def test_no_half_file_is_left_on_a_disk_that_is_full(tmp_path: Path) -> None:
    assert "cannot be written" in said_on_a_full_disk(tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_full_is_named_and_stays() -> None:
    with pytest.raises(TrimtabError, match="/dev/full: cannot be written: No space left on device; make room"):
        write_file(Path("/dev/full"), b"a")
    assert Path("/dev/full").exists()


def test_a_file_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("longer than what comes")
    write_file(tmp_path / "run.json", b"now")
    assert (tmp_path / "run.json").read_text() == "now"
