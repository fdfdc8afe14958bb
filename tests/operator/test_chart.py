"""The chart as helm renders it: complete, least privilege, and refusing values that it does not know."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "charts" / "trimtab"
CRD = REPOSITORY / "crds" / "trimtab.dev_inferencedeployments.yaml"
NAMESPACE = "trimtab-system"
Manifest = dict[str, Any]


def find_helm() -> str | None:
    """TRIMTAB_HELM, then PATH, then what `make demo` keeps in the cache."""
    named = os.environ.get("TRIMTAB_HELM")
    if named:
        return named
    cache = Path(os.environ.get("TRIMTAB_CACHE", "~/.cache/trimtab")).expanduser()
    cached = sorted(path for path in cache.glob("tools/**/helm") if path.is_file() and os.access(path, os.X_OK))
    return shutil.which("helm") or (str(cached[0]) if cached else None)


HELM = find_helm()
pytestmark = pytest.mark.skipif(
    HELM is None, reason="no helm: set TRIMTAB_HELM, put helm on PATH, or run `make cluster-up` once"
)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False, timeout=60)


def render(*settings: str, options: Sequence[str] = ()) -> list[Manifest]:
    values = [word for setting in settings for word in ("--set", setting)]
    done = helm("template", "trimtab", str(CHART), "--namespace", NAMESPACE, *values, *options)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def one(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    found = [m for m in manifests if m["kind"] == kind and name in (None, m["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def rights(*roles: Manifest) -> set[tuple[str, str, str, str | None]]:
    """(group, resource, verb, the only name it holds for)."""
    return {
        (group, resource, verb, name)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [None])
    }


def test_lint_finds_nothing() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["1.20.2", "1.24.0", "1.33.0"])
def test_every_supported_kubernetes_gets_the_same_kinds(version: str) -> None:
    kinds = sorted(manifest["kind"] for manifest in render(options=["--kube-version", version]))
    assert kinds == [
        "ClusterRole",
        "ClusterRoleBinding",
        "CustomResourceDefinition",
        "Deployment",
        "Role",
        "RoleBinding",
        "Service",
        "Service",
        "ServiceAccount",
        "ValidatingWebhookConfiguration",
    ]


def test_kubernetes_before_1_20_is_refused() -> None:
    assert helm("template", "t", str(CHART), "--kube-version", "1.19.0").returncode != 0


# --- CRD --------------------------------------------------------------------------------------------------------------


def test_the_charts_crd_is_the_repositorys_and_outlives_the_release() -> None:
    rendered = one(render(), "CustomResourceDefinition")
    assert rendered["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert rendered == yaml.safe_load(CRD.read_text())
    assert (CHART / "files" / "crds" / CRD.name).read_text() == CRD.read_text()


def test_the_crd_can_be_left_out_or_go_with_the_release() -> None:
    assert all(manifest["kind"] != "CustomResourceDefinition" for manifest in render("crds.install=false"))
    assert "annotations" not in one(render("crds.keep=false"), "CustomResourceDefinition")["metadata"]


# --- rights -----------------------------------------------------------------------------------------------------------

WORKLOADS = {
    ("trimtab.dev", "inferencedeployments", ("get", "list", "watch", "patch")),
    ("trimtab.dev", "inferencedeployments/status", ("patch",)),
    ("apps", "statefulsets", ("get", "list", "watch", "create", "patch", "delete")),
    ("batch", "jobs", ("get", "list", "create", "patch", "delete")),
    ("", "services", ("get", "list", "watch", "create", "patch", "delete")),
    ("", "configmaps", ("get", "list", "create", "patch")),
    ("", "secrets", ("get", "create", "patch")),  # the one of each resource's groups of several pods
    ("", "pods", ("list", "watch", "delete")),
    ("policy", "poddisruptionbudgets", ("get", "list", "create", "patch")),
    ("", "events", ("get", "list", "create", "patch")),
}
WORKLOAD_RIGHTS = {(group, resource, verb, None) for group, resource, verbs in WORKLOADS for verb in verbs}
CLUSTER_RIGHTS = {
    ("", "nodes", "list", None),
    ("admissionregistration.k8s.io", "validatingwebhookconfigurations", "get", "trimtab-system-trimtab"),
    ("admissionregistration.k8s.io", "validatingwebhookconfigurations", "patch", "trimtab-system-trimtab"),
}


def test_the_cluster_role_holds_exactly_what_the_operator_does() -> None:
    assert rights(one(render(), "ClusterRole")) == WORKLOAD_RIGHTS | CLUSTER_RIGHTS


def test_with_named_namespaces_the_rights_on_workloads_end_there() -> None:
    manifests = render("watchNamespaces={team-a,team-b}")
    assert rights(one(manifests, "ClusterRole")) == CLUSTER_RIGHTS
    roles = [m for m in manifests if m["kind"] == "Role" and m["metadata"]["namespace"] != NAMESPACE]
    assert {role["metadata"]["namespace"] for role in roles} == {"team-a", "team-b"}
    assert all(rights(role) == WORKLOAD_RIGHTS for role in roles)
    bindings = [m for m in manifests if m["kind"] == "RoleBinding"]
    assert {b["metadata"]["namespace"] for b in bindings} == {"team-a", "team-b", NAMESPACE}
    account = {"kind": "ServiceAccount", "name": "trimtab", "namespace": NAMESPACE}
    assert all(binding["subjects"] == [account] for binding in bindings)


def test_with_named_namespaces_and_no_webhook_nothing_holds_for_the_whole_cluster() -> None:
    kinds = {manifest["kind"] for manifest in render("watchNamespaces={a}", "webhook.enabled=false")}
    assert not kinds & {"ClusterRole", "ClusterRoleBinding"}


def test_secrets_and_leases_are_the_operators_own_by_name() -> None:
    own = rights(one(render(), "Role"))
    assert {(resource, verb, name) for _, resource, verb, name in own} == {
        ("leases", "create", None),
        ("leases", "get", "trimtab-operator"),
        ("leases", "update", "trimtab-operator"),
        ("secrets", "create", None),
        ("secrets", "get", "trimtab-operator"),
        ("secrets", "patch", "trimtab-operator"),
        ("secrets", "get", "trimtab-webhook"),
        ("secrets", "patch", "trimtab-webhook"),
    }


@pytest.mark.parametrize("settings", [(), ("watchNamespaces={a}",), ("webhook.enabled=false",)])
def test_no_role_holds_a_wildcard_or_a_way_to_more_power(settings: tuple[str, ...]) -> None:
    roles = [m for m in render(*settings) if m["kind"] in ("Role", "ClusterRole")]
    for group, resource, verb, _ in rights(*roles):
        assert "*" not in (group, resource, verb)
        assert verb not in ("escalate", "bind", "impersonate")
        assert resource not in ("pods/exec", "pods/attach", "serviceaccounts/token")
        assert resource != "nodes" or verb == "list"
        assert (resource, verb) not in {("secrets", "list"), ("secrets", "watch")}


# --- pods -------------------------------------------------------------------------------------------------------------


def test_the_operators_pods_meet_the_restricted_standard() -> None:
    pod = one(render(), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert [volume["emptyDir"]["medium"] for volume in pod["volumes"]] == ["Memory"]


def test_images_are_given_as_the_values_say_and_default_to_the_app_version() -> None:
    container = one(render("image.repository=r.example/o", "image.tag=7"), "Deployment")["spec"]["template"]["spec"][
        "containers"
    ][0]
    assert container["image"] == "r.example/o:7"
    assert "--default-image=trimtab-engine:0.1.0" in container["args"]


def test_a_tag_of_digits_alone_stays_what_it_is() -> None:
    container = one(render("image.tag=12345678"), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "trimtab-operator:12345678"


@pytest.mark.parametrize("settings", [(), ("watchNamespaces={a,b}",), ("webhook.enabled=false",)])
def test_every_argument_is_one_that_the_operator_knows(settings: tuple[str, ...]) -> None:
    from trimtab_operator.cli.operator_command import app
    from typer.main import get_command

    command: Any = get_command(app)
    run = command.commands["run"] if hasattr(command, "commands") else command
    known = {option for parameter in run.params for option in (*parameter.opts, *parameter.secondary_opts)}
    arguments = one(render(*settings), "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[0] == "run"
    assert {argument.partition("=")[0] for argument in arguments[1:]} <= known


# --- webhook and monitoring -------------------------------------------------------------------------------------------


def test_the_webhook_fails_closed_for_our_kind_alone_and_leaves_the_authority_to_the_operator() -> None:
    (hook,) = one(render(), "ValidatingWebhookConfiguration")["webhooks"]
    assert (hook["failurePolicy"], hook["sideEffects"], hook["timeoutSeconds"]) == ("Fail", "None", 5)
    assert {group for rule in hook["rules"] for group in rule["apiGroups"]} == {"trimtab.dev"}
    assert "caBundle" not in hook["clientConfig"]
    service = one(render(), "Service", hook["clientConfig"]["service"]["name"])
    labels = one(render(), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_of_several_operators_a_node_drain_leaves_one_to_answer_the_webhook() -> None:
    kinds = [manifest["kind"] for manifest in render()]
    assert "PodDisruptionBudget" not in kinds  # of one pod, it would keep the node from being drained
    budget = one(render("replicas=2"), "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    labels = one(render("replicas=2"), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_no_webhook_stands_before_scale() -> None:
    """It could only allow a number, which the schema bounds; while it is away no autoscaler could scale."""
    (hook,) = one(render(), "ValidatingWebhookConfiguration")["webhooks"]
    assert [resource for rule in hook["rules"] for resource in rule["resources"]] == ["inferencedeployments"]


def test_without_the_webhook_nothing_of_it_is_installed() -> None:
    manifests = render("webhook.enabled=false")
    assert all(m["kind"] != "ValidatingWebhookConfiguration" for m in manifests)
    assert not any("validatingwebhookconfigurations" in r for r in rights(one(manifests, "ClusterRole")))
    assert [m["metadata"]["name"] for m in manifests if m["kind"] == "Service"] == ["trimtab-metrics"]


def test_pod_monitors_need_the_flag_and_a_cluster_that_serves_them() -> None:
    served = ["--api-versions", "monitoring.coreos.com/v1"]

    def count(*settings: str, options: Sequence[str] = ()) -> int:
        return sum(m["kind"] == "PodMonitor" for m in render(*settings, options=options))

    assert count("metrics.podMonitor.enabled=true") == 0
    assert count(options=served) == 0
    assert count("metrics.podMonitor.enabled=true", options=served) == 2


@pytest.mark.parametrize(
    "setting", ["imagee.tag=1", "replicas=-1", "webhook.port=80", "watchNamespaces={Team_A}", "metrics.interval=15s"]
)
def test_values_that_the_chart_does_not_know_are_refused(setting: str) -> None:
    done = helm("template", "trimtab", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert "schema" in done.stderr
