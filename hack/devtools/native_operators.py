"""The native CPU operators, compiled in place. Without a compiler the engine falls back to torch's operators."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from .cache import key_of
from .errors import ClusterError
from .process import run
from .progress import log_line

FOLDER = Path(__file__).resolve().parent.parent.parent / "kernels" / "trimtab_kernels" / "native"
STAMP = FOLDER / "compiled" / ".ready"


def ensure() -> None:
    """Compile the operators if a source has changed. Failures are only logged, since they only affect speed."""
    key = _key()
    if STAMP.is_file() and STAMP.read_text() == key:
        return
    if shutil.which(os.environ.get("CC", "cc")) is None:
        log_line("native operators: no C compiler found, so the engine uses torch's operators: slower on CPUs")
        return
    try:
        run([sys.executable, FOLDER / "build.py"], log="native")
    except ClusterError as error:
        log_line(f"native operators: the engine will use torch's operators: {error}")
        return
    STAMP.write_text(key)


def _key() -> str:
    sources = [FOLDER / "build.py", *sorted(FOLDER.glob("*.[ch]"))]
    return key_of(os.environ.get("CC", "cc"), *(source.read_bytes() for source in sources))
