"""Commands of documentation pages, read from the page and executed as a reader would."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path

from harness.install import Installation
from harness.report import log_line
from harness.target import REPOSITORY

# <!-- e2e: NAME --> before a fenced block: a scenario runs it.
BLOCK = re.compile(r"<!--\s*e2e:\s*([a-z-]+)\s*-->\s*```(?:bash|sh|console)?\n(.*?)```", re.DOTALL)


def blocks(page: Path) -> dict[str, str]:
    """Return the marked blocks of a page in order, by name."""
    found = {match[1]: match[2] for match in BLOCK.finditer(page.read_text())}
    assert found, f"{page} has no block marked <!-- e2e: NAME -->"
    return found


def run_blocks(installation: Installation, scripts: list[str], *, timeout_seconds: float) -> str:
    """Run blocks in one shell and return their output. Image variables used by pages are set here.

    Raises:
        AssertionError: a command failed.
    """
    script = "set -euo pipefail\n" + "\n".join(scripts)
    environment = {
        **installation.kube.full_environment(),
        "OPERATOR_IMAGE": installation.images.operator,
        "ENGINE_IMAGE": installation.images.model,
    }
    with tempfile.TemporaryFile("w+") as log:  # a pipe would stay open as long as a page's port-forward
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=REPOSITORY,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=timeout_seconds)
        finally:
            _end_group(process)
        log.seek(0)
        output = log.read()
    log_line(output)
    assert process.returncode == 0, output
    return output


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End background processes that the page's commands started."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
