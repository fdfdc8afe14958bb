"""Folders that outlive no process, however it dies."""

import subprocess
import sys
from pathlib import Path

from trimtab_engine.ipc.private_folder import PrivateFolder

CRASH = """
import os, sys
from pathlib import Path
from trimtab_engine.ipc.private_folder import PrivateFolder
folder = PrivateFolder(Path(sys.argv[1]))
(folder.path / "to-0-0").touch()
print(folder.path, flush=True)
os._exit(1)
"""


def test_private_folder_mode_and_removal(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_abandoned_folders_are_removed_and_live_ones_kept(tmp_path: Path) -> None:
    alive = PrivateFolder(tmp_path)
    other = tmp_path / "trimtab-of-somebody"
    other.mkdir()
    crashed = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], capture_output=True, text=True, check=False)
    left = Path(crashed.stdout.strip())
    assert (left / "to-0-0").exists()
    new = PrivateFolder(tmp_path)
    assert not left.exists()
    assert alive.path.exists()
    assert other.exists(), "a folder without a lock is foreign"
    for folder in (alive, new):
        folder.remove()
