"""Set-up: dry runs do nothing, parts are set up in parallel, and pip is provided if the interpreter has none."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from dev import set_up
from dev.announcement import Machine
from dev.cli import main
from devtools import python_environment
from devtools.errors import ClusterError
from devtools.process import logs_folder

EMPTY = Machine(
    packages=("docker.io",),
    packages_without_registry=(),
    docker=None,
    has_python_packages=False,
    has_model=False,
    has_kubernetes=False,
    has_node_image=False,
    has_images=False,
    cluster=None,
    node_images=(),
    cache="~/.cache/trimtab",
)


@pytest.fixture(autouse=True)
def cache_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    monkeypatch.setenv("TRIMTAB_BEGAN", "1700000000")
    monkeypatch.delenv("CLUSTER", raising=False)
    monkeypatch.delenv("TRIMTAB_IMAGES", raising=False)


def test_dry_run_prints_changes_and_does_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dev.machine_facts.inspect", lambda _: EMPTY)
    monkeypatch.setattr("dev.set_up.ensure", lambda *_: pytest.fail("a dry run must do nothing"))
    words = ["--for", "make demo", "--then", "the demo", "--then-seconds", "240", "--dry-run", *set_up.PARTS]
    assert main(["set-up", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("make demo installs Debian's docker.io,")
    assert captured.err.rstrip().endswith("nothing was done (DRY_RUN=1)")
    assert "docker.io" in captured.out


def test_cluster_and_python_packages_are_set_up_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step waits for the other one to start, so sequential steps would time out."""
    meeting = threading.Barrier(2, timeout=240.0)
    monkeypatch.setattr("devtools.python_environment.ensure", meeting.wait)
    monkeypatch.setattr("devtools.native_operators.ensure", lambda: None)
    set_up.ensure(frozenset({"python", "cluster"}), meeting.wait)


def test_base_image_and_python_packages_are_set_up_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images are built afterwards, when their packages are in pip's cache."""
    meeting, made = threading.Barrier(2, timeout=30.0), list[str]()

    def note(name: str) -> None:
        meeting.wait()
        made.append(name)

    def build(_: dict[str, str], names: list[str]) -> dict[str, str]:
        assert sorted(made) == ["base", "packages"]
        assert names == ["operator", "router", "model"]
        return {}

    monkeypatch.setattr("devtools.docker_cli.ensure", dict)
    monkeypatch.setattr("devtools.python_environment.ensure", lambda: note("packages"))
    monkeypatch.setattr("devtools.native_operators.ensure", lambda: None)
    monkeypatch.setattr("cluster.images.ensure_base", lambda _: note("base"))
    monkeypatch.setattr("cluster.images.ensure", build)
    monkeypatch.setattr("devtools.model.ensure", lambda: pytest.fail("the model is part of the images step"))
    set_up.ensure(frozenset({"python", "model", "images"}), lambda: None)


def test_given_images_are_neither_built_nor_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_IMAGES", "operator:1 model:1 router:1")
    for name in ("python_environment.ensure", "native_operators.ensure", "model.ensure"):
        monkeypatch.setattr(f"devtools.{name}", lambda: None)
    monkeypatch.setattr("cluster.images.ensure", lambda *_: pytest.fail("built"))
    set_up.ensure(frozenset(set_up.PARTS), lambda: None)


@pytest.mark.parametrize("code", [0, 3])
def test_stage_returns_exit_code_of_its_program(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    program = [sys.executable, "-c", f"raise SystemExit({code})"]
    assert main(["stage", "--about", "5", "the tests", "--", *program]) == code
    assert f"the tests: {'failed after' if code else 'done in'}" in capsys.readouterr().err


def test_interpreter_without_pip_gets_one_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = []

    def make(folder: Path) -> None:
        made.append(folder)

    monkeypatch.setattr("devtools.python_environment.make_empty", make)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    command = python_environment.pip_command()
    assert command == [tmp_path / "tools" / "pip" / "bin" / "python", "-m", "pip"]
    assert python_environment.pip_command() == command
    assert len(made) == 1
    monkeypatch.undo()
    assert python_environment.pip_command()[0] == sys.executable


def test_manual_set_up_prints_the_next_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dev.set_up.ensure", lambda *_: None)
    assert main(["set-up", "python", "model"]) == 0
    assert capsys.readouterr().out.endswith(f"trimtab serve {tmp_path}/models/SmolLM2-135M-Instruct\n")


def test_pip_failure_without_network_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip itself only reports version conflicts."""
    output = "WARNING: Retrying after connection broken by 'NewConnectionError: …'\nERROR: No matching distribution"

    def fail(_: object, *, log: str, folder: Path) -> None:
        (logs_folder() / f"{log}.log").write_text(f"\n$ pip install torch\n{output}\n")
        raise ClusterError("pip failed")

    monkeypatch.setattr("devtools.python_environment.run", fail)
    monkeypatch.setattr("devtools.python_environment.FOLDER", tmp_path / "venv")
    monkeypatch.setattr("devtools.python_environment.STAMP", tmp_path / "venv" / ".ready")
    monkeypatch.setattr("devtools.python_environment.make_empty", lambda _: None)
    with pytest.raises(ClusterError, match=r"pip failed\nno package index is reachable; check the network"):
        python_environment.ensure()
    output = "ERROR: conflicting dependencies"
    with pytest.raises(ClusterError, match=r"pip failed$"):
        python_environment.ensure()


def test_torch_pin_is_read_from_constraints() -> None:
    assert python_environment.torch_pin("tqdm==4\ntorch==2.13.0\ntorchvision==1\n") == ["torch==2.13.0"]
    assert python_environment.torch_pin("tqdm==4\n") == []


def test_makefile_requests_existing_parts() -> None:
    makefile = (Path(__file__).resolve().parents[2] / "Makefile").read_text()
    lines = [line for line in makefile.splitlines() if "$(DEV_TOOL) set-up" in line]
    assert lines
    for line in lines:
        assert line.split()[-1] in set_up.PARTS, line
