"""The checkout's virtual environment with all packages for programs, tests and checks."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

from .cache import entry, key_of, locked
from .errors import ClusterError
from .process import logs_folder, run
from .progress import stage

REPOSITORY = Path(__file__).resolve().parent.parent.parent
FOLDER = REPOSITORY / ".venv"
STAMP = FOLDER / ".ready"
EXTRAS = "operator,engine,router,endpoint-picker,tracing,dev"
LOG = "pip"
INSTALL_SECONDS = 100.0
INTERPRETER = re.compile(r"""#!(?:/bin/sh\n'''exec' )?"?([^"\n]+?)"?(?: "\$0".*)?$""", re.MULTILINE)
"""First lines of scripts that pip writes; it uses /bin/sh for long paths and paths with spaces."""
UNREACHABLE = re.compile(r"NewConnectionError|ConnectTimeoutError|NameResolutionError|ProxyError|SSLError")
"""Network errors in pip's output."""


def ensure() -> Path:
    """Return the environment's interpreter.

    Packages are installed again if pyproject.toml or constraints.txt has changed, or the checkout was moved.
    """
    python = FOLDER / "bin" / "python"
    if is_ready():
        return python
    with locked(f"venv-{key_of(str(REPOSITORY))}"):
        if not is_ready():
            with stage("packages: Python packages into .venv", INSTALL_SECONDS):
                if not is_in_place(FOLDER):
                    FOLDER.unlink() if FOLDER.is_symlink() else shutil.rmtree(FOLDER)
                _install(python)
                STAMP.write_text(_key())
    return python


def is_ready() -> bool:
    """Return True if the environment matches the current pyproject.toml and constraints.txt."""
    return STAMP.is_file() and STAMP.read_text() == _key() and is_in_place(FOLDER)


def is_in_place(folder: Path) -> bool:
    """Return False if its scripts use another folder's interpreter, since the checkout was moved or copied."""
    program = folder / "bin" / "trimtab"
    named = INTERPRETER.match(program.read_text()) if program.is_file() else None
    return named is None or Path(named[1]).parent.resolve() == (folder / "bin").resolve()


def _key() -> str:
    files = (REPOSITORY / "pyproject.toml", REPOSITORY / "constraints.txt", REPOSITORY / "VERSION")
    return key_of(EXTRAS, *(file.read_bytes() for file in files))


def _install(python: Path) -> None:
    if not python.exists():
        make_empty(FOLDER)
    constraints = REPOSITORY / "constraints.txt"
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
    ]
    pip += ["--constraint", constraints]
    # torch first and separately: otherwise the resolver downloads many of its versions, 200 MB each.
    for wanted in (torch_pin(constraints.read_text()), ["--editable", f".[{EXTRAS}]"]):
        try:
            run([*pip, *wanted], log=LOG, folder=REPOSITORY)
        except ClusterError as error:
            raise ClusterError(f"{error}{network_hint((logs_folder() / f'{LOG}.log').read_text())}") from None


def network_hint(log: str) -> str:
    """Return a hint if pip failed because of the network; its own last lines only mention version conflicts."""
    last_command = log.rpartition("\n$ ")[2]
    if not UNREACHABLE.search(last_command):
        return ""
    return "\nno package index is reachable; check the network and the proxy, or set PIP_INDEX_URL"


def torch_pin(constraints: str) -> list[str]:
    """Return the line of constraints.txt that pins torch, if any."""
    return re.findall(r"^torch==\S+", constraints, re.MULTILINE)


def make_empty(folder: Path) -> None:
    """Create a virtual environment with pip. Debian needs a separate package for that."""
    if importlib.util.find_spec("ensurepip") is None:
        from offline import debian  # imported only on Debian without python3-venv

        debian.install(["python3-venv"])
    run([sys.executable, "-m", "venv", folder], log=LOG)


def pip_command() -> list[str | Path]:
    """Return the command of this interpreter's pip, or (if it has none) of an environment in the cache."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    # Run as a module: the environment is renamed after its creation, and its scripts still have the old path.
    return [entry("tools/pip", make_empty) / "bin" / "python", "-m", "pip"]
