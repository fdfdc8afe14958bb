"""README's two minutes on one's own machine do what README says: its blocks are read from README and executed; those of
the page on live configuration likewise."""

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
SECONDS = 240.0  # a dozen on two idle cores


@pytest.fixture
def ports() -> Iterator[ReservedPorts]:
    """Nobody else gets one of them while the test runs."""
    with ReservedPorts("127.0.0.1") as ports:
        yield ports


def as_here(script: str, ports: ReservedPorts) -> str:
    """README's commands with this machine's cache and with ports that are free; the environment is there already."""
    api, admin = ports.take(), ports.take()
    lines = [line for line in script.splitlines() if not line.startswith(("make setup", "source .venv"))]
    here = "\n".join(lines).replace("~/.cache/trimtab/models", str(model.ensure().parent))
    return here.replace("8000", str(api)).replace("8001", str(admin))


def test_readme_has_each_step_in_its_order() -> None:
    assert list(BLOCKS) == ["serve", "curl", "openai", "patch", "stop"]
    assert "make setup" in BLOCKS["serve"]


@pytest.mark.model
@pytest.mark.timeout(SECONDS + 60.0)
def test_readme_s_two_minutes_serve_answer_and_grow_live(tmp_path: Path, ports: ReservedPorts) -> None:
    """All blocks run in one shell, as a reader would type them; the server ends by the last one."""
    script = as_here("\n".join(f"echo '# {name}'\n{text}" for name, text in BLOCKS.items()) + "\nwait\n", ports)
    code, said = run(script, tmp_path / "output.txt")
    assert code == 0, said
    assert "Paris" in said, said
    assert "Mercury" in said or "planets" in said, said
    before, after = (float(total) for total in re.findall(r'trimtab_kv_blocks\{.*"total"\} ([\d.e+]+)', said))
    assert after > before, f"the PATCH has not made the KV cache larger:\n{said}"


def run(script: str, log: Path) -> tuple[int, str]:
    """In one shell, as a reader would type it. The exit code, and what was said."""
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
def test_the_server_of_the_page_on_live_configuration_takes_every_change_of_the_page(
    tmp_path: Path, ports: ReservedPorts
) -> None:
    blocks = dict(LIVE_BLOCK.findall(LIVE_PAGE.read_text()))
    assert list(blocks) == ["serve", "change"]
    script = as_here(
        f"{blocks['serve']}\n{blocks['change'].replace('curl -s', 'curl --silent --fail')}\nkill %1\nwait\n",
        ports,
    )
    code, said = run(script, tmp_path / "output.txt")
    assert code == 0, said
    assert "configuration generation 3: preemption_mode recompute → auto" in said, said


def _end(shell: subprocess.Popen[bytes]) -> None:
    """With job control each background job has a group of its own, but all are of the shell's session."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == shell.pid:
                os.kill(int(folder.name), signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    shell.wait()
