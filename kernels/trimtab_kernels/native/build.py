"""Compiles the C sources beside this file, once per instruction set, into shared libraries that ctypes loads.

    python -m trimtab_kernels.native.build [FOLDER]

A compiler is needed here and nowhere else: without libraries the engine computes by torch's operators. `CC` names the
compiler, cc is the default. They link the C library alone, and are the same bytes wherever the same compiler made them.
Each carries the hash of its sources, so that a library that was left behind by an update is not used.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parent
FOLDER = SOURCES / "compiled"
INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "x86-64-v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
        "x86-64-v3": ("-march=x86-64-v3",),
        "x86-64-v2": ("-march=x86-64-v2",),
    },
    "aarch64": {"armv8-a": ("-march=armv8-a",)},
}
"""By machine, the best first."""
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-shared", "-fPIC")


def library_name(instruction_set: str) -> str:
    """The file of one instruction set."""
    return f"layers-{instruction_set}.so"


def sources_hash() -> str:
    """Of layers.c and what it includes."""
    texts = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def compiler() -> str | None:
    """CC, or cc, if there is one."""
    return shutil.which(os.environ.get("CC", "cc"))


def build(folder: Path = FOLDER, only: str | None = None) -> list[Path]:
    """Compile for every instruction set of this machine's architecture, or for `only` one of them.

    Raises:
        RuntimeError: no compiler is available, or it failed; the message contains its output.
    """
    command = compiler()
    if command is None:
        raise RuntimeError("no C compiler: install one, or name it in CC; the engine runs without, at torch's speed")
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, flags in INSTRUCTION_SETS.get(platform.machine(), {}).items():
        if only is not None and name != only:
            continue
        target = folder / library_name(name)
        draft = target.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            [command, *FLAGS, *flags, f'-DSOURCES_HASH="{sources_hash()}"', "-o", draft, "layers.c"],
            cwd=SOURCES,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{command} could not compile layers.c for {name}:\n{done.stderr.strip()}")
        draft.replace(target)  # whole or not at all: somebody may be loading it
        made.append(target)
    return made


if __name__ == "__main__":
    try:
        for path in build(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER):
            print(path)
    except RuntimeError as error:
        sys.exit(str(error))
