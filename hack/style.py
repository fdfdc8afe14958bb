"""Counts of wording and naming habits that the style guide rules out. The counts may only fall.

    python hack/style.py             print the counts and the baseline
    python hack/style.py --check     fail if a count is above the baseline (make check)
    python hack/style.py --write     lower the baseline to the present counts
    python hack/style.py --list say  print every line that counts for one habit

Strings that users see (errors, Events, flag help) are not told apart: the guide is the same for all text.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINE = Path(__file__).with_name("style_baseline.json")
AREAS = {
    "code": ("modelspec", "router", "operator", "engine-image", "kernels", "simulator", "hack"),
    "tests": ("tests", "e2e"),
    "docs": ("docs", "charts", "config", "README.md", "CONTRIBUTING.md", "DEVELOPMENT.md", "SECURITY.md"),
}
SUFFIXES = {".py", ".md", ".c", ".h", ".yaml", ".tpl", ".txt"}
EXCLUDED = re.compile(r"docs/results/|docs/seeds/|hack/style\.py$")
HABITS = {
    "what-clause": r"\b[Ww]hat(?:ever)? (?:is|are|was|were|comes?|goes|runs?|has|have|it|they|stands?|lies?)\b",
    "who": r"\b(?:[Ww]ho|[Ww]hoever|[Ww]hom)\b",
    "nobody": r"\b(?:[Nn]obody|[Ss]omebody|[Ee]verybody|[Aa]nybody)\b",
    "say": r"\b(?:says?|said|unsaid)\b",
    "tell": r"\b(?:tells?|told|untold)\b",
    "ask": r"\b(?:asks?|asked)\b",
    "hear-ring": r"\b(?:hears?|heard|rings?|rang)\b",
    "beside-anew": r"\b(?:[Bb]eside|[Aa]new|[Aa]part from|right behind)\b",
    "stand-lie": r"\b(?:stands? (?:in|beside|there|still)|lies? (?:in|beside|there|on))\b",
    "none-colon": r"\bNone: [a-z]",
    "those-that": r"\b[Tt]hose (?:that|of|who|whose)\b",
    "of-ours": r"\b(?:ours|theirs|of ours)\b",
    "so-many": r"\bso (?:many|long|much) (?!as\b|that\b)",
    "promise-felt": r"\b(?:promises?|promised|foretold|foreseen|foresight)\b",
    "metaphor": (
        r"\b(?:hot knobs?|seats?|twin|stakes?|namesake|strangers?)\b"
        r"|\b(?:in the place of|for want of|mended|by hand|at hand)\b"
    ),
}
QUESTION = re.compile(r"(?:Whether|What|How|Who|Which|Where|Those|Of|When|Why)\b")
PRONOUN_TEST = re.compile(
    r"test_(?:it|what|who|whom|whose|one|those|while|of|with|where|which|they"
    r"|nobody|somebody|everybody|whoever|whatever)_"
)
MAX_TEST_NAME = 75  # characters


def files(area: str) -> Iterator[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *AREAS[area]]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        path = ROOT / name
        if path.suffix in SUFFIXES and not EXCLUDED.search(name) and path.is_file():
            yield path


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of comments and strings; of other files than Python every line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def names(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (habit, line, text) of docstrings and test names."""
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and QUESTION.match(docstring):
                yield "question-docstring", getattr(node, "lineno", 1), docstring.splitlines()[0]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            if PRONOUN_TEST.match(node.name):
                yield "test-pronoun", node.lineno, node.name
            if len(node.name) > MAX_TEST_NAME:
                yield "test-name-length", node.lineno, node.name


def findings(area: str) -> Iterator[tuple[str, Path, int, str]]:
    patterns = {habit: re.compile(pattern) for habit, pattern in HABITS.items()}
    for path in files(area):
        for line, text in prose(path):
            for habit, pattern in patterns.items():
                for _ in pattern.finditer(text):
                    yield habit, path, line, text.strip()
        for habit, line, text in names(path):
            yield habit, path, line, text


def counts() -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for area in AREAS:
        found[area].update(habit for habit, *_ in findings(area))
    return {area: dict(sorted(found[area].items())) for area in AREAS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a count is above the baseline")
    parser.add_argument("--write", action="store_true", help="write the present counts as the baseline")
    parser.add_argument("--list", metavar="HABIT", help="print every line that counts for this habit")
    arguments = parser.parse_args()
    if arguments.list:
        for area in AREAS:
            for habit, path, line, text in findings(area):
                if habit == arguments.list:
                    print(f"{path.relative_to(ROOT)}:{line}: {text[:160]}")
        return 0
    found = counts()
    if arguments.write:
        BASELINE.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    baseline: dict[str, dict[str, int]] = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    risen = []
    for area, habits in found.items():
        for habit, count in habits.items():
            allowed = baseline.get(area, {}).get(habit, 0)
            if count > allowed:
                risen.append(f"{area}: {habit}: {count}, allowed {allowed}; python hack/style.py --list {habit}")
            if not arguments.check:
                print(f"{area:6} {habit:20} {count:5} (baseline {allowed})")
    if arguments.check and risen:
        print(
            "hack/style.py: these habits became more frequent (see CONTRIBUTING.md):",
            *risen,
            sep="\n  ",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
