"""Set-up of everything that a make command needs, in parallel: Python packages, model, images and cluster."""

from __future__ import annotations

import os
from collections.abc import Callable

from cluster import images, kind_cluster, target
from devtools import docker_cli, model, native_operators, python_environment
from devtools.progress import in_parallel

PARTS = ("python", "model", "cluster", "images", "prometheus")
IMAGES = ("operator", "router", "model")  # the model image contains the engine


def ensure(parts: frozenset[str], bring_up: Callable[[], object]) -> None:
    """Set up the named parts. `bring_up` creates the cluster in parallel to everything that does not need it."""
    builds_images = "images" in parts and not os.environ.get("TRIMTAB_IMAGES")
    built: dict[str, str] = {}

    def packages() -> None:
        python_environment.ensure()
        native_operators.ensure()

    def python_side() -> None:
        in_parallel(packages, *([lambda: images.ensure_base(docker_cli.ensure())] if builds_images else []))
        if builds_images:  # also creates the model, in parallel to the package images
            others = sorted(parts & set(images.FOR_STORIES))
            built.update(images.ensure(docker_cli.ensure(), [*IMAGES, *others]))
        elif parts & {"model", "images"}:
            model.ensure()

    in_parallel(python_side, *([bring_up] if "cluster" in parts else []))
    if built and "cluster" in parts and not target.uses_current():
        kind_cluster.load(target.required(target.DEFAULT_NAME), list(built.values()))
