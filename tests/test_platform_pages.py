"""Pages for platform engineers are correct: commands parse, and referenced resources and metrics exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from trimtab_operator.builders.labels import group_name, worker_set_name
from trimtab_operator.resource.spec import GROUP, KIND, VERSION, InferenceDeployment

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
FAMILIES = REPOSITORY / "engine-image" / "trimtab_engine" / "api" / "metrics" / "families.py"
PAGES = ("install", "gitops", "hpa", "keda", "rollback", "upgrade", "uninstall", "kubernetes-versions")
CONDITIONS = ("Ready", "Reconciling", "Stalled")


def path_of(page: str) -> Path:
    """Return the file of a page, in the folder of its section."""
    (path,) = DOCS.glob(f"*/{page}.md")
    return path


def fenced(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", path_of(page).read_text(), re.DOTALL)


def manifests(page: str) -> list[dict[str, Any]]:
    """Return all Kubernetes objects of a page, including those within commands."""
    inside = [text for block in fenced(page, "bash") for text in re.findall(r"<<'YAML'\n(.*?)YAML", block, re.DOTALL)]
    return [found for text in (*fenced(page, "yaml"), *inside) for found in yaml.safe_load_all(text)]


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse_in_bash(page: str) -> None:
    for block in fenced(page, "bash"):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False, timeout=240)
        assert (done.returncode, done.stderr) == (0, ""), block


@pytest.mark.parametrize("page", PAGES)
def test_linked_pages_exist(page: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]*)", path_of(page).read_text()):
        assert not target or (path_of(page).parent / target).exists(), target


def test_platform_pages_are_in_the_navigation() -> None:
    navigation = REPOSITORY / "mkdocs.yml"
    listed = (REPOSITORY / "README.md").read_text() + (navigation.read_text() if navigation.is_file() else "")
    assert [page for page in PAGES if f"/{page}.md" not in listed] == []


@pytest.mark.parametrize(("page", "kind"), [("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")])
def test_autoscalers_target_an_inference_deployment(page: str, kind: str) -> None:
    (scaler,) = [found for found in manifests(page) if found.get("kind") == kind]
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"]) == (f"{GROUP}/{VERSION}", KIND)


@pytest.mark.parametrize("page", ["hpa", "keda"])
def test_queried_series_are_engine_metrics(page: str) -> None:
    named = set(re.findall(r"vllm:[a-z_]+", path_of(page).read_text()))
    assert named
    assert named <= set(re.findall(r"vllm:[a-z_]+", FAMILIES.read_text()))


def queries(page: str) -> list[str]:
    """Return the Prometheus queries of a page's ScaledObjects."""
    scalers = [found for found in manifests(page) if found.get("kind") == "ScaledObject"]
    return [trigger["metadata"]["query"] for scaler in scalers for trigger in scaler["spec"]["triggers"]]


@pytest.mark.parametrize("page", ["keda", "autoscaling"])
def test_keda_queries_are_valid_promql(page: str) -> None:
    found = [*queries(page), *fenced(page, "text")]
    assert found
    for query in found:
        promql_parser.parse(query)


def test_keda_query_matches_leaders_of_one_resource() -> None:
    (query,) = queries("keda")
    pattern = re.findall(r'pod=~"([^"]+)"', query)[0]
    named = {name: InferenceDeployment.parse(make_body(name)) for name in ("smollm2", "smollm2-g1", "another")}
    pods = [
        f"{of(deployment, ordinal)}-{number}"
        for deployment in named.values()
        for of in (group_name, worker_set_name)
        for ordinal in (0, 12)
        for number in (0, 1)
    ]
    assert [pod for pod in pods if re.fullmatch(pattern, pod)] == ["smollm2-g0-0", "smollm2-g12-0"]


def make_body(name: str) -> dict[str, Any]:
    spec = {"model": {"uri": "file:///m"}, "runtime": {"device": "cpu", "image": "engine:1"}}
    return {"metadata": {"name": name, "namespace": "default"}, "spec": spec}


def test_argo_cd_health_script_uses_existing_conditions() -> None:
    (health_checks,) = [found["data"] for found in manifests("gitops") if found.get("kind") == "ConfigMap"]
    ((name, script),) = health_checks.items()
    assert name == f"resource.customizations.health.{GROUP}_{KIND}"
    assert set(re.findall(r'condition.type == "(\w+)"', script)) == set(CONDITIONS)
    assert "obj.status.observedGeneration ~= obj.metadata.generation" in script


def test_flux_kustomizations_wait() -> None:
    kustomizations = [found for found in manifests("gitops") if found.get("kind") == "Kustomization"]
    assert len(kustomizations) == 2
    assert all(found["spec"]["wait"] is True for found in kustomizations)


def test_tests_named_by_operator_core_page_exist() -> None:
    page = (DOCS / "results" / "operator-core.md").read_text()
    named = re.findall(r"`((?:tests|e2e)/[\w/]+\.py)`|`(test_\w+)`", page)
    assert len(named) > 50
    source = ""
    for path, test in named:
        if path:
            source = (REPOSITORY / path).read_text()
        else:
            assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), test
