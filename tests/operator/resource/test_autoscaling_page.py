"""Examples of the autoscaling page: resources are valid, and autoscalers select them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from trimtab_operator.planning.admission import validation_messages
from trimtab_operator.resource.spec import GROUP, KIND, VERSION

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "autoscaling.md"
SHOWN: list[dict[str, Any]] = [
    yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
]


def of(kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in SHOWN if manifest["kind"] == kind]


def test_the_page_shows_each_of_the_three() -> None:
    assert [manifest["kind"] for manifest in SHOWN] == [KIND, "HorizontalPodAutoscaler", "ScaledObject"]


@pytest.mark.parametrize("manifest", of(KIND))
def test_its_resources_are_accepted(manifest: dict[str, Any]) -> None:
    assert validation_messages(manifest, default_image="engine:1") == []


@pytest.mark.parametrize("manifest", [*of("HorizontalPodAutoscaler"), *of("ScaledObject")])
def test_its_autoscalers_write_to_scale_of_such_a_resource(manifest: dict[str, Any]) -> None:
    target = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": of(KIND)[0]["metadata"]["name"]}
    assert manifest["spec"]["scaleTargetRef"] == target


@pytest.mark.parametrize("manifest", of("HorizontalPodAutoscaler"))
def test_metric_of_the_hpa_is_a_valid_path_segment(manifest: dict[str, Any]) -> None:
    names = [metric["pods"]["metric"]["name"] for metric in manifest["spec"]["metrics"]]
    assert [name for name in names if not re.fullmatch(r"vllm_[a-z_]+", name)] == []
