"""Running other programs with output to a log; errors have its last lines and the log's path."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .cache_root import cache_root
from .errors import ClusterError
from .progress import set_stage_log

TAIL_LINES = 15  # of a failed command's output in the error


def logs_folder() -> Path:
    folder = cache_root() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _explained(words: list[str], where: str = "") -> Iterator[None]:
    """Convert a missing program or a timeout to a ClusterError; `where` names the log."""
    try:
        yield
    except FileNotFoundError as error:
        raise ClusterError(f"{words[0]} is not on PATH; install it, or run `python3 e2e/cluster tools`") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{shlex.join(words)} did not end within {error.timeout:g} s{where}") from error


def run(
    command: Sequence[str | Path],
    *,
    log: str,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    stdin: bytes | None = None,
    timeout_seconds: float | None = None,
) -> None:
    """Run a program with its output appended to logs/LOG.log. `environment` is added to this process's environment.

    Raises:
        ClusterError: the program failed or timed out; with the end of its output.
    """
    words = [str(word) for word in command]
    path = logs_folder() / f"{log}.log"
    set_stage_log(path)
    with path.open("ab") as output:
        output.write(f"\n$ {shlex.join(words)}\n".encode())
        output.flush()
        start = output.tell()
        with _explained(words, f"; see {path}"):
            done = subprocess.run(
                words,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                cwd=folder,
                timeout=timeout_seconds,
                check=False,
                **({"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}),
            )
    if done.returncode != 0:
        tail = path.read_bytes()[start:].decode(errors="replace").splitlines()[-TAIL_LINES:]
        indented = "".join(f"\n    {line}" for line in tail)
        raise ClusterError(
            f"{shlex.join(words)} failed with exit code {done.returncode}; its complete output is in {path}{indented}"
        )


def output_of(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    timeout_seconds: float = 60.0,
) -> str:
    """Run a program and return its stripped stdout. Raises ClusterError with stderr's last lines."""
    words = [str(word) for word in command]
    with _explained(words):
        done = subprocess.run(
            words,
            capture_output=True,
            env={**os.environ, **(environment or {})},
            timeout=timeout_seconds,
            input=stdin,
            check=False,
        )
    if done.returncode != 0:
        tail = done.stderr.decode(errors="replace").strip().splitlines()[-TAIL_LINES:]
        raise ClusterError(f"{shlex.join(words)} failed with exit code {done.returncode}: " + " | ".join(tail))
    return done.stdout.decode(errors="replace").strip()


def succeeds(
    command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None, timeout_seconds: float = 60.0
) -> bool:
    """Return True if the program exits with code 0; False also if it is missing or times out."""
    try:
        output_of(command, environment=environment, timeout_seconds=timeout_seconds)
    except ClusterError:
        return False
    return True
