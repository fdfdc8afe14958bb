"""Commands that a page of the documentation shows, read from the page itself and run as a reader would run them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path

from harness.install import Installation
from harness.report import say
from harness.target import REPOSITORY

# <!-- e2e: NAME --> before a fenced block: a story runs it.
BLOCK = re.compile(r"<!--\s*e2e:\s*([a-z-]+)\s*-->\s*```(?:bash|sh|console)?\n(.*?)```", re.DOTALL)


def blocks(page: Path) -> dict[str, str]:
    """The marked blocks of a page in their order, by name."""
    found = {match[1]: match[2] for match in BLOCK.finditer(page.read_text())}
    assert found, f"{page} has no block marked <!-- e2e: NAME -->"
    return found


def run_blocks(installation: Installation, scripts: list[str], *, timeout_seconds: float) -> str:
    """What blocks say, run in one shell. Pages name images as variables, which are set here. Fails when one fails."""
    script = "set -euo pipefail\n" + "\n".join(scripts)
    environment = {
        **installation.kube.full_environment(),
        "OPERATOR_IMAGE": installation.images.operator,
        "ENGINE_IMAGE": installation.images.model,
    }
    with tempfile.TemporaryFile("w+") as said:  # a pipe would stay open as long as a page's port-forward
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=REPOSITORY,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=timeout_seconds)
        finally:
            _end_group(process)
        said.seek(0)
        output = said.read()
    say(output)
    assert process.returncode == 0, output
    return output


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """What a page starts in the background ends with the shell."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
