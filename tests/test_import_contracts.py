"""The import contracts of pyproject.toml hold, and they bite: a deliberate wrong import breaks the one against it."""

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
ENGINE = ("trimtab_engine", "trimtab_kernels")  # copied together: some contracts are about both
LINT = "from importlinter.cli import lint_imports_command as lint; lint()"

BROKEN = re.compile(r"(.*) BROKEN(?: \(\d+ ignored imports?\))?")

ROOMS = "Operator: packages import only lower layers"
NO_CLIENT = "Operator: planning packages import no client"
ENGINE_ROOMS = "Engine: packages import only lower layers"
NO_CIRCLE = "Engine and kernels: no import cycles between packages"
LAPTOP = "Engine: the scheduler imports only the standard library"
SAID = "Engine: configuration, memory sizing and messages import no torch"
ITEMS = "Engine: multimodal items are plain values"
SERVER = "Engine: the API server imports no torch and no core"
LAUNCH = "Kernels: launch helpers import no kernel"


def broken_contracts(packages: Sequence[str], folder: Path) -> list[str]:
    """The names of the contracts on these packages alone that the copies of them in `folder` break."""
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
    """Whether it speaks of these packages and of no other of ours: only they are copied."""
    named = set(re.findall(r"trimtab_[a-z]+", str(contract)))
    return bool(named) and named <= set(packages)


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
    assert broken_contracts(["trimtab_operator"], tmp_path) == []


@pytest.mark.parametrize(
    ("module", "wrong", "contract"),
    [
        ("planning/children.py", "import asyncio", NO_CLIENT),
        ("tuner/__init__.py", "import httpx", NO_CLIENT),
        ("layout/check.py", "import kubernetes", NO_CLIENT),
        ("resource/spec.py", "from trimtab_operator.builders import labels", ROOMS),
        ("planning/children.py", "from trimtab_operator.report import conditions", ROOMS),
        ("planning/children.py", "from trimtab_operator.kube import nodes", ROOMS),
        ("tuner/__init__.py", "from trimtab_operator.resource import spec", ROOMS),
        ("report/status.py", "from trimtab_operator.reconcile import wakeups", ROOMS),
        ("somewhere.py", "import json", ROOMS),  # a module without a room
    ],
)
def test_a_wrong_import_breaks_the_contract_that_forbids_it(
    module: str, wrong: str, contract: str, tmp_path: Path
) -> None:
    found = a_copy("trimtab_operator", tmp_path) / module
    before = found.read_text() if found.exists() else ""
    found.write_text(f"{before}\n{wrong}\n")
    assert contract in broken_contracts(["trimtab_operator"], tmp_path)


def test_engine_and_kernels_as_they_are_keep_their_contracts(tmp_path: Path) -> None:
    for package in ENGINE:
        a_copy(package, tmp_path)
    assert broken_contracts(ENGINE, tmp_path) == []


@pytest.mark.parametrize(
    ("module", "wrong", "contracts"),
    [
        ("trimtab_engine/scheduling/scheduler.py", "import torch", {LAPTOP}),
        ("trimtab_engine/scheduling/policy.py", "from trimtab_engine.config import quantity", {ENGINE_ROOMS}),
        ("trimtab_engine/device/device.py", "from trimtab_engine.core import lifecycle", {ENGINE_ROOMS}),
        ("trimtab_engine/memory/formula.py", "import torch", {SAID}),
        ("trimtab_engine/multimodal/items.py", "import numpy", {LAPTOP, ITEMS}),
        ("trimtab_engine/api/openai/routes.py", "from trimtab_engine.core import step_stats", {SERVER}),
        ("trimtab_engine/api/http/errors.py", "from trimtab_engine.api.openai import state", {NO_CIRCLE}),
        ("trimtab_engine/somewhere.py", "import json", {ENGINE_ROOMS}),  # a module without a room
        ("trimtab_kernels/launch/jit.py", "from trimtab_kernels import rms_norm", {LAUNCH, NO_CIRCLE}),
    ],
)
def test_a_wrong_import_in_engine_or_kernels_breaks_the_contracts_that_forbid_it(
    module: str, wrong: str, contracts: set[str], tmp_path: Path
) -> None:
    for package in ENGINE:
        a_copy(package, tmp_path)
    found = tmp_path / module
    found.write_text((found.read_text() if found.exists() else "") + f"\n{wrong}\n")
    assert contracts <= set(broken_contracts(ENGINE, tmp_path))
