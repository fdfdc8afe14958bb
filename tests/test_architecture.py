"""docs/internals/architecture.md is true of the tree: its paths exist, and its rooms stand in the order of the
contracts."""

import re
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "docs/internals/architecture.md").read_text()
PACKAGES = {
    "the engine": REPOSITORY / "engine-image/trimtab_engine",
    "the operator": REPOSITORY / "operator/trimtab_operator",
    "the simulator": REPOSITORY / "simulator/trimtab_simulator",
}
ROOTS = (REPOSITORY, *PACKAGES.values(), REPOSITORY / "kernels/trimtab_kernels", REPOSITORY / "docs")


def section(title: str) -> str:
    """The text under a heading."""
    return PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def first_cells(text: str) -> list[str]:
    """What stands in backticks in the first cell of each row of a table."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name.strip("/").removesuffix(".py") for row in rows for name in re.findall(r"`([^`]+)`", row)]


def layers(container: str) -> list[list[str]]:
    """The rooms of a package from the top down, as import-linter holds them; neighbours in one list."""
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = (c for c in contracts if c["type"] == "layers" and c.get("containers") == [container])
    return [[room.strip() for room in layer.split("|")] for layer in found["layers"]]


@pytest.mark.parametrize("what", PACKAGES)
def test_every_room_that_is_named_is_there(what: str) -> None:
    missing = [
        name
        for name in first_cells(section(f"Where things are: {what}"))
        if not (PACKAGES[what] / name).is_dir() and not (PACKAGES[what] / f"{name}.py").is_file()
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("what", "container"), [("the engine", "trimtab_engine"), ("the operator", "trimtab_operator")]
)
def test_rooms_stand_in_the_order_that_their_imports_have(what: str, container: str) -> None:
    place = {room: number for number, rooms in enumerate(layers(container)) for room in rooms}
    told = [name for name in first_cells(section(f"Where things are: {what}")) if name in place]
    assert set(told) >= set(place) - {"errors"}
    assert [place[name] for name in told] == sorted(place[name] for name in told)


def test_every_path_with_a_folder_exists() -> None:
    named = {name for name in re.findall(r"`([\w.-]+/[\w./-]+)`", PAGE) if "NAME" not in name and name[0] != "/"}
    assert len(named) > 60
    missing = [name for name in sorted(named) if not any((root / name).exists() for root in ROOTS)]
    assert [name for name in missing if "FAMILY" not in name] == []


@pytest.mark.parametrize("what", ["the engine", "the operator"])
def test_every_file_that_a_room_is_said_to_have_is_there(what: str) -> None:
    items = re.findall(r"^- (.+?)(?=^- |^$)", section(f"Where things are: {what}"), flags=re.MULTILINE | re.DOTALL)
    assert len(items) >= 5
    missing = []
    for item in items:
        folders = [PACKAGES[what] / room for room in re.findall(r"`([\w/]+)/`", item)] + [PACKAGES[what]]
        folders += [inner for folder in folders[:-1] for inner in folder.glob("*/")]
        names = re.findall(r"`([\w/]+\.py)`", item)
        missing += [name for name in names if not any((folder / name).is_file() for folder in folders)]
    assert missing == []
