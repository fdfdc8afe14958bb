"""Story: README's commands for one's own cluster do what README says. They are read from README itself and executed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.deployment import READY_SECONDS
from harness.install import NAMESPACE, Installation
from harness.kube import CRD_KIND, Kube
from harness.pages import blocks, run_blocks
from harness.report import say
from harness.target import REPOSITORY, run_tool

README = REPOSITORY / "README.md"
COMMAND_SECONDS = READY_SECONDS + 120.0


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
    """All blocks run in one shell, as a reader would."""
    found = blocks(README)
    say(f"README blocks: {', '.join(found)}")
    output = run_blocks(installation, list(found.values()), timeout_seconds=COMMAND_SECONDS)
    assert "Paris" in output, output
