"""The cache outside the checkout for everything that is expensive to build, keyed by a hash of its inputs.

An entry is a folder that is either absent or complete: it is built under another name and renamed. A lock per entry
lets commands run in parallel (such as `up` and `model`) without building the same entry twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from .cache_root import cache_root
from .progress import log_line

KEY_LENGTH = 12  # hexadecimal digits of a content hash: short, yet collisions are practically impossible


def key_of(*parts: str | bytes) -> str:
    """Return a short content hash. Lengths are included, so that ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:KEY_LENGTH]


def tree_key(folders: list[Path], *, suffixes: tuple[str, ...] = (), extra: tuple[str, ...] = ()) -> str:
    """Return the content hash of all files below `folders`: names and bytes, not times.

    `suffixes` limits it to files with these endings. Bytecode is ignored.
    """
    parts: list[str | bytes] = [*extra]
    for folder in folders:
        files = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
        for file in files:
            if "__pycache__" in file.parts or (suffixes and not file.name.endswith(suffixes)):
                continue
            parts += [f"{folder.name}/{file.relative_to(folder)}", file.read_bytes()]
    return key_of(*parts)


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock `name` in the cache. If another process holds it, print a line and wait."""
    path = cache_root() / "locks" / f"{name.replace('/', '-')}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log_line(f"{name}: waiting for another stage or command that holds this lock")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def entry(name: str, make: Callable[[Path], None]) -> Path:
    """Return the cached folder `name`. If absent, `make` fills a scratch folder, which is then renamed atomically."""
    path = cache_root() / name
    if path.exists():
        return path
    with locked(name):
        if path.exists():
            return path
        scratch = path.with_name(f".{path.name}.making")
        remove_tree(scratch)
        scratch.mkdir(parents=True)
        try:
            make(scratch)
        except BaseException:
            remove_tree(scratch)
            raise
        scratch.rename(path)
    return path


def remove_tree(path: Path) -> None:
    """Remove a file or folder if it exists."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def scratch_folder(name: str) -> Path:
    """Return an empty folder for a build, in the cache since /tmp may be too small for root file systems."""
    folder = cache_root() / "scratch" / name
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder
