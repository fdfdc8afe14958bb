"""Keep the version in one place: the VERSION file.

    python3 hack/version.py --check   fail if the chart or the changelog disagrees with VERSION
    python3 hack/version.py 0.2.0     write VERSION and the chart's version and appVersion

pyproject.toml reads VERSION when the package is built, and the chart's image tags default to appVersion.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
VERSION = REPOSITORY / "VERSION"
CHART = REPOSITORY / "charts" / "trimtab" / "Chart.yaml"
CHANGELOG = REPOSITORY / "CHANGELOG.md"
CHART_FIELD = re.compile(r"^(version|appVersion): *(\S+)$", re.MULTILINE)
SEMANTIC_VERSION = re.compile(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?")


def differences(version: str, chart: str, changelog: str) -> list[str]:
    """Return an error for each place that disagrees with `version`."""
    errors = []
    if not SEMANTIC_VERSION.fullmatch(version):
        errors.append(f"VERSION: not a semantic version ({version!r}); write MAJOR.MINOR.PATCH")
    fields = dict(CHART_FIELD.findall(chart))
    for name in ("version", "appVersion"):
        if fields.get(name) != version:
            errors.append(
                f"{CHART.name} {name}: {fields.get(name)} instead of {version}; run hack/version.py {version}"
            )
    if f"\n## [{version}]" not in changelog:
        errors.append(f"CHANGELOG.md: no section '## [{version}]'; rename or add it")
    return errors


def set_version(version: str) -> None:
    """Write `version` to VERSION and to both fields of the chart."""
    VERSION.write_text(f"{version}\n")
    CHART.write_text(CHART_FIELD.sub(rf"\g<1>: {version}", CHART.read_text()))


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 2
    if arguments[0] != "--check":
        if not SEMANTIC_VERSION.fullmatch(arguments[0]):
            print(f"version: not a semantic version ({arguments[0]}); write MAJOR.MINOR.PATCH", file=sys.stderr)
            return 2
        set_version(arguments[0])
        return 0
    errors = differences(VERSION.read_text().strip(), CHART.read_text(), CHANGELOG.read_text())
    print("\n".join(errors), end="\n" if errors else "", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
