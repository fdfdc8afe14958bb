"""The command line: errors are one line, and wrong usage has exit code 2."""

from __future__ import annotations

import ast
import errno
import os
from pathlib import Path

import pytest
from cluster.cli import main
from cluster.target import uses_current
from devtools.errors import UsageError
from devtools.progress import as_list
from devtools.stage_log import duration

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "words",
    [[], ["nonsense"], ["up", "--workers", "many"], ["up", "--workers", "-1"], ["load"], ["images", "kernel"]],
)
def test_wrong_usage_prints_one_line_and_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")


@pytest.mark.parametrize("folder", ["e2e/cluster", "hack/dev"])
def test_main_module_parses_on_old_pythons(folder: str) -> None:
    """Some distributions' python3 is 3.6, which has no `from __future__ import annotations`, and python may be 2.7."""
    source = (ROOT / folder / "__main__.py").read_bytes()
    tree = ast.parse(source.decode("ascii"))  # 2.7 reads only ASCII without a coding line
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.AnnAssign | ast.NamedExpr)]
    first = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in first] == ["import sys"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_unwritable_cache_prints_one_line(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number), "/a/cache/locks")

    monkeypatch.setattr("devtools.model.ensure", fails)
    assert main(["model"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(f"error: /a/cache/locks: {os.strerror(number)}; free some space there, or set TRIMTAB_")


@pytest.mark.parametrize("command", ["up", "down", "status", "kubeconfig", "env", "load"])
def test_unknown_cluster_value_is_rejected_first(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLUSTER", "mine")
    assert main([command, *(["image:1"] if command == "load" else [])]) == 2
    assert "CLUSTER is 'mine'" in capsys.readouterr().err


def test_uses_current_accepts_only_known_values() -> None:
    assert uses_current({"CLUSTER": "current"})
    assert not uses_current({"CLUSTER": ""})
    assert not uses_current({})
    with pytest.raises(UsageError):
        uses_current({"CLUSTER": "Current"})


def test_down_with_current_cluster_deletes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER", "current")
    monkeypatch.setattr("cluster.kind_cluster.delete", lambda _: pytest.fail("deleted"))
    assert main(["down"]) == 0


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.2, "59 s"), (65.0, "1m05s"), (600.0, "10m00s")])
def test_duration_format(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_as_list_format() -> None:
    assert [as_list(["a"]), as_list(["a", "b"]), as_list(["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
