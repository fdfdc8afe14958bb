"""Scenario: README's commands for an existing cluster work. They are read from README and executed."""

from __future__ import annotations

from harness.deployment import READY_SECONDS
from harness.install import Installation
from harness.pages import blocks, run_blocks
from harness.report import log_line
from harness.target import REPOSITORY

README = REPOSITORY / "README.md"
COMMAND_SECONDS = READY_SECONDS + 120.0


def test_readme_cluster_commands_work(bare_cluster: Installation) -> None:
    """All blocks run in one shell, as a reader would run them."""
    found = blocks(README)
    log_line(f"README blocks: {', '.join(found)}")
    output = run_blocks(bare_cluster, list(found.values()), timeout_seconds=COMMAND_SECONDS)
    assert "Paris" in output, output
