"""Kernels that Triton has compiled, carried from one fresh machine to the next: they are a third of what a call takes.

Triton's cache names its files by what they were compiled of, and in an index of each kernel by their whole paths: so it
lies at the same place on every machine. Only what a launch needs travels (machine code, its description, launchers).
A kernel that is not there, or was compiled of something else, is compiled as ever.
"""

import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(tempfile.gettempdir()) / "trimtab-triton-cache"
VARIABLE = "TRITON_CACHE_DIR"
ARCHIVE = "triton-cache.tar.xz"
NEEDED = frozenset({".json", ".cubin", ".so"})


def unpack(archive: Path, folder: Path = FOLDER) -> int:
    """Into the folder, which is made. Returns the number of files; 0 where there is no archive. Raises
    tarfile.TarError for one that is none."""
    folder.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        return 0
    with tarfile.open(archive) as packed:
        members = packed.getmembers()
        packed.extractall(folder, members, filter="data")
    return sum(member.isfile() for member in members)


def pack(archive: Path, folder: Path = FOLDER) -> int:
    """What a launch needs of the folder. Returns the number of files; without any there is no archive."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in NEEDED and path.is_file()]
    if files:
        beside = archive.with_suffix(".part")
        with tarfile.open(beside, "w:xz", preset=1) as packed:
            for path in files:
                packed.add(path, arcname=str(path.relative_to(folder)))
        beside.replace(archive)
    return len(files)
