"""docs/internals/architecture.md matches the tree: its paths exist, and its packages are in the order of the layers."""

import re
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "docs/internals/architecture.md").read_text()
PACKAGES = {
    "Engine packages": REPOSITORY / "engine-image/trimtab_engine",
    "Operator packages": REPOSITORY / "operator/trimtab_operator",
    "Router packages": REPOSITORY / "router/trimtab_router",
    "Simulator packages": REPOSITORY / "simulator/trimtab_simulator",
}
ROOTS = (REPOSITORY, *PACKAGES.values(), REPOSITORY / "kernels/trimtab_kernels")


def table_of(title: str) -> list[str]:
    """Return the packages in the first table of a section, without slash and suffix."""
    text = PAGE.split(f"## {title}\n", 1)[1].partition("\n#")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name.strip("/").removesuffix(".py") for row in rows for name in re.findall(r"`([^`]+)`", row)]


def layers_of(container: str) -> list[list[str]]:
    """Return the layers of a package from top to bottom, as import-linter enforces them."""
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = (c for c in contracts if c["type"] == "layers" and c.get("containers") == [container])
    return [[package.strip() for package in layer.split("|")] for layer in found["layers"]]


@pytest.mark.parametrize("title", PACKAGES)
def test_listed_packages_exist(title: str) -> None:
    folder = PACKAGES[title]
    missing = [n for n in table_of(title) if not (folder / n).is_dir() and not (folder / f"{n}.py").is_file()]
    assert missing == []


@pytest.mark.parametrize(
    ("title", "container"), [("Engine packages", "trimtab_engine"), ("Operator packages", "trimtab_operator")]
)
def test_listed_packages_follow_import_layers(title: str, container: str) -> None:
    place = {package: number for number, packages in enumerate(layers_of(container)) for package in packages}
    listed = [name for name in table_of(title) if name in place]
    assert set(listed) >= set(place) - {"errors"}
    assert [place[name] for name in listed] == sorted(place[name] for name in listed)


def test_named_paths_exist() -> None:
    named = {name for name in re.findall(r"`([\w.-]+/[\w./-]*)`", PAGE) if "NAME" not in name and name[0] != "/"}
    assert len(named) > 150
    assert [name for name in sorted(named) if not any((root / name).exists() for root in ROOTS)] == []


@pytest.mark.parametrize("title", ["Operator packages", "Engine packages"])
def test_large_modules_are_named(title: str) -> None:
    """Folders that are left out have single-purpose files, or a page of their own."""
    folder = PACKAGES[title]
    left_out = ("flags/", "bench/", "models/", "multimodal/", "messages/", "board/", "tuner/")
    modules = [path for path in folder.rglob("*.py") if len(path.read_text().splitlines()) >= 180]
    names = [str(path.relative_to(folder)) for path in modules]
    listed = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    folders = {name for name in re.findall(r"`([\w/]+/)`", PAGE) if name.count("/") > 1}
    missing = [
        name
        for name in sorted(names)
        if name not in listed and not name.startswith(left_out) and not any(name.startswith(f) for f in folders)
    ]
    assert missing == []
