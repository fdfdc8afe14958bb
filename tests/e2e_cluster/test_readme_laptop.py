"""README's local quickstart and the live configuration page work: their code blocks are read and executed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from devtools import model
from trimtab_engine.ipc.network import ReservedPorts

REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
# <!-- laptop: NAME --> before a fenced block: this test runs it.
BLOCK = re.compile(r"<!--\s*laptop:\s*([a-z-]+)\s*-->\s*```bash\n(.*?)```", re.DOTALL)
BLOCKS = dict(BLOCK.findall(README.read_text()))
LIVE_PAGE = REPOSITORY / "docs" / "concepts" / "live-configuration.md"
LIVE_BLOCK = re.compile(r"<!--\s*live:\s*([a-z-]+)\s*-->\s*```sh\n(.*?)```", re.DOTALL)
SECONDS = 240.0  # about 12 on two idle cores


@pytest.fixture
def ports() -> Iterator[ReservedPorts]:
    """Reserve ports for the duration of the test."""
    with ReservedPorts("127.0.0.1") as ports:
        yield ports


def adapt(script: str, ports: ReservedPorts) -> str:
    """Return README's commands with this machine's cache and free ports, and without the set-up."""
    api, admin = ports.take(), ports.take()
    lines = [line for line in script.splitlines() if not line.startswith(("make setup", "source .venv"))]
    adapted = "\n".join(lines).replace("~/.cache/trimtab/models", str(model.ensure().parent))
    return adapted.replace("8000", str(api)).replace("8001", str(admin))


def test_readme_blocks_are_in_order() -> None:
    assert list(BLOCKS) == ["serve", "curl", "openai", "patch", "stop"]
    assert "make setup" in BLOCKS["serve"]


@pytest.mark.model
@pytest.mark.timeout(SECONDS + 60.0)
def test_readme_local_quickstart_works(tmp_path: Path, ports: ReservedPorts) -> None:
    """All blocks run in one shell, as typed by a reader; the last one stops the server."""
    script = adapt("\n".join(f"echo '# {name}'\n{text}" for name, text in BLOCKS.items()) + "\nwait\n", ports)
    code, output = run(script, tmp_path / "output.txt")
    assert code == 0, output
    assert "Paris" in output, output
    assert "Mercury" in output or "planets" in output, output
    before, after = (float(total) for total in re.findall(r'trimtab_kv_blocks\{.*"total"\} ([\d.e+]+)', output))
    assert after > before, f"the PATCH did not enlarge the KV cache:\n{output}"


def run(script: str, log: Path) -> tuple[int, str]:
    """Run a script in one shell, and return the exit code and the output."""
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-m", "-euo", "pipefail", "-c", script],
            cwd=REPOSITORY,
            env={**os.environ, "PATH": f"{REPOSITORY / '.venv' / 'bin'}:{os.environ['PATH']}"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = shell.wait(timeout=SECONDS)
        finally:
            _end(shell)
    return code, log.read_text()


@pytest.mark.model
@pytest.mark.timeout(SECONDS + 60.0)
def test_live_configuration_page_commands_work(tmp_path: Path, ports: ReservedPorts) -> None:
    blocks = dict(LIVE_BLOCK.findall(LIVE_PAGE.read_text()))
    assert list(blocks) == ["serve", "change"]
    script = adapt(
        f"{blocks['serve']}\n{blocks['change'].replace('curl -s', 'curl --silent --fail')}\nkill %1\nwait\n",
        ports,
    )
    code, output = run(script, tmp_path / "output.txt")
    assert code == 0, output
    assert "configuration generation 3: preemption_mode recompute → auto" in output, output


def _end(shell: subprocess.Popen[bytes]) -> None:
    """End all processes of the shell's session, since job control gives each background job its own group."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == shell.pid:
                os.kill(int(folder.name), signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    shell.wait()
