"""Dockerfiles and docker-bake.hcl agree, run as a user without privileges, and get every source of the wheel."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BAKE_FILE = (REPOSITORY / "docker-bake.hcl").read_text()
DOCKERFILES = sorted((REPOSITORY / "images").glob("*/Dockerfile"))
CONTEXT = [line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")]


def instructions(path: Path) -> list[str]:
    """Return the instructions of a Dockerfile, continuation lines joined, comments dropped."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return [line for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines() if line]


def test_every_dockerfile_is_a_bake_target() -> None:
    named = re.findall(r'dockerfile = "([^"]+)"', BAKE_FILE)
    assert sorted(named) == [str(path.relative_to(REPOSITORY)) for path in DOCKERFILES]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_image_runs_without_privileges(path: Path) -> None:
    lines = instructions(path)
    assert lines.index("USER 65532:65532") > max(index for index, line in enumerate(lines) if line.startswith("RUN"))
    assert lines[-1].startswith("ENTRYPOINT [")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_image_has_labels_and_is_checked(path: Path) -> None:
    text = path.read_text()
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in text
    last_run = [line for line in instructions(path) if line.startswith("RUN")][-1]
    assert "--version" in last_run


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_copied_files_are_in_the_build_context(path: Path) -> None:
    copied = [line.split()[1:-1] for line in instructions(path) if line.startswith("COPY") and "--from" not in line]
    for source in (source for sources in copied for source in sources if source != "."):
        assert source in CONTEXT
        assert (REPOSITORY / source).exists()


def test_build_context_has_every_source_folder() -> None:
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert set(pyproject["tool"]["setuptools"]["packages"]["find"]["where"]) <= set(CONTEXT)
    assert {"VERSION", "README.md", "LICENSE", "setup.py", "pyproject.toml"} <= set(CONTEXT)


def test_cuda_image_has_the_measured_torch_and_triton() -> None:
    measured = re.search(r"torch (\S+)\+cu\d+, triton ([\d.]+),", (REPOSITORY / "docs/results/gpu.md").read_text())
    assert measured is not None
    lines = instructions(REPOSITORY / "images" / "engine-cuda" / "Dockerfile")
    assert {f"ARG TORCH={measured[1]}", f"ARG TRITON={measured[2]}"} <= set(lines)


@pytest.mark.parametrize(("gpu", "tag", "group"), [("", "-cpu", "default"), ("1", "", "all")])
def test_make_images_with_registry_prints_the_helm_command(gpu: str, tag: str, group: str) -> None:
    command = ["make", "--dry-run", "images", "REGISTRY=r.example/t", f"GPU={gpu}", "PUSH=1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=240)
    version = (REPOSITORY / "VERSION").read_text().strip()
    assert re.search(rf"docker buildx bake --push\s+{group}", done.stdout)
    assert f"--set engine.image.tag={version}{tag}" in done.stdout
    assert not re.search(r"(e2e|hack)/\w+ images", done.stdout)


def test_make_images_without_registry_builds_for_a_local_cluster() -> None:
    command = ["make", "--dry-run", "images", "REGISTRY="]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=240)
    assert re.search(r"(e2e|hack)/\w+ images", done.stdout)
    assert "buildx" not in done.stdout
