"""Compilation of the C sources in this folder, once per instruction set, into shared libraries that ctypes loads.

    python -m trimtab_kernels.native.build [FOLDER]

Only this step needs a compiler: without libraries, the engine uses torch's operators. `CC` names the compiler; the
default is cc. The libraries link only the C library and are reproducible with the same compiler. Each contains the hash
of its sources, so that an outdated library is not used.
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
    """Return the file name for an instruction set."""
    return f"layers-{instruction_set}.so"


def sources_hash() -> str:
    """Return the hash of the C sources and headers."""
    texts = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def compiler() -> str | None:
    """Return the path of CC, or of cc, or None if there is none."""
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
        draft.replace(target)  # atomic, because another process may be loading it
        made.append(target)
    return made


if __name__ == "__main__":
    try:
        for path in build(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER):
            print(path)
    except RuntimeError as error:
        sys.exit(str(error))
