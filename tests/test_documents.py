"""Prose lines of documentation pages have at most 120 characters, to be readable in terminals and diffs."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
WIDTH = 120
GENERATED_FOLDER = "results"
FENCE = re.compile(r"\s*(```|~~~)")
TABLE_OR_LINK = re.compile(r"\s*(\||\[[^\]]+\]:|!?\[[^\]]*\]\([^)]*\)$|<)")


def pages() -> list[Path]:
    return sorted(
        path.relative_to(REPOSITORY)
        for folder in ("docs", "kernels", ".")
        for path in (REPOSITORY / folder).glob("**/*.md" if folder == "docs" else "*.md")
        if GENERATED_FOLDER not in path.parts
    )


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines except code and tables, which cannot be wrapped."""
    in_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if FENCE.match(line):
            in_code = not in_code
        elif not in_code and not TABLE_OR_LINK.match(line):
            yield number, line


@pytest.mark.parametrize("page", pages(), ids=str)
def test_prose_lines_are_not_too_long(page: Path) -> None:
    long = [number for number, line in prose((REPOSITORY / page).read_text()) if len(line) > WIDTH]
    assert long == [], f"{page}: lines {long} have more than {WIDTH} characters"


def test_pages_are_found() -> None:
    assert len(pages()) > 40


def test_engine_faults_page_names_tests_and_counts_rows() -> None:
    page = (REPOSITORY / "docs" / "results" / "engine-faults.md").read_text()
    for path, test in re.findall(r"`([\w/]+\.py)::(test_\w+)`", page):
        source = (REPOSITORY / "tests" / path).read_text()
        assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), f"{path}::{test}"
    verdicts = re.findall(r"^\| .* \| (?:none|`[\w/]+\.py::test_\w+`) \| (yes|no) \|$", page, re.MULTILINE)
    assert f"| all | {len(verdicts)} | {verdicts.count('yes')} | {verdicts.count('no')} |" in page
    assert page.count("\n- **") == verdicts.count("no")  # each has its reason
