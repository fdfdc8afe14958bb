"""The images of engine, operator, router and model, tagged with a hash of their contents and built only if missing.

Each consists of two images: third-party packages (minutes, rarely rebuilt; see offline/images.py) and on top the
project's code (seconds, often rebuilt).
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from devtools import docker_cli, model
from devtools.cache import key_of, locked, remove_tree, scratch_folder, tree_key
from devtools.process import output_of, run
from devtools.progress import in_parallel, log_line, stage
from offline import images as offline_images

REPOSITORY = Path(__file__).resolve().parent.parent.parent
RECIPES = REPOSITORY / "images"
NAMES = ("engine", "operator", "router", "model")
FOR_STORIES = ("prometheus",)
COMPILED = Path("trimtab_kernels/native/compiled")  # rebuilt from the copied sources
KEPT_TAGS = 3  # newest tags kept per image, so that switching between checkouts rebuilds nothing
SLIM_IMAGE = "python:3.12-slim"


@dataclass(frozen=True, slots=True)
class Product:
    """A program with its own image: its extra in pyproject.toml, its packages, and modules that must be importable."""

    name: str
    sources: tuple[str, ...]
    imports: str
    install_seconds: float


ENGINE_IMPORTS = (
    "torch transformers.models.auto.tokenization_auto tokenizers safetensors.torch gguf fastapi uvicorn uvloop zmq "
    "msgspec xxhash jinja2 prometheus_client httpx botocore.session"
)
ROUTER_IMPORTS = "aiohttp httptools msgspec orjson prometheus_client uvloop xxhash"
OPERATOR_IMPORTS = "kopf kubernetes.aio prometheus_client httpx pydantic cryptography typer rich"
PRODUCTS = {
    product.name: product
    for product in (
        Product(
            "engine",
            (
                "engine-image/trimtab_engine",
                "kernels/trimtab_kernels",
                "modelspec/trimtab_modelspec",
                "router/trimtab_router",
            ),
            ENGINE_IMPORTS,
            110.0,
        ),
        Product(
            "operator",
            ("operator/trimtab_operator", "modelspec/trimtab_modelspec", "router/trimtab_router"),
            OPERATOR_IMPORTS,
            45.0,
        ),
        Product("router", ("router/trimtab_router",), ROUTER_IMPORTS, 15.0),
    )
}


def ensure(docker: dict[str, str], names: list[str]) -> dict[str, str]:
    """Build missing images and return the image of each name in `names`."""
    with locked("images"):
        base = _base_image(docker)
        version = _python_version(docker, base)
        wanted = [name for name in PRODUCTS if name in names or (name == "engine" and "model" in names)]
        built: dict[str, str] = {}

        def make(name: str) -> None:
            built[name] = _product(docker, PRODUCTS[name], base, version)

        def make_prometheus() -> None:
            built["prometheus"] = offline_images.prometheus(docker, base)

        steps: list[Callable[[], None]] = [partial(make, name) for name in wanted]
        if "prometheus" in names:
            steps.append(make_prometheus)
        in_parallel(*steps, *([model.ensure] if "model" in names else []))
        if "model" in names:
            built["model"] = _model(docker, built["engine"])
    for image in built.values():
        docker_cli.forget_old_tags(docker, image, keep=KEPT_TAGS)
    return {name: built[name] for name in (*NAMES, *FOR_STORIES) if name in names}


def ensure_base(docker: dict[str, str]) -> None:
    """Build or select the base image, which does not depend on Python packages."""
    with locked("images"):
        _base_image(docker)


def _base_image(docker: dict[str, str]) -> str:
    """Return BASE_IMAGE, else python slim, else (without a registry) an image built from Debian packages."""
    chosen = os.environ.get("BASE_IMAGE", "")
    if chosen:
        return chosen
    local = offline_images.python_base_name()
    if docker_cli.has_image(docker, local):
        return local
    if docker_cli.has_image(docker, SLIM_IMAGE) or docker_cli.reaches_registry(docker):
        return SLIM_IMAGE
    offline_images.build_python_base(docker, local)
    return local


def _python_version(docker: dict[str, str], base: str) -> str:
    """Return the base's Python version such as "3.11", for which packages are installed."""
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    command = ["docker", "run", "--rm", "--network", "none", base, "python3", "-c", script]
    return output_of(command, environment=docker, timeout_seconds=600)


def distribution_metadata(pyproject: str, version: str) -> tuple[str, str]:
    """Return the name and METADATA of the folder in which importlib.metadata finds the project's version."""
    name = tomllib.loads(pyproject)["project"]["name"]
    return f"{name}-{version}.dist-info", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


def _product(docker: dict[str, str], product: Product, base: str, version: str) -> str:
    packages_image = offline_images.packages(
        docker, product.name, product.imports, base, version, expected_seconds=product.install_seconds
    )
    dockerfile = RECIPES / f"Dockerfile.{product.name}"
    context = scratch_folder(f"image-{product.name}")
    _copy_own_code(product, context)
    # The copy is hashed, so that concurrent edits of the sources cannot end up under the wrong tag.
    image = f"trimtab-{product.name}:{tree_key([context, dockerfile], extra=(packages_image,))}"
    if not docker_cli.has_image(docker, image):
        with stage(f"images: {image}", 5):
            docker_cli.build(docker, image, context, dockerfile, {"BASE_IMAGE": packages_image})
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
    offline_images.make_readable(context)


def _compile(app: Path) -> None:
    """Compile the CPU operators with the host's compiler. They need only a C library older than any image's.

    Without a compiler the engine falls back to torch's operators and logs it.
    """
    recipe = app / COMPILED.parent / "build.py"
    if not recipe.is_file():
        return
    if not (os.environ.get("CC") or shutil.which("cc")):
        log_line("images: no C compiler found, so the engine's native CPU operators are left out: slower on CPUs")
        return
    run([sys.executable, recipe], log="native")


def _model(docker: dict[str, str], engine: str) -> str:
    recipe = RECIPES / "Dockerfile.model"
    folder = model.ensure()
    tokenizer = (folder / "tokenizer.json").read_bytes()  # changes whenever the conversion changes
    image = f"trimtab-model:{key_of(engine, model.NAME, model.PACKAGE, recipe.read_bytes(), tokenizer)}"
    if docker_cli.has_image(docker, image):
        return image
    with stage(f"images: {image}, with {model.NAME}", 20):
        context = scratch_folder("image-model")
        shutil.copytree(folder, context / model.NAME, copy_function=os.link)  # hard links: avoids copying 540 MB
        docker_cli.build(docker, image, context, recipe, {"BASE_IMAGE": engine, "NAME": model.NAME})
        remove_tree(context)
    return image
