"""Pages are read in terminals and in diffs: no line of prose is longer than a screen is wide."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
WIDTH = 120
MADE_BY_PROGRAMS = "results"
FENCE = re.compile(r"\s*(```|~~~)")
TABLE_OR_LINK = re.compile(r"\s*(\||\[[^\]]+\]:|!?\[[^\]]*\]\([^)]*\)$|<)")


def pages() -> list[Path]:
    return sorted(
        path.relative_to(REPOSITORY)
        for folder in ("docs", "kernels", ".")
        for path in (REPOSITORY / folder).glob("**/*.md" if folder == "docs" else "*.md")
        if MADE_BY_PROGRAMS not in path.parts
    )


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines that are neither code nor tables, which cannot be broken."""
    in_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if FENCE.match(line):
            in_code = not in_code
        elif not in_code and not TABLE_OR_LINK.match(line):
            yield number, line


@pytest.mark.parametrize("page", pages(), ids=str)
def test_no_line_of_prose_is_longer_than_a_screen_is_wide(page: Path) -> None:
    long = [number for number, line in prose((REPOSITORY / page).read_text()) if len(line) > WIDTH]
    assert long == [], f"{page}: lines {long} have more than {WIDTH} characters"


def test_there_are_pages() -> None:
    assert len(pages()) > 40
