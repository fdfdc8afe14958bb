"""What CI runs: README's commands from nothing, then check and stories; whatever comes of it, nothing is left up."""

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
# In place of make and python3: writes down what it was asked and which cache it was given; may fail or hang.
STAND_IN = """\
#!/bin/bash
echo "${0##*/} $* [${TRIMTAB_CACHE##*/}]" >>"$ASKED"
if [ "$1" = demo ]; then mkdir -p "$TRIMTAB_CACHE/kubernetes/v1-new" "$TRIMTAB_CACHE/logs" "$TRIMTAB_CACHE/docker"; fi
if [ "$1" = "$FAILS" ]; then exit 7; fi
if [ "$1" = "$HANGS" ]; then sleep 600; fi
exit 0
"""
DEADLINE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Checkout:
    """A folder with the script alone, a cache, and programs that stand in for make and python3."""

    folder: Path

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []

    def start(self, **variables: str) -> subprocess.Popen[str]:
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "TRIMTAB_CACHE": str(self.cache),
            "ASKED": str(self.folder / "asked"),
            **variables,
        }
        return subprocess.Popen(
            ["bash", self.folder / ".ci" / "run"],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - behind a shell it is ignored
        )  # fmt: skip

    def run(self, **variables: str) -> tuple[int, str]:
        process = self.start(**variables)
        said, _ = process.communicate(timeout=DEADLINE_SECONDS)
        return process.returncode, said


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


def test_from_nothing_readmes_commands_come_first_and_nothing_may_be_left(checkout: Checkout) -> None:
    code, said = checkout.run()
    assert code == 0, said
    asked = checkout.asked()
    assert asked[:5] == [
        "make cluster-down [cache]", "make cluster-down [ci]", "make clean [ci]", "make demo [ci]", "make test [ci]",
    ]  # fmt: skip
    stories_cluster = "python3 hack/dev set-up --workers 2 python model cluster images prometheus [ci]"
    assert sorted(asked[5:7]) == ["make check [ci]", stories_cluster], "at once"
    assert asked[7:] == ["make e2e [ci]", "make cluster-down [ci]", "python3 hack/dev leftovers [ci]"]
    assert said.splitlines()[-1].startswith("=== from nothing 0m0")
    assert said.splitlines()[-1].endswith("in all: exit code 0")


def test_only_kubernetes_binaries_go_from_cache_to_cache(checkout: Checkout) -> None:
    process = checkout.start(HANGS="test")
    _await_asked(checkout, "make test [ci]")
    assert sorted(path.name for path in (checkout.cache / "ci" / "kubernetes").iterdir()) == ["v1-new", "v1-old"]
    assert not (checkout.cache / "ci" / "models").exists()
    process.terminate()
    process.communicate(timeout=DEADLINE_SECONDS)
    assert sorted(path.name for path in (checkout.cache / "kubernetes").iterdir()) == ["v1-new", "v1-old"]


def test_a_stage_that_fails_ends_it_with_its_code_and_only_logs_stay(checkout: Checkout) -> None:
    code, said = checkout.run(FAILS="test")
    assert code == 7, said
    assert checkout.asked()[-2:] == ["make test [ci]", "make cluster-down [ci]"]
    assert "make test FAILED" in said
    assert [path.name for path in (checkout.cache / "ci").iterdir()] == ["logs"]


def test_checks_that_fail_beside_the_cluster_fail_the_run(checkout: Checkout) -> None:
    code, said = checkout.run(FAILS="check")
    assert code == 7, said
    assert "make e2e [ci]" not in checkout.asked()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_told_to_end_it_ends_the_stage_and_takes_everything_down(checkout: Checkout, number: int, code: int) -> None:
    process = checkout.start(HANGS="e2e")
    _await_asked(checkout, "make e2e [ci]")
    process.send_signal(number)
    said, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == code, said
    assert checkout.asked()[-1] == "make cluster-down [ci]"
    assert "make e2e FAILED" in said


def _await_asked(checkout: Checkout, line: str) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while line not in checkout.asked():
        assert time.monotonic() < end, checkout.asked()
        time.sleep(0.05)
