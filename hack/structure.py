"""Print figures about the size and structure of the packages: python hack/structure.py [CHECKOUT]."""

from __future__ import annotations

import ast
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOTS = ("modelspec", "router", "operator", "engine-image", "kernels", "simulator")
SMALL_FILE_LINES = 60
LONG_FUNCTION_LINES = 40


def modules(checkout: Path) -> Iterator[tuple[str, Path]]:
    for root in ROOTS:
        for path in sorted((checkout / root).rglob("*.py")):
            parts = path.relative_to(checkout / root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(name: str, tree: ast.Module, known: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return (found & known) - {name}


def cycles(graph: dict[str, set[str]]) -> int:
    """Return how many nodes can reach themselves."""

    def reaches(start: str) -> bool:
        seen, todo = set(), list(graph[start])
        while todo:
            node = todo.pop()
            if node == start:
                return True
            if node not in seen:
                seen.add(node)
                todo += graph.get(node, ())
        return False

    return sum(reaches(node) for node in list(graph))


def main() -> int:
    checkout = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    files = dict(modules(checkout))
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}
    lines = {name: path.read_text(encoding="utf-8").count("\n") for name, path in files.items()}
    importers: dict[str, set[str]] = defaultdict(set)
    folders: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        for other in imports(name, tree, set(files)):
            importers[other].add(name)
            here, there = (".".join(one.split(".")[:2]) for one in (name, other))
            if here != there:
                folders[here].add(there)
    functions = sorted(
        (node.end_lineno or 0) - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    single = [name for name in files if len(importers[name]) == 1]
    rows = {
        "modules": len(files),
        "lines": sum(lines.values()),
        "functions": len(functions),
        "function lines, median": round(statistics.median(functions)),
        "function lines, 95th percentile": functions[int(len(functions) * 0.95)],
        f"functions over {LONG_FUNCTION_LINES} lines": sum(size > LONG_FUNCTION_LINES for size in functions),
        "modules with one importer": len(single),
        f"of these up to {SMALL_FILE_LINES} lines": sum(lines[name] <= SMALL_FILE_LINES for name in single),
        "folders in an import cycle": cycles(dict(folders)),
    }
    for label, count in rows.items():
        print(f"{label:36}{count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
