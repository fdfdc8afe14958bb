"""The import contracts of pyproject.toml hold, and a wrong import breaks the matching contract."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {
    "trimtab_operator": ROOT / "operator",
    "trimtab_engine": ROOT / "engine-image",
    "trimtab_kernels": ROOT / "kernels",
}
ENGINE = ("trimtab_engine", "trimtab_kernels")  # copied together, since some contracts cover both
LINT = "from importlinter.cli import lint_imports_command as lint; lint()"

BROKEN = re.compile(r"(.*) BROKEN(?: \(\d+ ignored imports?\))?")

OPERATOR_LAYERS = "Operator: packages import only lower layers"
NO_CLIENT = "Operator: planning packages import no client"
ENGINE_LAYERS = "Engine: packages import only lower layers"
NO_CYCLE = "Engine and kernels: no import cycles between packages"
SCHEDULER = "Engine: the scheduler imports only the standard library"
NO_TORCH = "Engine: configuration, memory sizing and messages import no torch"
ITEMS = "Engine: multimodal items are plain values"
SERVER = "Engine: the API server imports no torch and no core"
LAUNCH = "Kernels: launch helpers import no kernel"


def broken_contracts(packages: Sequence[str], folder: Path) -> list[str]:
    """Return the names of the contracts of only these packages that their copies in `folder` break."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contracts = [contract for contract in settings["contracts"] if _is_about(contract, packages)]
    (folder / "contracts.toml").write_text(
        f"[tool.importlinter]\nroot_packages = {list(packages)}\ninclude_external_packages = true\n"
        + "".join("[[tool.importlinter.contracts]]\n" + _as_toml(contract) for contract in contracts)
    )
    command = [sys.executable, "-c", LINT, "--config", "contracts.toml", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "300"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert any(line.startswith("Contracts:") for line in lines), done.stdout + done.stderr
    return [found[1] for line in lines if (found := BROKEN.fullmatch(line)) is not None]


def _is_about(contract: dict[str, object], packages: Sequence[str]) -> bool:
    """Return True if the contract names only these packages, since only they are copied."""
    names = set(re.findall(r"trimtab_[a-z]+", str(contract)))
    return bool(names) and names <= set(packages)


def _as_toml(contract: dict[str, object]) -> str:
    values = {key: "true" if value is True else repr(value) for key, value in contract.items()}
    return "".join(f"{key} = {value}\n" for key, value in values.items())


def copy_package(package: str, folder: Path) -> Path:
    """Copy the package's modules to `folder`."""
    ignored = shutil.ignore_patterns("__pycache__", "*.json", "*.c", "*.h", "compiled")
    shutil.copytree(SOURCES[package] / package, folder / package, ignore=ignored)
    return folder / package


def test_operator_keeps_contracts(tmp_path: Path) -> None:
    copy_package("trimtab_operator", tmp_path)
    assert broken_contracts(["trimtab_operator"], tmp_path) == []


@pytest.mark.parametrize(
    ("module", "wrong", "contract"),
    [
        ("planning/children.py", "import asyncio", NO_CLIENT),
        ("tuner/__init__.py", "import httpx", NO_CLIENT),
        ("layout/check.py", "import kubernetes", NO_CLIENT),
        ("resource/spec.py", "from trimtab_operator.builders import labels", OPERATOR_LAYERS),
        ("planning/children.py", "from trimtab_operator.report import conditions", OPERATOR_LAYERS),
        ("planning/children.py", "from trimtab_operator.kube import nodes", OPERATOR_LAYERS),
        ("tuner/__init__.py", "from trimtab_operator.resource import spec", OPERATOR_LAYERS),
        ("report/status.py", "from trimtab_operator.reconcile import work_queue", OPERATOR_LAYERS),
        ("somewhere.py", "import json", OPERATOR_LAYERS),  # a module outside all layers
    ],
)
def test_wrong_operator_import_breaks_contract(module: str, wrong: str, contract: str, tmp_path: Path) -> None:
    found = copy_package("trimtab_operator", tmp_path) / module
    before = found.read_text() if found.exists() else ""
    found.write_text(f"{before}\n{wrong}\n")
    assert contract in broken_contracts(["trimtab_operator"], tmp_path)


def test_engine_and_kernels_keep_contracts(tmp_path: Path) -> None:
    for package in ENGINE:
        copy_package(package, tmp_path)
    assert broken_contracts(ENGINE, tmp_path) == []


@pytest.mark.parametrize(
    ("module", "wrong", "contracts"),
    [
        ("trimtab_engine/scheduling/scheduler.py", "import torch", {SCHEDULER}),
        ("trimtab_engine/scheduling/policy.py", "from trimtab_engine.config import quantity", {ENGINE_LAYERS}),
        ("trimtab_engine/device/device.py", "from trimtab_engine.core import lifecycle", {ENGINE_LAYERS}),
        ("trimtab_engine/memory/formula.py", "import torch", {NO_TORCH}),
        ("trimtab_engine/multimodal/items.py", "import numpy", {SCHEDULER, ITEMS}),
        ("trimtab_engine/api/openai/routes.py", "from trimtab_engine.core import step_stats", {SERVER}),
        ("trimtab_engine/api/http/errors.py", "from trimtab_engine.api.openai import state", {NO_CYCLE}),
        ("trimtab_engine/somewhere.py", "import json", {ENGINE_LAYERS}),  # a module outside all layers
        ("trimtab_kernels/launch/jit.py", "from trimtab_kernels import rms_norm", {LAUNCH, NO_CYCLE}),
    ],
)
def test_wrong_engine_or_kernel_import_breaks_contracts(
    module: str, wrong: str, contracts: set[str], tmp_path: Path
) -> None:
    for package in ENGINE:
        copy_package(package, tmp_path)
    found = tmp_path / module
    found.write_text((found.read_text() if found.exists() else "") + f"\n{wrong}\n")
    assert contracts <= set(broken_contracts(ENGINE, tmp_path))
