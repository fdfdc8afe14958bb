"""One version everywhere: the VERSION file, the package, the chart, its images and the commands."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
VERSION = (REPOSITORY / "VERSION").read_text().strip()
CHART = REPOSITORY / "charts" / "trimtab"
SPEC = importlib.util.spec_from_file_location("hack_version", REPOSITORY / "hack" / "version.py")
assert SPEC is not None
assert SPEC.loader is not None
hack_version = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hack_version)


def test_chart_and_changelog_agree_with_version_file() -> None:
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    assert hack_version.differences(VERSION, (CHART / "Chart.yaml").read_text(), changelog) == []


def test_default_image_tags_are_the_chart_version() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert (values["image"]["tag"], values["engine"]["image"]["tag"]) == ("", "")


def test_pyproject_reads_the_version_file() -> None:
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert "version" not in pyproject["project"]
    assert pyproject["tool"]["setuptools"]["dynamic"]["version"] == {"file": "VERSION"}


def test_installed_package_has_the_version() -> None:
    assert version("trimtab") == VERSION


def test_commands_print_the_version() -> None:
    for module, function in (("trimtab_operator.command", "trimtab"), ("trimtab_engine.command", "main")):
        code = f"import sys; sys.argv[1:] = ['--version']; from {module} import {function}; sys.exit({function}())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
        assert done.stdout.split()[-1:] == [VERSION], done.stderr


@pytest.mark.parametrize(
    ("value", "chart", "changelog", "named"),
    [
        ("0.2.0", "version: 0.1.0\nappVersion: 0.2.0\n", "\n## [0.2.0]\n", "Chart.yaml version: 0.1.0"),
        ("0.2.0", "version: 0.2.0\n", "\n## [0.2.0]\n", "Chart.yaml appVersion: None"),
        ("0.2.0", "version: 0.2.0\nappVersion: 0.2.0\n", "\n## [0.1.0]\n", "CHANGELOG.md"),
        ("two", "version: two\nappVersion: two\n", "\n## [two]\n", "not a semantic version"),
    ],
)
def test_differences_are_reported(value: str, chart: str, changelog: str, named: str) -> None:
    (error,) = hack_version.differences(value, chart, changelog)
    assert named in error


def test_set_version_writes_file_and_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hack_version, "VERSION", tmp_path / "VERSION")
    monkeypatch.setattr(hack_version, "CHART", tmp_path / "Chart.yaml")
    (tmp_path / "Chart.yaml").write_text((CHART / "Chart.yaml").read_text())
    assert hack_version.main(["0.2.0"]) == 0
    chart = (tmp_path / "Chart.yaml").read_text()
    assert hack_version.differences((tmp_path / "VERSION").read_text().strip(), chart, "\n## [0.2.0]\n") == []
    assert yaml.safe_load(chart)["annotations"]
    assert hack_version.main(["two"]) == 2
