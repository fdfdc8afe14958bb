"""The import contracts of pyproject.toml hold, and they bite: a deliberate wrong import breaks the one against it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {"trimtab_operator": ROOT / "operator"}
LINT = "from importlinter.cli import lint_imports_command as lint; lint()"

ROOMS = "Operator: every room is in its place, and rooms import downwards"
NO_CLIENT = "Operator: what decides has no client"


def broken_contracts(package: str, folder: Path) -> list[str]:
    """The names of the contracts on `package` that the copy of it in `folder` breaks."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contracts = [c for c in settings["contracts"] if _package_of(c) == package and _is_alone(c)]
    (folder / "contracts.toml").write_text(
        f'[tool.importlinter]\nroot_packages = ["{package}"]\ninclude_external_packages = true\n'
        + "".join("[[tool.importlinter.contracts]]\n" + _as_toml(contract) for contract in contracts)
    )
    command = [sys.executable, "-c", LINT, "--config", "contracts.toml", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "300"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert any(line.startswith("Contracts:") for line in lines), done.stdout + done.stderr
    return [line.removesuffix(" BROKEN") for line in lines if line.endswith(" BROKEN")]


def _package_of(contract: dict[str, object]) -> str:
    names = contract.get("containers") or contract.get("source_modules") or contract.get("layers") or []
    assert isinstance(names, list)
    return str(names[0]).split(".", 1)[0]


def _is_alone(contract: dict[str, object]) -> bool:
    """Whether no other package of ours is spoken of: only one is copied."""
    return not any(name in str(contract) for name in ("trimtab_engine", "trimtab_kernels"))


def _as_toml(contract: dict[str, object]) -> str:
    spelled = {key: "true" if value is True else repr(value) for key, value in contract.items()}
    return "".join(f"{key} = {value}\n" for key, value in spelled.items())


def a_copy(package: str, folder: Path) -> Path:
    """The package's modules alone, in `folder`."""
    kept = shutil.ignore_patterns("__pycache__", "*.json", "*.c", "*.h", "compiled")
    shutil.copytree(SOURCES[package] / package, folder / package, ignore=kept)
    return folder / package


def test_the_operator_as_it_is_keeps_its_contracts(tmp_path: Path) -> None:
    a_copy("trimtab_operator", tmp_path)
    assert broken_contracts("trimtab_operator", tmp_path) == []


@pytest.mark.parametrize(
    ("module", "wrong", "contract"),
    [
        ("decisions/plan.py", "import asyncio", NO_CLIENT),
        ("tuner/__init__.py", "import httpx", NO_CLIENT),
        ("layout/check.py", "import kubernetes", NO_CLIENT),
        ("resource/spec.py", "from trimtab_operator.builders import labels", ROOMS),
        ("decisions/plan.py", "from trimtab_operator.report import conditions", ROOMS),
        ("decisions/plan.py", "from trimtab_operator.edge import nodes", ROOMS),
        ("tuner/__init__.py", "from trimtab_operator.resource import spec", ROOMS),
        ("report/status.py", "from trimtab_operator.loop import wake_ups", ROOMS),
        ("somewhere.py", "import json", ROOMS),  # a module without a room
    ],
)
def test_a_wrong_import_breaks_the_contract_that_forbids_it(
    module: str, wrong: str, contract: str, tmp_path: Path
) -> None:
    found = a_copy("trimtab_operator", tmp_path) / module
    before = found.read_text() if found.exists() else ""
    found.write_text(f"{before}\n{wrong}\n")
    assert contract in broken_contracts("trimtab_operator", tmp_path)
