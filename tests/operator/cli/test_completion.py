"""Completion of `trimtab`: from a file, without the imports of the application, and equal to its parsers."""

import json
import subprocess
import sys
from typing import Any

import pytest
import typer.main
from trimtab_operator.cli import completion, trimtab_command
from trimtab_operator.cli.completion import complete
from trimtab_operator.cli.engine_program import ENGINE_COMMANDS
from trimtab_operator.validation.engine_flags import engine_flags
from typer.testing import CliRunner

TREE = json.loads(completion.FILE.read_text())
SCRIPT = """
import sys
from trimtab_operator.command import trimtab
trimtab()
sys.exit("typer" in sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "incomplete", "completions"),
    [
        ([], "vali", ["validate"]),
        (["plan"], "--obj", ["--objective"]),
        (["plan", "m", "--gpu"], "H", ["H200", "H100"]),
        (["plan", "-o"], "", ["table", "json"]),
        (["plan"], "", []),  # paths
        (["bench"], "la", ["latency"]),
        (["bench", "serve"], "--request-r", ["--request-rate"]),
        (["bench", "serve", "--dataset-name"], "s", ["sharegpt"]),
        (["serve", "m", "--dtype"], "b", ["bfloat16"]),
        (["serve", "m", "--enforce-eager"], "--admin-p", ["--admin-port"]),
        (["status"], "", None),  # names in the cluster
        (["set", "m"], "", None),
    ],
)
def test_words_flags_and_values_are_completed(words: list[str], incomplete: str, completions: list[str] | None) -> None:
    assert complete(words, incomplete) == completions


def test_completion_file_equals_the_application() -> None:
    group: Any = typer.main.get_command(trimtab_command.app)
    shown = {name: command for name, command in group.commands.items() if not command.hidden}
    assert list(TREE["commands"]) == list(shown)
    for name in shown.keys() - set(ENGINE_COMMANDS):
        flags = {flag for option in shown[name].params for flag in (*option.opts, *option.secondary_opts)}
        assert set(TREE["commands"][name]["flags"]) == {"--help"} | {flag for flag in flags if flag.startswith("-")}
    serve = TREE["commands"]["serve"]["flags"]
    assert {name for name in serve if name not in ("--help", "-h")} <= set(engine_flags())


def test_bash_gets_completions_without_the_application() -> None:
    environment = {
        "_TRIMTAB_COMPLETE": "complete_bash",
        "COMP_WORDS": "trimtab bench serve --request-r",
        "COMP_CWORD": "3",
    }
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "--request-rate\n", "")


@pytest.mark.parametrize(
    ("words", "completions"),
    [("bench ", ["latency", "throughput", "serve", "start"]), ("serve m --dtype f", ["float32", "float16", "float"])],
)
def test_zsh_completes_engine_commands(words: str, completions: list[str]) -> None:
    environment = {"_TRIMTAB_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": f"trimtab {words}"}
    result = CliRunner().invoke(trimtab_command.app, [], prog_name="trimtab", env=environment)
    assert [line for line in completions if f'"{line}"' in result.output] == completions
