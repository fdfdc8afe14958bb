"""Engine commands of `trimtab`, which run `trimtab-engine` unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from trimtab_operator.cli import engine_program, operator_command, trimtab_command
from typer.testing import CliRunner

ENGINE = """#!{python}
import sys
print(sys.argv[1:])
sys.exit(7)
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a fake `trimtab-engine` that prints its arguments."""
    program = tmp_path / "trimtab-engine"
    program.write_text(ENGINE.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(engine_program, "engine_program", lambda: str(program))
    return program


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "MODEL", "--device", "cpu", "--unknown=1", "-tp", "2"],
        ["serve", "--help"],
        ["bench", "serve", "--model", "m", "--", "x"],
        ["inspect", "MODEL", "-o", "json"],
        ["autotune", "MODEL", "--limits", "ttft:500"],
        ["fetch", "hf://ORG/NAME", "--revision", "main"],
        ["serve"],
    ],
)
@pytest.mark.parametrize(
    "main", ["trimtab_operator.command.trimtab()", "trimtab_operator.cli.trimtab_command.main()"], ids=["fast", "typer"]
)
def test_every_word_reaches_the_engine_and_its_exit_code_comes_back(engine: Path, words: list[str], main: str) -> None:
    code = (
        "import sys\n"
        "from trimtab_operator.cli import engine_program\n"
        f"engine_program.engine_program = lambda: {str(engine)!r}\n"
        f"sys.argv = ['trimtab', *{words!r}]\n"
        f"import {main.rpartition('.')[0]}\n"
        f"{main}"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (told.returncode, told.stdout.strip(), told.stderr) == (7, str(words), "")


def test_engine_commands_are_those_of_the_command_line() -> None:
    panel = "On this machine (trimtab-engine)"
    commands = [command for command in trimtab_command.app.registered_commands if command.rich_help_panel == panel]
    assert [command.callback.__name__ for command in commands if command.callback] == list(
        engine_program.ENGINE_COMMANDS
    )


def test_engine_commands_without_engine_name_pip_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_program, "engine_program", lambda: None)
    result = CliRunner().invoke(trimtab_command.app, ["serve", "MODEL"])
    assert result.exit_code == 2
    assert "pip install 'trimtab[engine]==" in result.output


def test_both_programs_say_their_version_and_complete() -> None:
    for name, app in (("trimtab", trimtab_command.app), ("trimtab-operator", operator_command.app)):
        result = CliRunner().invoke(app, ["--version"], prog_name=name)
        assert (result.exit_code, result.output.strip()) == (0, f"{name} {version('trimtab')}")
        assert "--install-completion" in CliRunner().invoke(app, ["--help"], prog_name=name).output


def test_trimtab_includes_validate_and_render(tmp_path: Path) -> None:
    file = tmp_path / "resource.yaml"
    file.write_text("kind: ConfigMap")
    for command in ("validate", "render"):
        result = CliRunner().invoke(trimtab_command.app, [command, "-f", str(file)])
        assert result.exit_code == 2
        assert "contains no InferenceDeployment" in result.output


def test_a_command_that_is_misspelt_is_suggested() -> None:
    assert "validate" in CliRunner().invoke(trimtab_command.app, ["validat"]).output
