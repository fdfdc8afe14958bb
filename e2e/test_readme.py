"""Story: README's commands for one's own cluster do what README says. They are read from README itself and executed."""

from __future__ import annotations

from harness.deployment import READY_SECONDS
from harness.install import Installation
from harness.pages import blocks, run_blocks
from harness.report import say
from harness.target import REPOSITORY

README = REPOSITORY / "README.md"
COMMAND_SECONDS = READY_SECONDS + 120.0


def test_readmes_commands_for_ones_own_cluster_work(bare_cluster: Installation) -> None:
    """All blocks run in one shell, as a reader would."""
    found = blocks(README)
    say(f"README blocks: {', '.join(found)}")
    output = run_blocks(bare_cluster, list(found.values()), timeout_seconds=COMMAND_SECONDS)
    assert "Paris" in output, output
