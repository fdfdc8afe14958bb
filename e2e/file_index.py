"""The last section of docs/architecture.md, made from the modules themselves: `make map` writes it."""

import ast
import re
import textwrap
from itertools import groupby
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs/architecture.md"
PACKAGES = (
    "engine-image/trimtab_engine",
    "kernels/trimtab_kernels",
    "operator/trimtab_operator",
    "operator/trimtab_simulator",
)
HEADING = "## Every file\n"
PREAMBLE = "What each module says of itself first. `make map` writes this section.\n"
WIDTH = 119


def written(page: str, index: str) -> str:
    """The page with this index as its last section."""
    return page.partition(HEADING)[0].rstrip("\n") + f"\n\n{HEADING}\n{index}"


def index(repository: Path) -> str:
    """A list per folder, folded away until somebody opens it."""
    modules = [
        module
        for package in PACKAGES
        for module in sorted((repository / package).rglob("*.py"), key=lambda path: (path.parent, path.name))
        if module.name != "__init__.py"
    ]
    lists = []
    for folder, inside in groupby(modules, key=lambda path: path.parent):
        name = folder.relative_to(repository).as_posix()
        entries = "\n".join(_entry(module) for module in inside)
        lists.append(f"<details><summary><code>{name}/</code></summary>\n\n{entries}\n</details>\n")
    return "\n".join((PREAMBLE, *lists))


def _entry(module: Path) -> str:
    text = f"- `{module.name}`: {first_sentence(ast.get_docstring(ast.parse(module.read_text())) or '')}"
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def first_sentence(docstring: str) -> str:
    """Up to the first full stop behind which something new begins; all of the first paragraph where there is none."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[^.][.])\s+(?=[A-Z`])", paragraph)[0].rstrip(".:")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), index(REPOSITORY)))
