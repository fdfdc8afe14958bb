"""The pages for operators match the code: alerts have runbooks, reasons exist, every page is in the navigation."""

import re
from pathlib import Path

import pytest
import yaml
from operator_builders import a_spec
from trimtab_operator.builders.monitoring import prometheus_rule
from trimtab_operator.report.conditions import Reason
from trimtab_operator.resource.installation import Alerts
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.tuner.moves import Reason as TunerReason

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
EVENTS = {"PatchRejected", "ReplicasIgnored", "SurgeUnschedulable"}
OBJECTIVES = {"ttft": {"target": "500ms"}, "itl": {"target": "50ms", "kind": "Tokens"}}


def test_runbooks_cover_every_alert() -> None:
    deployment = InferenceDeployment.parse(
        {"metadata": {"name": "m", "namespace": "default"}, "spec": {**a_spec(), "objectives": OBJECTIVES}}
    )
    rules = prometheus_rule(deployment, Alerts())["spec"]["groups"][0]["rules"]
    of_the_chart = re.findall(r"- alert: (\w+)", (REPOSITORY / "charts/trimtab/templates/metrics.yaml").read_text())
    sections = re.findall(r"^## (Trimtab\w+)$", (DOCS / "operate/runbooks.md").read_text(), re.MULTILINE)
    assert sorted(sections) == sorted([rule["alert"] for rule in rules] + of_the_chart)


def test_troubleshooting_names_only_reasons_that_exist() -> None:
    rows = re.findall(r"^\| ([^|]*`[A-Z][^|]*) \|", (DOCS / "operate/troubleshooting.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([A-Z]\w+)`", row)}
    conditions = {"Serving", "Ready", "Progressing", "Stalled", "ScalingLimited", "TuningActive", "MetricsAvailable"}
    assert named - conditions - EVENTS - {str(reason) for reason in (*Reason, *TunerReason)} == set()


def pages() -> list[str]:
    """Return the pages that the navigation must list: all but the decision records, which have an index."""
    found = (path.relative_to(DOCS) for path in DOCS.rglob("*.md"))
    return sorted(str(path) for path in found if path.parts[0] != "adr" or path.name == "README.md")


@pytest.mark.parametrize("page", pages())
def test_page_is_in_the_navigation(page: str) -> None:
    assert f": {page}\n" in (REPOSITORY / "mkdocs.yml").read_text()


def test_list_of_pages_is_valid_yaml() -> None:
    text = (REPOSITORY / "mkdocs.yml").read_text()
    assert yaml.safe_load("nav:" + text.partition("\nnav:")[2])["nav"][0] == {"Home": "index.md"}
