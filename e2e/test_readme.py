"""Story: README's commands for one's own cluster do what README says. They are read from README itself and executed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator

import pytest
from harness.deployment import READY_SECONDS
from harness.install import NAMESPACE, Installation
from harness.kube import CRD_KIND, Kube
from harness.report import say
from harness.target import REPOSITORY, run_tool

README = REPOSITORY / "README.md"
# <!-- e2e: NAME --> before a fenced block: this story runs it.
BLOCK = re.compile(r"<!--\s*e2e:\s*([a-z-]+)\s*-->\s*```(?:bash|sh|console)?\n(.*?)```", re.DOTALL)
COMMAND_SECONDS = READY_SECONDS + 120.0


def blocks() -> list[tuple[str, str]]:
    """Marked blocks of README in their order: (name, script)."""
    return [(found[1], found[2]) for found in BLOCK.finditer(README.read_text())]


@pytest.fixture(scope="module")
def bare_cluster(installation: Installation, kube: Kube) -> Iterator[None]:
    """The chart that the other stories share is removed; README installs its own."""
    installation.uninstall()
    yield
    kube.delete(CRD_KIND, "--all", "default")
    run_tool("helm", "uninstall", "trimtab", "-n", NAMESPACE, "--ignore-not-found", kube=kube)
    installation.install()  # for the fixture that removes it


@pytest.mark.usefixtures("bare_cluster")
def test_readmes_commands_for_ones_own_cluster_work(installation: Installation) -> None:
    """All blocks run in one shell, as a reader would. README names images as variables, which are set here."""
    found = blocks()
    assert found, f"{README} has no block marked <!-- e2e: NAME -->"
    say(f"README blocks: {', '.join(name for name, _ in found)}")
    script = "set -euo pipefail\n" + "\n".join(text for _, text in found)
    environment = {
        **installation.kube.full_environment(),
        "OPERATOR_IMAGE": installation.images.operator,
        "ENGINE_IMAGE": installation.images.model,
    }
    with tempfile.TemporaryFile("w+") as said:  # a pipe would stay open as long as README's port-forward
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=REPOSITORY,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=COMMAND_SECONDS)
        finally:
            _end_group(process)
        said.seek(0)
        output = said.read()
    say(output)
    assert process.returncode == 0, output
    assert "Paris" in output, output


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """README starts a port-forward in the background; it ends with the shell."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
