"""Write docs/adr/README.md, the index of the architecture decision records, or verify it with --check."""

import re
import sys
from pathlib import Path

INDEX = Path(__file__).parents[1] / "docs" / "adr" / "README.md"
AREAS = ("operator", "tuner", "engine", "kernels", "router", "simulator", "cli", "chart", "e2e")
SECTIONS = ["Context", "Decision", "Alternatives considered", "Consequences"]
RECORD = re.compile(
    r"# ADR-(?P<number>\d{4}): (?P<title>.+)\n\n- Date: (?P<date>\d{4}-\d\d-\d\d)\n"
    rf"- Status: (?P<status>Accepted|Superseded by ADR-\d{{4}})\n- Area: (?P<area>{'|'.join(AREAS)})\n"
)
INTRODUCTION = f"""\
# Architecture decision records

Each record states one decision, the alternatives that were rejected, and the consequences. Code and documentation refer
to records by number (`ADR-0034`). `python hack/adr_index.py` generates this page.

To add a record, copy this template to `docs/adr/NNNN-imperative-title.md` and run the command.
Areas: {", ".join(AREAS)}. Set the
status of a replaced record to `Superseded by ADR-NNNN`.

```markdown
# ADR-NNNN: Imperative title in the terms that readers search for

- Date: YYYY-MM-DD
- Status: Accepted
- Area: operator

{"".join(f"## {name}{chr(10) * 2}" for name in SECTIONS).rstrip()}
```
"""


def parse_record(path: Path) -> dict[str, str]:
    """Return the header fields of a record. Exit with an error message if it does not follow the template."""
    header = RECORD.match(path.read_text())
    if not header or header["number"] != path.name[:4] or re.findall(r"^## (.+)$", path.read_text(), re.M) != SECTIONS:
        sys.exit(f"docs/adr/{path.name}: header or sections differ from the template; see docs/adr/README.md")
    return {**header.groupdict(), "file": path.name}


def build_index() -> str:
    """Return the text of the index page. Exit with an error message if record numbers have gaps or duplicates."""
    records = [parse_record(path) for path in sorted(INDEX.parent.glob("[0-9]*.md"))]
    if [int(record["number"]) for record in records] != list(range(1, len(records) + 1)):
        sys.exit("docs/adr: record numbers must be consecutive and unique; renumber the new record")
    page, row = INTRODUCTION, "| {number} | [{title}]({file}) | {status} | {date} |\n"
    for area in AREAS:
        if rows := [row.format(**record) for record in records if record["area"] == area]:
            page += f"\n## {area}\n\n| ADR | Title | Status | Date |\n| --- | --- | --- | --- |\n" + "".join(rows)
    return page


if __name__ == "__main__":
    if "--check" not in sys.argv:
        INDEX.write_text(build_index())
    elif not INDEX.exists() or INDEX.read_text() != build_index():
        sys.exit("docs/adr/README.md: out of date; run: python hack/adr_index.py")
