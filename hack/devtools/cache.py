"""The cache outside the checkout: what is expensive to make is made once, keyed by what it is made from.

An entry is a folder that is either absent or complete: it is written aside and renamed. A lock per entry lets two
commands run at once (`up` beside `model`, say) without making the same thing twice.
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

KEY_LENGTH = 12  # hexadecimal digits of a content hash: enough to never meet, short enough to read


def key_of(*parts: str | bytes) -> str:
    """A short content hash. Lengths are hashed too, so that ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:KEY_LENGTH]


def tree_key(folders: list[Path], *, suffixes: tuple[str, ...] = (), extra: tuple[str, ...] = ()) -> str:
    """The content hash of every file below `folders`: names and bytes, not times, so a fresh checkout hits the cache.

    `suffixes` limits it to files that end so; bytecode never counts.
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
    """Hold the lock `name` in the cache; says so when another holds it, and waits for that one to end."""
    path = cache_root() / "locks" / f"{name.replace('/', '-')}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log_line(f"{name}: another stage or command is at it, so this one waits")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def entry(name: str, make: Callable[[Path], None]) -> Path:
    """The cached folder `name`; when absent, `make` fills a scratch folder, which then takes the name in one rename."""
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
    """Remove a folder if it is there, read-only parts included (Go's and Debian's trees have some)."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
