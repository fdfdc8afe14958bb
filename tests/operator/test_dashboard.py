"""The Grafana dashboard: generated, with exported metrics only, and shipped by the chart."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rendered_chart import HELM, NO_HELM, render
from trimtab_operator.reconcile.health import OperatorMetrics
from trimtab_router.metrics import RouterMetrics

REPOSITORY = Path(__file__).parents[2]
FILE = REPOSITORY / "charts" / "trimtab" / "files" / "dashboards" / "trimtab.json"
METRIC = re.compile(r"(?:vllm:|trimtab_)[a-z_]+")
SUFFIX = re.compile(r"_(total|bucket|sum|count)$")


def queries() -> list[str]:
    """Return all queries of the dashboard."""
    return [target["expr"] for panel in json.loads(FILE.read_text())["panels"] for target in panel["targets"]]


def exported_names() -> set[str]:
    """Return the names of operator and router as registered, and of engines as in the contract."""
    metrics = OperatorMetrics()
    metrics.conditions.set("n", "m", [{"type": "Ready", "status": "True", "reason": "Ready"}])
    registered = {family.name for family in metrics.registry.collect()}
    registered |= {family.name for family in RouterMetrics().registry.collect()} | {"trimtab_router_held_requests"}
    contract = (REPOSITORY / "docs" / "reference" / "contract.md").read_text()
    words = set(re.findall(r"(?:vllm:|trimtab_)?[a-z][a-z_]+", contract))
    engine = words | {f"vllm:{word}" for word in words} | {f"trimtab_{word}" for word in words}
    return registered | {SUFFIX.sub("", name) for name in engine}


def test_dashboard_file_is_up_to_date() -> None:
    command = [sys.executable, str(REPOSITORY / "hack" / "dashboards.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_dashboard_queries_only_exported_metrics() -> None:
    used = {SUFFIX.sub("", name) for query in queries() for name in METRIC.findall(query)}
    assert len(used) > 15
    assert used - exported_names() == set()


def test_panels_do_not_overlap() -> None:
    places = [tuple(panel["gridPos"].values()) for panel in json.loads(FILE.read_text())["panels"]]
    assert len(set(places)) == len(places)
    assert all(x + width <= 24 for x, _, width, _ in places)


@pytest.mark.skipif(HELM is None, reason=NO_HELM)
def test_chart_ships_the_dashboard_only_on_request() -> None:
    assert all(manifest["kind"] != "ConfigMap" for manifest in render())
    (config_map,) = [item for item in render("metrics.dashboard.enabled=true") if item["kind"] == "ConfigMap"]
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config_map["data"]["trimtab.json"]) == json.loads(FILE.read_text())
