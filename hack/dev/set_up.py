"""Everything that a command of make needs, made at once: Python's side, model and images beside the cluster."""

from __future__ import annotations

import os
from collections.abc import Callable

from cluster import images, kind_cluster, target
from devtools import model, native_operators, python_environment
from devtools.progress import in_parallel
from offline import docker_daemon

PARTS = ("python", "model", "cluster", "images", "prometheus")
IMAGES = ("operator", "model")  # the model's is the engine with its model


def ensure(parts: frozenset[str], bring_up: Callable[[], object]) -> None:
    """Make the named parts. `bring_up` makes the cluster; what does not need it is made meanwhile."""
    builds_images = "images" in parts and not os.environ.get("TRIMTAB_IMAGES")
    built: dict[str, str] = {}

    def packages() -> None:
        python_environment.ensure()
        native_operators.ensure()

    def python_side() -> None:
        in_parallel(packages, *([lambda: images.ensure_base(docker_daemon.ensure())] if builds_images else []))
        if builds_images:  # which makes the model beside what is installed into the images
            others = sorted(parts & set(images.FOR_STORIES))
            built.update(images.ensure(docker_daemon.ensure(), [*IMAGES, *others]))
        elif parts & {"model", "images"}:
            model.ensure()

    in_parallel(python_side, *([bring_up] if "cluster" in parts else []))
    if built and "cluster" in parts and not target.uses_current():
        kind_cluster.load(target.required(target.DEFAULT_NAME), list(built.values()))
