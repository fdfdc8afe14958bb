"""Packages from a folder of wheels for a GPU machine's Python that lacks them; nothing is installed.

`python -m kernel_benchmarks.wheels FOLDER MODULE [ARGUMENTS]` runs a module (pytest, the tuner) with them.
"""

import atexit
import os
import re
import runpy
import shutil
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def use_wheels(folder: Path) -> list[str]:
    """Unpack the wheels whose package is not installed and add them to the path, including child processes'. Returns
    the names of the packages; none if the folder does not exist.
    """
    missing = [wheel for wheel in sorted(folder.glob("*.whl")) if not _is_installed(_package(wheel))]
    if missing:
        target = tempfile.mkdtemp(prefix="wheels-")
        atexit.register(shutil.rmtree, target, ignore_errors=True)
        for wheel in missing:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
        sys.path.append(target)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), target)))
    return [_package(wheel) for wheel in missing]


def _package(wheel: Path) -> str:
    return re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def main(arguments: list[str]) -> None:
    """Run `python -m MODULE ARGUMENTS` with the wheels."""
    if len(arguments) < 2:
        raise SystemExit("usage: python -m kernel_benchmarks.wheels FOLDER MODULE [ARGUMENTS]")
    folder, module, *rest = arguments
    print(f"from {folder}: {', '.join(use_wheels(Path(folder))) or 'nothing is needed'}", flush=True)
    if find_spec(module) is None:
        raise SystemExit(f"{module} is neither installed for {sys.executable} nor in {folder}: put its wheels there")
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
