"""The CustomResourceDefinition, generated from `spec.py` and `status_schema.py`.

`python -m trimtab_operator.resource.crd --write` writes crds/, `--check` fails if the file differs. Kubernetes
requires a *structural* schema: no `$ref`, no `anyOf` of types, no titles. Pydantic's JSON schema is flattened.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from trimtab_operator.resource.spec import (
    CLASS_IMMUTABLE,
    DEADLINE_WITHOUT_TARGET,
    GROUP,
    KIND,
    MAX_NAME_LENGTH,
    PLURAL,
    REPLICAS_IGNORED,
    VERSION,
    ZERO_WITHOUT_ROUTER,
    Spec,
    cel,
)
from trimtab_operator.resource.status_schema import Status

DEFAULT_PATH = Path("crds") / f"{GROUP}_{PLURAL}.yaml"
HEADER = "# Written by `python -m trimtab_operator.resource.crd --write` from resource/spec.py: change it there.\n"
MAX_MAP_ENTRIES = 64  # of labels, selectors, annotations: bounds the cost of CEL rules
MAX_VALUE_LENGTH = 1024  # of the strings in such maps
MAX_FREE_LIST = 128  # items of a list without a bound

SPEC_RULES = [
    cel(
        "has(self.class) ? has(oldSelf.class) && self.class == oldSelf.class : !has(oldSelf.class)",
        f"spec.class: {CLASS_IMMUTABLE}",
    ),
    cel(  # 1 is the default: the field may be removed
        "!has(self.scaling) || !has(oldSelf.scaling) || !has(oldSelf.replicas) || self.replicas == oldSelf.replicas || "
        "self.replicas == 1",
        f"spec.replicas: {REPLICAS_IGNORED}",
    ),
    cel(
        "!has(self.parallelism) || !has(self.parallelism.expert) || !self.parallelism.expert || "
        "(has(self.parallelism.tensor) && self.parallelism.tensor > 1) || "
        "(has(self.parallelism.data) && self.parallelism.data > 1)",
        "spec.parallelism.expert: is true, but tensor × data is 1, and experts are distributed over those ranks; raise "
        "tensor or data, or set it to false",
    ),
    cel(
        "!has(self.engine) || !has(self.engine.maxNumSeqs) || !has(self.engine.maxNumBatchedTokens) || "
        "self.engine.maxNumSeqs <= self.engine.maxNumBatchedTokens",
        "engine.maxNumBatchedTokens must be at least engine.maxNumSeqs, as every running request needs one token per "
        "step",
        "spec.engine.maxNumBatchedTokens: maxNumBatchedTokens (%s) must be at least maxNumSeqs (%s), as every running "
        "request needs one token per step; raise maxNumBatchedTokens or lower maxNumSeqs",
        "self.engine.maxNumBatchedTokens",
        "self.engine.maxNumSeqs",
    ),
    cel(
        "!has(self.engine) || !has(self.engine.schedulingPolicy) || self.engine.schedulingPolicy != 'deadline' || "
        "(has(self.objectives) && has(self.objectives.ttft))",
        f"spec.engine.schedulingPolicy: {DEADLINE_WITHOUT_TARGET}",
    ),
    cel(
        "!has(self.scaling) || !has(self.scaling.minReplicas) || self.scaling.minReplicas > 0 || "
        "(has(self.router) && (!has(self.router.enabled) || self.router.enabled))",
        f"spec.scaling.minReplicas: {ZERO_WITHOUT_ROUTER}",
    ),
]
ROOT_RULES = [
    cel(
        f"self.metadata.name.size() <= {MAX_NAME_LENGTH}",
        f"the name must not exceed {MAX_NAME_LENGTH} characters: names of pods and Services are derived from it",
        f"metadata.name: has %s characters; use at most {MAX_NAME_LENGTH}: names of pods and Services are derived from "
        "it",
        "self.metadata.name.size()",
    )
]
PRINTER_COLUMNS = [
    ("Model", "string", ".status.model", 0, "Name that clients send as `model`."),
    ("Ready", "string", ".status.ready", 0, "Ready and desired replicas."),
    ("Desired", "integer", ".status.desiredReplicas", 0, "Desired replicas."),
    ("Phase", "string", ".status.phase", 0, "Reason of the Ready condition."),
    ("Tuning", "string", ".status.tuning.mode", 0, "Tuning mode."),
    ("Load", "string", ".status.groups[*].load.percent", 1, "Load progress of the replicas, in percent."),
    ("Loading", "string", ".status.groups[*].load.message", 1, "Progress and remaining time of downloads."),
    ("URL", "string", ".status.url", 1, "Base URL of the OpenAI-compatible API."),
    ("Age", "date", ".metadata.creationTimestamp", 0, "Time since creation."),
]


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """Return the structural schema of a model, as Kubernetes requires it."""
    document = model.model_json_schema(by_alias=True, mode="validation")
    return _flatten(document, document.get("$defs", {}))


def _flatten(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    node = dict(node)
    for reference in (node.pop("$ref", None), *(part.get("$ref") for part in node.pop("allOf", []))):
        if reference:
            target = definitions[reference.rsplit("/", 1)[1]]
            node = {**_flatten(target, definitions), **{k: v for k, v in node.items() if k != "title"}}
    if "anyOf" in node:
        node = _any_of(node, definitions)
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if "enum" in node and "type" not in node:
        node["type"] = "string" if isinstance(node["enum"][0], str) else "integer"
    for key in ("title", "$defs", "additionalProperties" if node.get("additionalProperties") is False else "title"):
        node.pop(key, None)
    if node.get("default") in (None, {}, [], ()):
        node.pop("default", None)
    elif isinstance(node.get("default"), dict):
        node.pop("default")  # defaults are set at the leaves only, so that a user's object keeps its shape
    return _children(node, definitions)


def _any_of(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Convert `X | None` to X, and `int | str` to Kubernetes' int-or-string."""
    choices = [choice for choice in node.pop("anyOf") if choice.get("type") != "null"]
    if {choice.get("type") for choice in choices} == {"integer", "string"}:
        return {**node, "x-kubernetes-int-or-string": True}
    (choice,) = choices
    return {**_flatten(choice, definitions), **node}


def _children(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    if "properties" in node:
        node["properties"] = {name: _flatten(child, definitions) for name, child in node["properties"].items()}
    if isinstance(node.get("items"), dict):
        node["items"] = _flatten(node["items"], definitions)
        node.setdefault("maxItems", MAX_FREE_LIST)
        if node["items"].get("type") == "object" and not node["items"].get("properties"):
            node["items"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
            node.pop("x-kubernetes-preserve-unknown-fields", None)
    extra = node.get("additionalProperties")
    if isinstance(extra, dict):
        node["additionalProperties"] = _flatten(extra, definitions)
        if extra.get("type") == "string":
            node["additionalProperties"].setdefault("maxLength", MAX_VALUE_LENGTH)
        node.setdefault("maxProperties", MAX_MAP_ENTRIES)
        if extra.get("type") == "integer":
            node["additionalProperties"].update(minimum=0, maximum=1_000_000)
    if extra is True:
        node.pop("additionalProperties")
        node["x-kubernetes-preserve-unknown-fields"] = True
    return node


def definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition."""
    spec = {**structural(Spec), "x-kubernetes-validations": SPEC_RULES}
    status = structural(Status)
    root = {
        "type": "object",
        "description": "Runs a large language model and tunes it: replicas, layout and live engine parameters.",
        "required": ["spec"],
        "x-kubernetes-validations": ROOT_RULES,
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this schema: trimtab.dev/v1alpha1."},
            "kind": {"type": "string", "description": "Always InferenceDeployment."},
            "metadata": {"type": "object"},  # the API server allows no other key here, not even a description
            "spec": spec,
            "status": status,
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}", "labels": {"app.kubernetes.io/part-of": "trimtab"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["infd"],
                "categories": ["all", "trimtab"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": root},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": [_column(*column) for column in PRINTER_COLUMNS],
                }
            ],
        },
    }


def _column(name: str, kind: str, path: str, priority: int, description: str) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return {**column, "priority": priority} if priority else column


class _Plain(yaml.SafeDumper):
    """YAML dumper without anchors, because the same rule may occur twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def render() -> str:
    """Return the text of the CRD file; deterministic."""
    return HEADER + yaml.dump(definition(), Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the file. Return 1 if it differs, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m trimtab_operator.resource.crd", description="Generate the CRD from spec.py."
    )
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--check", action="store_true", help="fail if the file differs from the sources")
    chosen.add_argument("--write", action="store_true", help="write the file")
    parser.add_argument("--path", type=Path, default=DEFAULT_PATH, help=f"path of the file (default {DEFAULT_PATH})")
    options = parser.parse_args(arguments)
    wanted = render()
    if options.write:
        options.path.parent.mkdir(parents=True, exist_ok=True)
        options.path.write_text(wanted, encoding="utf-8")
        return 0
    if options.path.exists() and options.path.read_text(encoding="utf-8") == wanted:
        return 0
    print(
        f"{options.path} differs from spec.py; run `python -m trimtab_operator.resource.crd --write`", file=sys.stderr
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
