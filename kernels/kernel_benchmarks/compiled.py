"""Transfer of Triton's compiled kernels between machines: compilation takes a third of a command's time.

Triton's cache names its files by the hash of their inputs, and its index files contain absolute paths, so the cache
must have the same path on every machine. Only the files that a launch needs are transferred (machine code, metadata,
launchers). Missing or outdated kernels are compiled as usual.
"""

import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(tempfile.gettempdir()) / "trimtab-triton-cache"
VARIABLE = "TRITON_CACHE_DIR"
ARCHIVE = "triton-cache.tar.xz"
NEEDED = frozenset({".json", ".cubin", ".so"})


def unpack(archive: Path, folder: Path = FOLDER) -> int:
    """Unpack into the folder, creating it. Returns the number of files; 0 without an archive.

    Raises:
        tarfile.TarError: the archive is invalid.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        return 0
    with tarfile.open(archive) as packed:
        members = packed.getmembers()
        packed.extractall(folder, members, filter="data")
    return sum(member.isfile() for member in members)


def pack(archive: Path, folder: Path = FOLDER) -> int:
    """Pack the files that launches need. Returns the number of files; without any, no archive is written."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in NEEDED and path.is_file()]
    if files:
        temporary = archive.with_suffix(".part")
        with tarfile.open(temporary, "w:xz", preset=1) as packed:
            for path in files:
                packed.add(path, arcname=str(path.relative_to(folder)))
        temporary.replace(archive)
    return len(files)
