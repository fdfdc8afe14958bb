"""Check an engine image while it is built: every module imports, and the compiled operators are present.

    python check_engine.py [--cuda]

With --cuda also: the CUDA build of torch, Triton, and the compiler and headers with which Triton builds its launchers.
"""

import importlib
import pkgutil
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

OPTIONAL_PACKAGES = {"av", "opentelemetry", "triton", "cuda"}
"""Third-party packages that single modules import and that an image may lack."""


def import_all(package: str, *, optional: set[str]) -> None:
    """Import every module of `package`.

    Raises:
        ImportError: a module or a package outside `optional` is missing.
    """
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if module.name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in optional:
                raise


def check_compiled_operators() -> None:
    """Exit with an error if the package has no library for an instruction set of this architecture."""
    build = importlib.import_module("trimtab_kernels.native.build")
    names = [build.library_name(name) for name in build.INSTRUCTION_SETS.get(platform.machine(), {})]
    missing = [name for name in names if not (build.FOLDER / name).is_file()]
    if missing:
        sys.exit(f"compiled CPU operators are missing: {', '.join(missing)}; the wheel was built without a C compiler")


def check_cuda() -> None:
    """Exit with an error if torch has no CUDA, or if Triton could not compile its launchers."""
    torch = importlib.import_module("torch")
    triton = importlib.import_module("triton")
    if torch.version.cuda is None:
        sys.exit(f"torch {torch.__version__} was built without CUDA; choose another package index")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if shutil.which("cc") is None or not header.is_file():
        sys.exit(f"a C compiler (cc) and {header} are needed by Triton")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}")


def main(arguments: list[str]) -> None:
    is_cuda = "--cuda" in arguments
    optional = OPTIONAL_PACKAGES - ({"triton", "cuda"} if is_cuda else set())
    import_all("trimtab_engine", optional=optional)
    if is_cuda:
        import_all("trimtab_kernels", optional=optional)
        check_cuda()
    check_compiled_operators()


if __name__ == "__main__":
    main(sys.argv[1:])
