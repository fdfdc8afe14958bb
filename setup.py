"""Compile the CPU operators when a wheel is built. Everything else about the package is in pyproject.toml.

The operators are plain shared libraries that ctypes loads: the wheel depends on the machine's architecture and on
glibc, not on the Python version. Without a C compiler the wheel contains only the sources, and the engine compiles them
at first use (kernels/trimtab_kernels/native/library.py).
"""

import importlib.util
import platform
import re
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
NATIVE = Path("trimtab_kernels") / "native"
OLDEST_GLIBC = (2, 17)
"""manylinux2014, the oldest glibc that PyPI's wheels for Python 3.11 support."""


def native_build() -> ModuleType:
    """Return trimtab_kernels.native.build without importing the package, which needs torch."""
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "kernels" / NATIVE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildPy(build_py):
    """build_py that adds the compiled operators. Editable installs have them compiled in place by `make setup`."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / NATIVE / "compiled"
        try:
            native_build().build(folder)
        except (RuntimeError, OSError) as error:
            print(
                f"warning: CPU operators not compiled, the engine compiles them at first use: {error}", file=sys.stderr
            )


class PlatformWheel(bdist_wheel):
    """bdist_wheel with the tag py3-none-PLATFORM if the wheel contains compiled operators, else py3-none-any."""

    def get_tag(self) -> tuple[str, str, str]:
        libraries = list((Path(self.bdist_dir) / NATIVE / "compiled").glob("*.so"))
        if not libraries:
            return super().get_tag()
        return "py3", "none", platform_tag(libraries)


def platform_tag(libraries: list[Path]) -> str:
    """Return the manylinux tag if the libraries need no glibc newer than OLDEST_GLIBC, else the plain Linux tag."""
    needed = [
        tuple(int(part) for part in version.decode().split("."))
        for library in libraries
        for version in re.findall(rb"GLIBC_(\d+\.\d+)", library.read_bytes())
    ]
    machine = platform.machine()
    if needed and max(needed) <= OLDEST_GLIBC:
        return f"manylinux_{OLDEST_GLIBC[0]}_{OLDEST_GLIBC[1]}_{machine}"
    return f"linux_{machine}"


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildPy, "bdist_wheel": PlatformWheel})
