"""Contents of the images and of their hashes."""

from __future__ import annotations

import importlib.metadata
import re
import threading
from pathlib import Path

import pytest
from cluster import images
from cluster.images import PRODUCTS, REPOSITORY, distribution_metadata
from devtools.errors import ClusterError
from offline.images import pins, requirements, strip

PYPROJECT = """
[project.optional-dependencies]
operator = ["kopf>=1.45", "httpx"]
"""


def test_requirements_are_read_from_extra() -> None:
    assert requirements(PYPROJECT, "operator") == ["kopf>=1.45", "httpx"]


def test_missing_extra_is_named_in_error() -> None:
    with pytest.raises(ClusterError, match="engine"):
        requirements(PYPROJECT, "engine")


def test_distribution_metadata_is_found_by_importlib(tmp_path: Path) -> None:
    folder, text = distribution_metadata('[project]\nname = "trimtab"\n', "1.2.3")
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "METADATA").write_text(text)
    (found,) = importlib.metadata.distributions(name="trimtab", path=[str(tmp_path)])
    assert found.version == "1.2.3"


def test_pins_ignore_comments_and_order() -> None:
    assert pins("# made by pip\nb==2\na==1\n") == pins("a==1\n\nb==2\n# end\n") == ["a==1", "b==2"]


def test_strip_removes_only_files_unneeded_at_run_time(tmp_path: Path) -> None:
    kept = ["torch/__init__.py", "torch/lib/libtorch.so", "torch/bin/torch_shm_manager", "torch/testing/__init__.py"]
    removed = [
        "torch/bin/protoc",
        "torch/include/ATen.h",
        "numpy/tests/test_a.py",
        "torch/__pycache__/a.pyc",
        "bin/pip",
        "a/lib.a",
    ]
    for name in kept + removed:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    strip(tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == sorted(kept)


@pytest.mark.parametrize("name", PRODUCTS)
def test_image_sources_include_imported_packages(name: str) -> None:
    """Only module-level imports count: commands import optional packages in functions."""
    folders = {Path(source).name: REPOSITORY / source for source in PRODUCTS[name].sources}
    imported = {
        found
        for folder in folders.values()
        for path in folder.rglob("*.py")
        for found in re.findall(r"^(?:from|import) (trimtab_\w+)", path.read_text(), re.MULTILINE)
    }
    assert imported <= set(folders)


@pytest.mark.parametrize("name", PRODUCTS)
def test_image_sources_exist(name: str) -> None:
    assert all((REPOSITORY / source / "__init__.py").is_file() for source in PRODUCTS[name].sources)


def test_model_and_packages_are_built_in_parallel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each step waits for the others to start, so sequential steps would time out."""
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    meeting = threading.Barrier(3, timeout=30.0)

    def product(_: dict[str, str], product: images.Product, base: str, version: str) -> str:
        meeting.wait()
        return f"trimtab-{product.name}:{base}-{version}"

    monkeypatch.setattr(images, "_base_image", lambda _: "base")
    monkeypatch.setattr(images, "_python_version", lambda *_: "3.12")
    monkeypatch.setattr(images, "_product", product)
    monkeypatch.setattr("devtools.model.ensure", meeting.wait)
    monkeypatch.setattr(images, "_model", lambda _, engine: f"model on {engine}")
    monkeypatch.setattr("devtools.docker_cli.forget_old_tags", lambda *_, **__: None)
    assert images.ensure({}, ["operator", "model"]) == {
        "operator": "trimtab-operator:base-3.12",
        "model": "model on trimtab-engine:base-3.12",
    }
