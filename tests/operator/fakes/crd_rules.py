"""What an API server that knows CEL says of a resource by the CRD's rules, before any webhook is asked."""

from __future__ import annotations

from typing import Any

import cel
from trimtab_operator.resource.crd import definition


def schema() -> dict[str, Any]:
    """The CRD's schema."""
    found: dict[str, Any] = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def cel_rules() -> list[tuple[str, dict[str, str]]]:
    """Every CEL rule with the path of the object that it judges."""
    found: list[tuple[str, dict[str, str]]] = []

    def walk(node: dict[str, Any], path: str) -> None:
        found.extend((path, entry) for entry in node.get("x-kubernetes-validations", []))
        for name, child in node.get("properties", {}).items():
            walk(child, f"{path}.{name}" if path else name)

    walk(schema(), "")
    return found


def at_path(body: Any, path: str) -> Any:
    """What stands there; None where nothing does."""
    for part in path.split(".") if path else []:
        body = body.get(part) if isinstance(body, dict) else None
    return body


def cel_refusals(body: dict[str, Any], before: dict[str, Any] | None = None) -> list[str]:
    """What the CEL rules say that do not hold. Those that speak of the object before apply to updates alone."""
    said = []
    for path, entry in cel_rules():
        node, old = at_path(body, path), at_path(before, path)
        if node is None or ("oldSelf" in entry["rule"] and old is None):
            continue
        values = {"self": node} | ({} if old is None else {"oldSelf": old})
        if not cel.evaluate(entry["rule"], values):
            expression = entry.get("messageExpression")
            words = {**values, "format": _format}
            said.append(entry["message"] if expression is None else str(cel.evaluate(expression, words)))
    return said


def _format(pattern: str, texts: list[str]) -> str:
    """CEL's `format` of the strings library, which the evaluator lacks, for texts."""
    return pattern % tuple(texts)


def with_defaults(body: Any, node: dict[str, Any] | None = None) -> Any:
    """A resource as the API server has it when rules are judged: what is left out has the schema's default."""
    node = schema() if node is None else node
    if not isinstance(body, dict):
        return body
    filled = dict(body)
    for name, child in node.get("properties", {}).items():
        if name not in filled and "default" in child:
            filled[name] = child["default"]
        if name in filled:
            filled[name] = with_defaults(filled[name], child)
    return filled
