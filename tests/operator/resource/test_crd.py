"""The CRD: one source, structural, bounded, described."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crd_rules import cel_rules
from trimtab_operator.resource.crd import definition, render

ROOT = Path(__file__).parents[3]
VERSION: dict[str, Any] = definition()["spec"]["versions"][0]


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if isinstance(node.get("items"), dict):
        yield from nodes(node["items"], f"{path}[]")


ALL = list(nodes(VERSION["schema"]["openAPIV3Schema"]))


def test_the_file_is_what_the_sources_make() -> None:
    assert (ROOT / "crds/trimtab.dev_inferencedeployments.yaml").read_text(encoding="utf-8") == render()


def test_every_field_is_described() -> None:
    """All but metadata: the API server forbids a CRD to say anything about it beyond its type."""
    described = [path for path, node in ALL if not path.endswith("[]") and not node.get("description")]
    assert described == [".metadata"]


def test_every_number_is_bounded() -> None:
    spec = [(path, node) for path, node in ALL if path.startswith(".spec")]
    unbounded = [p for p, n in spec if n.get("type") == "integer" and "enum" not in n and "maximum" not in n]
    assert unbounded == []


def test_every_string_and_list_is_bounded() -> None:
    strings = [p for p, n in ALL if n.get("type") == "string" and p not in (".apiVersion", ".kind")]
    bounded = {p for p, n in ALL if "maxLength" in n or "enum" in n or n.get("format") == "date-time"}
    assert [p for p in strings if p not in bounded] == []
    assert [p for p, n in ALL if n.get("type") == "array" and "maxItems" not in n] == []


@pytest.mark.parametrize("words", [rule["messageExpression"] for _, rule in cel_rules() if "messageExpression" in rule])
def test_an_api_server_can_foresee_what_a_message_costs(words: str) -> None:
    """It refuses a CRD with a text of no bound in a `+`, such as `string(number)`; it asks `format` for none."""
    assert re.fullmatch(r"'[^'\n]+'\.format\(\[string\([^\n]+\)\]\)", words)
    assert words.split("'")[1].count("%s") == words.count("string(")


def test_the_schema_is_structural() -> None:
    for path, node in ALL:
        assert "$ref" not in node, path
        assert "anyOf" not in node, path
        assert "title" not in node, path
        assert "type" in node or "x-kubernetes-int-or-string" in node, path


def test_scale_can_be_read_when_nobody_wrote_replicas() -> None:
    """The API server answers a GET of /scale with an error where specReplicasPath leads to nothing."""
    assert VERSION["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["replicas"]["default"] == 1


def test_scale_has_all_three_paths() -> None:
    assert VERSION["subresources"]["scale"] == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }


def test_names_are_what_users_type() -> None:
    names = definition()["spec"]["names"]
    assert names["shortNames"] == ["infd"]
    assert names["categories"] == ["all", "trimtab"]
