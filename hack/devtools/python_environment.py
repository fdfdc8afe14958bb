"""The checkout's virtual environment with every package that the project's programs, tests and checks need."""

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
EXTRAS = "operator,engine,tracing,dev"
LOG = "pip"
INSTALL_SECONDS = 100.0
INTERPRETER = re.compile(r"""#!(?:/bin/sh\n'''exec' )?"?([^"\n]+?)"?(?: "\$0".*)?$""", re.MULTILINE)
"""What pip has a program begin with; a long path, or one with spaces, is run by the shell."""
UNREACHABLE = re.compile(r"NewConnectionError|ConnectTimeoutError|NameResolutionError|ProxyError|SSLError")
"""In pip's words."""


def ensure() -> Path:
    """The environment's interpreter; everything is installed when pyproject.toml or constraints.txt have changed,
    or when the checkout was moved."""
    python = FOLDER / "bin" / "python"
    if is_ready():
        return python
    with locked(f"venv-{key_of(str(REPOSITORY))}"):
        if not is_ready():
            with stage("packages: Python's, into .venv", INSTALL_SECONDS):
                if not is_of_here(FOLDER):
                    FOLDER.unlink() if FOLDER.is_symlink() else shutil.rmtree(FOLDER)
                _install(python)
                STAMP.write_text(_key())
    return python


def is_ready() -> bool:
    """Whether the environment has what the present pyproject.toml and constraints.txt ask for."""
    return STAMP.is_file() and STAMP.read_text() == _key() and is_of_here(FOLDER)


def is_of_here(folder: Path) -> bool:
    """False where its programs run the interpreter of another place: its checkout was moved or copied."""
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
    # torch first and by itself: the resolver would otherwise look at many of its versions, 200 MB each.
    for wanted in (torch_pin(constraints.read_text()), ["--editable", f".[{EXTRAS}]"]):
        try:
            run([*pip, *wanted], log=LOG, folder=REPOSITORY)
        except ClusterError as error:
            raise ClusterError(f"{error}{why_pip_failed((logs_folder() / f'{LOG}.log').read_text())}") from None


def why_pip_failed(log: str) -> str:
    """What pip's own last lines do not say: without a network it blames the versions that it could not look up."""
    last_command = log.rpartition("\n$ ")[2]
    if not UNREACHABLE.search(last_command):
        return ""
    return "\nno package index answers pip; see to the network or the proxy, or name an index (PIP_INDEX_URL)"


def torch_pin(constraints: str) -> list[str]:
    """The line of constraints.txt that pins torch, if there is one."""
    return re.findall(r"^torch==\S+", constraints, re.MULTILINE)


def make_empty(folder: Path) -> None:
    """A virtual environment with pip. Debian keeps what makes one in a package of its own."""
    if importlib.util.find_spec("ensurepip") is None:
        from offline import debian  # only here: other machines need nothing of it

        debian.install(["python3-venv"])
    run([sys.executable, "-m", "venv", folder], log=LOG)


def pip_command() -> list[str | Path]:
    """pip of the interpreter that runs here, or where that has none (Debian's alone) of an environment in the cache."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    # By the interpreter: the environment is renamed into place, and only its scripts know their old path.
    return [entry("tools/pip", make_empty) / "bin" / "python", "-m", "pip"]
