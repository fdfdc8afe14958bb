"""Image parts for machines where `docker build` reaches neither a registry nor a package index.

The base image and Prometheus come from Debian packages, and Python packages are installed by the host's pip.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

from devtools import docker_cli
from devtools.cache import key_of, remove_tree, scratch_folder
from devtools.errors import ClusterError
from devtools.process import run
from devtools.progress import stage
from devtools.python_environment import pip_command

from . import debian

REPOSITORY = Path(__file__).resolve().parent.parent.parent
RECIPES = REPOSITORY / "images"
PYTHON_BASE_PACKAGES = ("ca-certificates", "python3", "libgomp1")  # torch's threads need libgomp
# Tests, C headers, static libraries and bytecode are not needed at run time.
WASTE_FOLDERS = frozenset({"__pycache__", "tests"})
WASTE_PATHS = ("torch/include", "torch/share", "torch/test", "bin")
WASTE_SUFFIXES = (".a", ".pyi", ".pyx", ".pxd")  # not .c and .h: Triton compiles its own on GPUs
TORCH_HELPER = "torch_shm_manager"  # the only program of torch/bin (50 MB) that `import torch` needs
KEPT_TAGS = 3  # newest tags kept per image, so that switching between checkouts rebuilds nothing
STRIPPED = (*sorted(WASTE_FOLDERS), *WASTE_PATHS, *WASTE_SUFFIXES, TORCH_HELPER)
"""Everything that `strip` depends on, for the hash of an image."""


def python_base_name() -> str:
    """Return the name of the Debian image with Python; the tag is a hash of its packages."""
    return f"trimtab-python:{key_of(debian.BASE_SUITE, *PYTHON_BASE_PACKAGES)}"


def build_python_base(docker: dict[str, str], image: str) -> None:
    """Build a Debian image with Python."""
    with stage("images: Debian base with Python", 40):
        root = scratch_folder("python-base")
        debian.bootstrap(root, PYTHON_BASE_PACKAGES, log="python-base")
        for waste in (
            "var/cache/apt/archives",
            "var/lib/apt/lists",
            "usr/share/doc",
            "usr/share/man",
            "usr/share/locale",
        ):
            remove_tree(root / waste)
        docker_cli.import_root(docker, root, image)
        remove_tree(root)


def requirements(pyproject: str, extra: str) -> list[str]:
    """Return the requirements of one extra of pyproject.toml."""
    found = tomllib.loads(pyproject)["project"]["optional-dependencies"].get(extra)
    if not found:
        raise ClusterError(f"pyproject.toml: there is no extra named {extra}, so its image would be empty")
    return list(found)


def pins(constraints: str) -> list[str]:
    """Return the sorted pins of constraints.txt, so that comments do not change a hash."""
    return sorted(line.strip() for line in constraints.splitlines() if re.match(r"^[A-Za-z0-9]", line))


def packages(
    docker: dict[str, str], extra: str, imports: str, base: str, version: str, *, expected_seconds: float
) -> str:
    """Return the image with the Python packages of one extra of pyproject.toml, built if it is missing.

    The build fails unless `imports` (module names) can be imported in the image.
    """
    wanted = requirements((REPOSITORY / "pyproject.toml").read_text(), extra)
    recipe = RECIPES / "Dockerfile.packages"
    key = key_of(
        base,
        version,
        *wanted,
        *pins((REPOSITORY / "constraints.txt").read_text()),
        *STRIPPED,
        imports,
        recipe.read_bytes(),
    )
    image = f"trimtab-{extra}-packages:{key}"
    if docker_cli.has_image(docker, image):
        return image
    with stage(f"images: {extra}'s packages", expected_seconds):
        context = scratch_folder(f"packages-{extra}")
        install_packages(context / "packages", wanted, version, log=f"packages-{extra}")
        docker_cli.build(docker, image, context, recipe, {"BASE_IMAGE": base, "IMPORTS": ", ".join(imports.split())})
        remove_tree(context)
    docker_cli.forget_old_tags(docker, image, keep=KEPT_TAGS)
    return image


def install_packages(folder: Path, wanted: list[str], version: str, *, log: str) -> None:
    """Install wheels for Python `version` into `folder` with pip, and strip unneeded files."""
    constraints = REPOSITORY / "constraints.txt"
    run(
        [
            *pip_command(), "install", "--quiet", "--no-compile", "--target", folder,
            "--python-version", version, "--only-binary=:all:", "--constraint", constraints, *wanted,
        ],
        log=log,
    )  # fmt: skip
    strip(folder)
    make_readable(folder)


def strip(folder: Path) -> None:
    """Remove files that are not needed at run time, about a tenth of torch."""
    for name in WASTE_PATHS:
        remove_tree(folder / name)
    for path in folder.glob("torch/bin/*"):
        if path.name != TORCH_HELPER:
            remove_tree(path)
    for path in [path for path in folder.rglob("*") if path.is_dir() and path.name in WASTE_FOLDERS]:
        remove_tree(path)
    for path in folder.rglob("*"):
        if path.is_file() and path.name.endswith(WASTE_SUFFIXES):
            path.unlink()


def make_readable(folder: Path) -> None:
    """Make files readable by the image's user, independent of the umask."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def prometheus(docker: dict[str, str], base: str) -> str:
    recipe = RECIPES / "Dockerfile.prometheus"
    program = debian.program("prometheus")
    image = f"trimtab-prometheus:{key_of(base, str(program.stat().st_size), recipe.read_bytes())}"
    if docker_cli.has_image(docker, image):
        return image
    with stage(f"images: {image}, from Debian's package", 20):
        context = scratch_folder("image-prometheus")
        shutil.copy2(program, context / "prometheus")
        docker_cli.build(docker, image, context, recipe, {"BASE_IMAGE": base})
        remove_tree(context)
    return image
