"""The images of engine, operator and model: built once per content, so that nothing is rebuilt without need.

Each is two images: third-party packages (minutes, seldom) and our own code on them (seconds, often). Packages are
installed by the host's pip into a folder and copied in, because a build may have no package index in reach. Tags are
hashes of everything that goes in: a name that Docker has is an image that is up to date.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from devtools import model
from devtools.cache import key_of, locked, remove_tree, tree_key
from devtools.errors import ClusterError
from devtools.process import output_of, run
from devtools.progress import in_parallel, log_line, stage
from devtools.python_environment import pip_command
from offline import debian, docker_daemon

REPOSITORY = Path(__file__).resolve().parent.parent.parent
RECIPES = REPOSITORY / "images"
NAMES = ("engine", "operator", "model")
FOR_STORIES = ("prometheus",)
# No tests, C headers, static libraries or bytecode of another interpreter: nothing of these is read at run time.
WASTE_FOLDERS = frozenset({"__pycache__", "tests"})
WASTE_PATHS = ("torch/include", "torch/share", "torch/test", "bin")
WASTE_SUFFIXES = (".a", ".pyi", ".pyx", ".pxd")  # not .c and .h: Triton compiles its own when it meets a GPU
TORCH_HELPER = "torch_shm_manager"  # the only one of torch/bin (50 MB) that `import torch` looks for
COMPILED = Path("trimtab_kernels/native/compiled")  # made anew from the copied sources
KEPT_TAGS = 3  # of each image, the newest: a switch between two checkouts rebuilds nothing
SLIM_IMAGE = "python:3.12-slim"
LOCAL_BASE_PACKAGES = ("ca-certificates", "python3", "libgomp1")  # torch's threads need libgomp


@dataclass(frozen=True, slots=True)
class Product:
    """One of our own programs: its extra in pyproject.toml, what is in it, and the modules that must import there."""

    name: str
    sources: tuple[str, ...]
    imports: str
    install_seconds: float


ENGINE_IMPORTS = (
    "torch transformers.models.auto.tokenization_auto tokenizers safetensors.torch gguf fastapi uvicorn uvloop zmq "
    "msgspec jinja2 prometheus_client httpx botocore.session"
)
OPERATOR_IMPORTS = "kopf kubernetes.aio prometheus_client httpx pydantic cryptography typer rich"
PRODUCTS = {
    product.name: product
    for product in (
        Product("engine", ("engine-image/trimtab_engine", "kernels/trimtab_kernels"), ENGINE_IMPORTS, 110.0),
        Product("operator", ("operator/trimtab_operator",), OPERATOR_IMPORTS, 45.0),
    )
}


def ensure(docker: dict[str, str], names: list[str]) -> dict[str, str]:
    """Build what is missing; returns the image of each name in `names`."""
    with locked("images"):
        base = _base_image(docker)
        version = _python_version(docker, base)
        wanted = [name for name in PRODUCTS if name in names or (name == "engine" and "model" in names)]
        built: dict[str, str] = {}

        def make(name: str) -> None:
            built[name] = _product(docker, PRODUCTS[name], base, version)

        def make_prometheus() -> None:
            built["prometheus"] = _prometheus(docker, base)

        steps: list[Callable[[], None]] = [partial(make, name) for name in wanted]
        if "prometheus" in names:
            steps.append(make_prometheus)
        in_parallel(*steps, *([model.ensure] if "model" in names else []))
        if "model" in names:
            built["model"] = _model(docker, built["engine"])
    for image in built.values():
        docker_daemon.forget_old_tags(docker, image, keep=KEPT_TAGS)
    return {name: built[name] for name in (*NAMES, *FOR_STORIES) if name in names}


def ensure_base(docker: dict[str, str]) -> None:
    """Make what the images are based on, which takes nothing but Debian's packages."""
    with locked("images"):
        _base_image(docker)


def _base_image(docker: dict[str, str]) -> str:
    """BASE_IMAGE, or an ordinary slim image of Python, or without a registry one of Debian's packages."""
    chosen = os.environ.get("BASE_IMAGE", "")
    if chosen:
        return chosen
    local = f"trimtab-python:{key_of(debian.BASE_SUITE, *LOCAL_BASE_PACKAGES)}"
    if docker_daemon.has_image(docker, local):
        return local
    if docker_daemon.has_image(docker, SLIM_IMAGE) or docker_daemon.reaches_registry(docker):
        return SLIM_IMAGE
    with stage("images: Debian base with Python", 40):
        root = debian.scratch_folder("python-base")
        debian.bootstrap(root, LOCAL_BASE_PACKAGES, log="python-base")
        for waste in (
            "var/cache/apt/archives",
            "var/lib/apt/lists",
            "usr/share/doc",
            "usr/share/man",
            "usr/share/locale",
        ):
            remove_tree(root / waste)
        docker_daemon.import_root(docker, root, local)
        remove_tree(root)
    return local


def _python_version(docker: dict[str, str], base: str) -> str:
    """The base's Python, as "3.11": packages are installed for that one, whichever runs here."""
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    command = ["docker", "run", "--rm", "--network", "none", base, "python3", "-c", script]
    return output_of(command, environment=docker, timeout_seconds=600)


def requirements(pyproject: str, extra: str) -> list[str]:
    """The requirement strings of one extra."""
    found = tomllib.loads(pyproject)["project"]["optional-dependencies"].get(extra)
    if not found:
        raise ClusterError(f"pyproject.toml has no extra named {extra}, so there is nothing to put into its image")
    return list(found)


def distribution_metadata(pyproject: str, version: str) -> tuple[str, str]:
    """Return the name and METADATA of the folder in which importlib.metadata finds the project's version."""
    name = tomllib.loads(pyproject)["project"]["name"]
    return f"{name}-{version}.dist-info", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


def pins(constraints: str) -> list[str]:
    """The lines of constraints.txt that pin something, in order, so that a comment changes no hash."""
    return sorted(line.strip() for line in constraints.splitlines() if re.match(r"^[A-Za-z0-9]", line))


def _product(docker: dict[str, str], product: Product, base: str, version: str) -> str:
    packages_image = _packages_image(docker, product, base, version)
    dockerfile = RECIPES / f"Dockerfile.{product.name}"
    context = debian.scratch_folder(f"image-{product.name}")
    _copy_own_code(product, context)
    # The copy is what is hashed: an edit of the sources meanwhile cannot get under a name that it does not belong to.
    image = f"trimtab-{product.name}:{tree_key([context, dockerfile], extra=(packages_image,))}"
    if not docker_daemon.has_image(docker, image):
        with stage(f"images: {image}", 5):
            build(docker, image, context, dockerfile, {"BASE_IMAGE": packages_image})
    remove_tree(context)
    return image


def _copy_own_code(product: Product, context: Path) -> None:
    for source in product.sources:
        target = context / "app" / Path(source).name
        shutil.copytree(REPOSITORY / source, target, ignore=shutil.ignore_patterns("__pycache__", COMPILED.name))
    _compile(context / "app")
    pyproject, version = (REPOSITORY / name for name in ("pyproject.toml", "VERSION"))
    folder, text = distribution_metadata(pyproject.read_text(), version.read_text().strip())
    (context / "app" / folder).mkdir()
    (context / "app" / folder / "METADATA").write_text(text)
    (context / "bin").mkdir()
    shutil.copy2(RECIPES / "bin" / f"trimtab-{product.name}", context / "bin")
    _make_readable(context)


def _compile(app: Path) -> None:
    """The CPU's operators, by the host's compiler: they need no library but an older C library than any image's. The
    image needs no compiler; without one here it computes by torch's operators, and says so."""
    recipe = app / COMPILED.parent / "build.py"
    if not recipe.is_file():
        return
    if not (os.environ.get("CC") or shutil.which("cc")):
        log_line("images: no C compiler here, so the engine's CPU operators are left out: it will be slower on CPUs")
        return
    run([sys.executable, recipe], log="native")


def _packages_image(docker: dict[str, str], product: Product, base: str, version: str) -> str:
    wanted = requirements((REPOSITORY / "pyproject.toml").read_text(), product.name)
    recipe = RECIPES / "Dockerfile.packages"
    waste = (*sorted(WASTE_FOLDERS), *WASTE_PATHS, *WASTE_SUFFIXES, TORCH_HELPER)
    key = key_of(
        base,
        version,
        *wanted,
        *pins((REPOSITORY / "constraints.txt").read_text()),
        *waste,
        product.imports,
        recipe.read_bytes(),
    )
    image = f"trimtab-{product.name}-packages:{key}"
    if docker_daemon.has_image(docker, image):
        return image
    with stage(f"images: {product.name}'s packages", product.install_seconds):
        context = debian.scratch_folder(f"packages-{product.name}")
        _install(context / "packages", wanted, version, log=f"packages-{product.name}")
        build(docker, image, context, recipe, {"BASE_IMAGE": base, "IMPORTS": ", ".join(product.imports.split())})
        remove_tree(context)
    docker_daemon.forget_old_tags(docker, image, keep=KEPT_TAGS)
    return image


def _install(folder: Path, wanted: list[str], version: str, *, log: str) -> None:
    """pip install into `folder` for Python `version`, wheels only (nothing is compiled), and strip the rest."""
    constraints = REPOSITORY / "constraints.txt"
    run(
        [
            *pip_command(), "install", "--quiet", "--no-compile", "--target", folder,
            "--python-version", version, "--only-binary=:all:", "--constraint", constraints, *wanted,
        ],
        log=log,
    )  # fmt: skip
    strip(folder)
    _make_readable(folder)


def strip(folder: Path) -> None:
    """Remove what nothing reads at run time; about a tenth of torch's tree."""
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


def _make_readable(folder: Path) -> None:
    """Readable by the image's user, whatever this process's umask was."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def _model(docker: dict[str, str], engine: str) -> str:
    recipe = RECIPES / "Dockerfile.model"
    folder = model.ensure()
    tokenizer = (folder / "tokenizer.json").read_bytes()  # what is converted otherwise than before shows in it
    image = f"trimtab-model:{key_of(engine, model.NAME, model.PACKAGE, recipe.read_bytes(), tokenizer)}"
    if docker_daemon.has_image(docker, image):
        return image
    with stage(f"images: {image}, with {model.NAME} baked in", 20):
        context = debian.scratch_folder("image-model")
        shutil.copytree(folder, context / model.NAME, copy_function=os.link)  # the same file system: no copy of 540 MB
        build(docker, image, context, recipe, {"BASE_IMAGE": engine, "NAME": model.NAME})
        remove_tree(context)
    return image


def _prometheus(docker: dict[str, str], base: str) -> str:
    recipe = RECIPES / "Dockerfile.prometheus"
    program = debian.program("prometheus")
    image = f"trimtab-prometheus:{key_of(base, str(program.stat().st_size), recipe.read_bytes())}"
    if docker_daemon.has_image(docker, image):
        return image
    with stage(f"images: {image}, of Debian's package", 20):
        context = debian.scratch_folder("image-prometheus")
        shutil.copy2(program, context / "prometheus")
        build(docker, image, context, recipe, {"BASE_IMAGE": base})
        remove_tree(context)
    return image


def build(docker: dict[str, str], image: str, context: Path, dockerfile: Path, arguments: dict[str, str]) -> None:
    """docker build with the classic builder, which every Docker has."""
    options = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    run(
        ["docker", "build", "--network", "none", "-t", image, "-f", dockerfile, *options, context],
        log=f"build-{image.partition(':')[0]}",
        environment={"DOCKER_BUILDKIT": "0", **docker},
    )
