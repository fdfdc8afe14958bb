"""CI's script: README's commands on a clean machine, checks and scenarios, and the removal of everything at the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "run"
# Stands in for make and python3: records its arguments and cache; may fail or hang.
STAND_IN = """\
#!/bin/bash
echo "${0##*/} $* [${TRIMTAB_CACHE##*/}]" >>"$COMMANDS"
if [ "$1" = demo ]; then mkdir -p "$TRIMTAB_CACHE/kubernetes/v1-new" "$TRIMTAB_CACHE/logs" "$TRIMTAB_CACHE/docker"; fi
if [ "$1" = "$FAILS" ]; then exit 7; fi
if [ "$1" = "$HANGS" ]; then sleep 600; fi
exit 0
"""
DEADLINE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Checkout:
    """A folder with only the script, a cache, and stand-ins for make and python3."""

    folder: Path

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def commands(self) -> list[str]:
        path = self.folder / "commands"
        return path.read_text().splitlines() if path.exists() else []

    def start(self, **variables: str) -> subprocess.Popen[str]:
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "TRIMTAB_CACHE": str(self.cache),
            "COMMANDS": str(self.folder / "commands"),
            **variables,
        }
        return subprocess.Popen(
            ["bash", self.folder / ".ci" / "run"],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - ignored in a background process of a shell
        )  # fmt: skip

    def run(self, **variables: str) -> tuple[int, str]:
        process = self.start(**variables)
        output, _ = process.communicate(timeout=DEADLINE_SECONDS)
        return process.returncode, output


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci" / "run")
    (tmp_path / "bin").mkdir()
    for name in ("make", "python3"):
        program = tmp_path / "bin" / name
        program.write_text(STAND_IN)
        program.chmod(0o755)
    (tmp_path / "cache" / "kubernetes" / "v1-old").mkdir(parents=True)
    (tmp_path / "cache" / "models").mkdir()
    return Checkout(tmp_path)


def test_run_starts_with_readme_commands_and_ends_with_leftovers_check(checkout: Checkout) -> None:
    code, output = checkout.run()
    assert code == 0, output
    commands = checkout.commands()
    assert commands[:5] == [
        "make cluster-down [cache]", "make cluster-down [ci]", "make clean [ci]", "make demo [ci]", "make test [ci]",
    ]  # fmt: skip
    scenarios_cluster = "python3 hack/dev set-up --workers 2 python model cluster images prometheus [ci]"
    assert sorted(commands[5:7]) == ["make check [ci]", scenarios_cluster], "in parallel"
    assert commands[7:] == ["make e2e [ci]", "make cluster-down [ci]", "python3 hack/dev leftovers [ci]"]
    assert output.splitlines()[-1].startswith("=== clean machine 0m0")
    assert output.splitlines()[-1].endswith("in total: exit code 0")


def test_only_kubernetes_binaries_are_shared_between_caches(checkout: Checkout) -> None:
    process = checkout.start(HANGS="test")
    _await_command(checkout, "make test [ci]")
    assert sorted(path.name for path in (checkout.cache / "ci" / "kubernetes").iterdir()) == ["v1-new", "v1-old"]
    assert not (checkout.cache / "ci" / "models").exists()
    process.terminate()
    process.communicate(timeout=DEADLINE_SECONDS)
    assert sorted(path.name for path in (checkout.cache / "kubernetes").iterdir()) == ["v1-new", "v1-old"]


def test_failed_stage_ends_run_and_keeps_only_logs(checkout: Checkout) -> None:
    code, output = checkout.run(FAILS="test")
    assert code == 7, output
    assert checkout.commands()[-2:] == ["make test [ci]", "make cluster-down [ci]"]
    assert "make test FAILED" in output
    assert [path.name for path in (checkout.cache / "ci").iterdir()] == ["logs"]


def test_failed_checks_fail_the_run(checkout: Checkout) -> None:
    code, output = checkout.run(FAILS="check")
    assert code == 7, output
    assert "make e2e [ci]" not in checkout.commands()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_stage_and_takes_cluster_down(checkout: Checkout, number: int, code: int) -> None:
    process = checkout.start(HANGS="e2e")
    _await_command(checkout, "make e2e [ci]")
    process.send_signal(number)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == code, output
    assert checkout.commands()[-1] == "make cluster-down [ci]"
    assert "make e2e FAILED" in output


def _await_command(checkout: Checkout, line: str) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while line not in checkout.commands():
        assert time.monotonic() < end, checkout.commands()
        time.sleep(0.05)
