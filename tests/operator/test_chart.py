"""The chart as helm renders it: complete, least privilege, and refusing values that it does not know."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from pod_security import violations
from prometheus_client import generate_latest
from rendered_chart import CHART, HELM, NAMESPACE, NO_HELM, REPOSITORY, helm, one, render, rights
from trimtab_operator.resource.allowed_privileges import PRIVILEGES
from trimtab_operator.resource.installation import Alerts, GpuBudget, NetworkAccess, PodMonitoring, RouterDefaults

CRD = REPOSITORY / "crds" / "trimtab.dev_inferencedeployments.yaml"
pytestmark = pytest.mark.skipif(HELM is None, reason=NO_HELM)


def test_lint_finds_nothing() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["1.20.2", "1.24.0", "1.33.0"])
def test_every_supported_kubernetes_gets_the_same_kinds(version: str) -> None:
    kinds = sorted(manifest["kind"] for manifest in render(options=["--kube-version", version]))
    assert kinds == [
        "ClusterRole",
        "ClusterRole",
        "ClusterRole",
        "ClusterRole",
        "ClusterRoleBinding",
        "CustomResourceDefinition",
        "Deployment",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Role",
        "RoleBinding",
        "Service",
        "Service",
        "ServiceAccount",
        "ValidatingWebhookConfiguration",
    ]


def test_kubernetes_before_1_20_is_refused() -> None:
    assert helm("template", "t", str(CHART), "--kube-version", "1.19.0").returncode != 0


@pytest.mark.parametrize(
    ("settings", "port"), [((), 8082), (("board.port=9000",), 9000), (("board.enabled=false",), 0)]
)
def test_board_has_its_own_port(settings: Sequence[str], port: int) -> None:
    pod = one(render(*settings), "Deployment")["spec"]["template"]["spec"]
    assert f"--board-port={port}" in pod["containers"][0]["args"]
    assert 8082 not in [each["containerPort"] for each in pod["containers"][0]["ports"]]


# --- CRD --------------------------------------------------------------------------------------------------------------


def test_the_charts_crd_is_the_repositorys_and_outlives_the_release() -> None:
    rendered = one(render(), "CustomResourceDefinition")
    assert rendered["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert rendered == yaml.safe_load(CRD.read_text())
    assert (CHART / "files" / "crds" / CRD.name).read_text() == CRD.read_text()


@pytest.mark.parametrize(("version", "has_rules", "has_words"), [("1.24.0", 0, 0), ("1.28.9", 1, 0), ("1.29.0", 1, 1)])
def test_an_older_kubernetes_gets_what_its_cel_knows(version: str, has_rules: bool, has_words: bool) -> None:
    rendered = one(render(options=["--kube-version", version]), "CustomResourceDefinition")
    wanted = yaml.safe_load(CRD.read_text())
    for entries in rules_in(wanted):
        for entry in entries if has_rules and not has_words else []:
            entry.pop("messageExpression", None)
    assert bool(rules_in(rendered)) is bool(has_rules)
    assert not has_rules or rules_in(rendered) == rules_in(wanted)


def rules_in(node: Any) -> list[list[dict[str, str]]]:
    """All CEL rules of a CRD, in order."""
    if isinstance(node, list):
        return [found for child in node for found in rules_in(child)]
    if not isinstance(node, dict):
        return []
    own = [node["x-kubernetes-validations"]] if "x-kubernetes-validations" in node else []
    return own + [
        found for name, child in node.items() if name != "x-kubernetes-validations" for found in rules_in(child)
    ]


def test_the_crd_can_be_left_out_or_go_with_the_release() -> None:
    assert all(manifest["kind"] != "CustomResourceDefinition" for manifest in render("crds.install=false"))
    assert "annotations" not in one(render("crds.keep=false"), "CustomResourceDefinition")["metadata"]


# --- rights -----------------------------------------------------------------------------------------------------------

WORKLOADS = {
    ("trimtab.dev", "inferencedeployments", ("get", "list", "watch")),
    ("trimtab.dev", "inferencedeployments/status", ("patch",)),
    ("apps", "statefulsets", ("get", "list", "watch", "create", "patch", "delete")),
    ("batch", "jobs", ("get", "list", "watch", "create", "patch", "delete")),
    ("", "services", ("get", "list", "watch", "create", "patch", "delete")),
    ("", "configmaps", ("get", "list", "watch", "create", "patch")),
    ("", "pods", ("list", "watch", "delete")),
    ("", "pods/eviction", ("create",)),
    ("", "serviceaccounts", ("get", "list", "watch", "create", "patch", "delete")),
    ("policy", "poddisruptionbudgets", ("get", "list", "watch", "create", "patch", "delete")),
    ("apps", "deployments", ("get", "list", "watch", "create", "patch", "delete")),
    ("rbac.authorization.k8s.io", "rolebindings", ("get", "list", "watch", "create", "patch", "delete")),
    ("discovery.k8s.io", "endpointslices", ("get", "list", "watch")),  # granted to routers
    ("networking.k8s.io", "networkpolicies", ("get", "list", "watch", "create", "patch", "delete")),
    ("monitoring.coreos.com", "podmonitors", ("get", "list", "watch", "create", "patch", "delete")),
    ("monitoring.coreos.com", "prometheusrules", ("get", "list", "watch", "create", "patch", "delete")),
    ("", "events", ("get", "list", "create", "patch")),
}
WORKLOAD_RIGHTS: set[tuple[str, str, str, str | None]] = {
    (group, resource, verb, None) for group, resource, verbs in WORKLOADS for verb in verbs
}
WORKLOAD_RIGHTS |= {("", "secrets", verb, "trimtab-rendezvous") for verb in ("get", "create", "patch")}
CLUSTER_RIGHTS = {
    ("", "nodes", "list", None),
    ("admissionregistration.k8s.io", "validatingwebhookconfigurations", "get", "trimtab-system-trimtab"),
    ("admissionregistration.k8s.io", "validatingwebhookconfigurations", "patch", "trimtab-system-trimtab"),
}


def test_the_cluster_role_holds_exactly_what_the_operator_does() -> None:
    assert rights(one(render(), "ClusterRole", "trimtab-system-trimtab")) == WORKLOAD_RIGHTS | CLUSTER_RIGHTS


ROUTER_RIGHTS = {("discovery.k8s.io", "endpointslices", verb, None) for verb in ("get", "list", "watch")}


def router_flag(manifests: list[dict[str, Any]]) -> RouterDefaults:
    arguments = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    (flag,) = [argument.removeprefix("--router=") for argument in arguments if argument.startswith("--router=")]
    return RouterDefaults.model_validate_json(flag, by_alias=True, by_name=False)


def test_router_role_is_named_by_the_flag_and_reads_endpoints() -> None:
    manifests = render()
    defaults = router_flag(manifests)
    assert rights(one(manifests, defaults.role.kind, defaults.role.name)) == ROUTER_RIGHTS
    assert defaults.image == f"trimtab-router:{(REPOSITORY / 'VERSION').read_text().strip()}"


def test_namespaced_install_has_a_router_role_per_namespace() -> None:
    manifests = render("watchNamespaces={a,b}")
    role = router_flag(manifests).role
    found = [m for m in manifests if m["kind"] == role.kind == "Role" and m["metadata"]["name"] == role.name]
    assert [m["metadata"]["namespace"] for m in found] == ["a", "b"]
    assert all(rights(m) == ROUTER_RIGHTS for m in found)


@pytest.mark.parametrize(("version", "is_known"), [("1.26.0", False), ("1.27.3", True)])
def test_unhealthy_evictions_need_a_kubernetes_that_knows_them(version: str, is_known: bool) -> None:
    assert router_flag(render(options=["--kube-version", version])).evict_unhealthy is is_known


def test_disabled_router_takes_its_rights_along() -> None:
    manifests = render("router.enabled=false")
    found = rights(one(manifests, "ClusterRole", "trimtab-system-trimtab"))
    assert not {resource for _, resource, _, _ in found} & {"deployments", "rolebindings", "endpointslices"}
    assert not any("--router" in argument for argument in str(one(manifests, "Deployment")).split("'"))


def test_namespaced_install_limits_workload_permissions() -> None:
    manifests = render("watchNamespaces={team-a,team-b}")
    assert rights(one(manifests, "ClusterRole")) == CLUSTER_RIGHTS
    roles = [m for m in manifests if m["kind"] == "Role" and m["metadata"]["namespace"] != NAMESPACE]
    roles = [role for role in roles if not role["metadata"]["name"].endswith("-router")]
    assert {role["metadata"]["namespace"] for role in roles} == {"team-a", "team-b"}
    assert all(rights(role) == WORKLOAD_RIGHTS for role in roles)
    bindings = [m for m in manifests if m["kind"] == "RoleBinding"]
    assert {b["metadata"]["namespace"] for b in bindings} == {"team-a", "team-b", NAMESPACE}
    account = {"kind": "ServiceAccount", "name": "trimtab", "namespace": NAMESPACE}
    assert all(binding["subjects"] == [account] for binding in bindings)


def test_namespaced_install_without_webhook_has_no_cluster_roles() -> None:
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
    template = one(render(), "Deployment")["spec"]["template"]
    assert violations(template) == []
    pod = template["spec"]
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
    version = (REPOSITORY / "VERSION").read_text().strip()
    assert f"--default-image=trimtab-engine:{version}" in container["args"]


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


def test_webhook_fails_closed_for_its_kind_only() -> None:
    (hook,) = one(render(), "ValidatingWebhookConfiguration")["webhooks"]
    assert (hook["failurePolicy"], hook["sideEffects"], hook["timeoutSeconds"]) == ("Fail", "None", 5)
    assert {group for rule in hook["rules"] for group in rule["apiGroups"]} == {"trimtab.dev"}
    assert "caBundle" not in hook["clientConfig"]
    service = one(render(), "Service", hook["clientConfig"]["service"]["name"])
    labels = one(render(), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_two_operators_run_on_different_nodes_with_pdb() -> None:
    manifests = render()
    deployment, budget = one(manifests, "Deployment"), one(manifests, "PodDisruptionBudget")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["replicas"] == 2
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (spread,) = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()


def test_single_operator_does_not_block_drains() -> None:
    assert "PodDisruptionBudget" not in [manifest["kind"] for manifest in render("replicas=1")]


def test_no_webhook_stands_before_scale() -> None:
    """It could only allow a number, which the schema bounds; while it is away no autoscaler could scale."""
    (hook,) = one(render(), "ValidatingWebhookConfiguration")["webhooks"]
    assert [resource for rule in hook["rules"] for resource in rule["resources"]] == ["inferencedeployments"]


def test_disabled_webhook_is_not_rendered() -> None:
    manifests = render("webhook.enabled=false")
    assert all(m["kind"] != "ValidatingWebhookConfiguration" for m in manifests)
    roles = [m for m in manifests if m["kind"] == "ClusterRole"]
    assert not any("validatingwebhookconfigurations" in r for r in rights(*roles))
    assert [m["metadata"]["name"] for m in manifests if m["kind"] == "Service"] == ["trimtab-metrics"]


SERVES_MONITORING = ["--api-versions", "monitoring.coreos.com/v1"]


@pytest.mark.parametrize(("kind", "value"), [("PodMonitor", "podMonitor"), ("PrometheusRule", "alerts")])
def test_pod_monitor_needs_its_kind_and_setting(kind: str, value: str) -> None:
    def count(*settings: str, options: Sequence[str] = ()) -> int:
        return sum(m["kind"] == kind for m in render(*settings, options=options))

    assert count() == 0
    assert count(options=SERVES_MONITORING) == 1
    assert count(f"metrics.{value}.enabled=false", options=SERVES_MONITORING) == 0
    (made,) = [m for m in render(f"metrics.{value}.labels.release=p", options=SERVES_MONITORING) if m["kind"] == kind]
    assert made["metadata"]["labels"]["release"] == "p"


def test_alerts_on_the_operator_name_metrics_that_it_has() -> None:
    from trimtab_operator.reconcile.health import OperatorMetrics

    text = generate_latest(OperatorMetrics().registry).decode()
    (rules,) = [m for m in render(options=SERVES_MONITORING) if m["kind"] == "PrometheusRule"]
    for rule in rules["spec"]["groups"][0]["rules"]:
        for name, selector in re.findall(r"(trimtab_[a-z_]+)(\{[^}]*\})", rule["expr"]):
            assert f"# TYPE {name.removesuffix('_count')} " in text
            assert 'pod=~"trimtab-operator-.*"' in selector
            assert 'namespace="trimtab-system"' in selector or name == "trimtab_condition", "that of the resource"


def test_stalled_resource_raises_an_alert() -> None:
    (rules,) = [m for m in render(options=SERVES_MONITORING) if m["kind"] == "PrometheusRule"]
    found = {rule["alert"]: rule for rule in rules["spec"]["groups"][0]["rules"]}
    stalled = found["TrimtabResourceStalled"]
    assert 'trimtab_condition{type="Stalled",status="True"' in stalled["expr"]
    assert "{{ $labels.namespace }}/{{ $labels.name }}" in stalled["annotations"]["summary"]


def choices(*settings: str, options: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON flags of the operator, by name."""
    container = one(render(*settings, options=options), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    told = (argument.partition("=") for argument in container["args"] if argument.partition("=")[2].startswith("{"))
    return {flag: json.loads(value) for flag, _, value in told}


def test_installation_settings_become_operator_flags() -> None:
    told = choices(
        "networkPolicy.clients[0].podSelector.matchLabels.app=front",
        "metrics.podMonitor.interval=30s",
        "metrics.alerts.labels.release=p",
    )
    access = NetworkAccess.model_validate(told["--network-policy"], by_alias=True, by_name=False)
    assert access.clients == ({"podSelector": {"matchLabels": {"app": "front"}}},)
    assert PodMonitoring.model_validate(told["--pod-monitors"]).interval == "30s"
    assert Alerts.model_validate(told["--alerts"]).labels == {"release": "p"}


def test_a_gpu_budget_reaches_the_operator_and_there_is_none_by_default() -> None:
    assert "--gpu-budget" not in choices()
    told = choices("gpuBudget.total=64", "gpuBudget.namespaces.team-a=16")["--gpu-budget"]
    assert GpuBudget.model_validate(told) == GpuBudget(total=64, namespaces={"team-a": 16})
    assert GpuBudget.model_validate(choices("gpuBudget.total=0")["--gpu-budget"]).total == 0
    alone = choices("gpuBudget.namespaces.team-a=16")["--gpu-budget"]
    assert GpuBudget.model_validate(alone) == GpuBudget(namespaces={"team-a": 16})
    assert helm("template", "t", str(CHART), "--set", "gpuBudget.total=-1").returncode != 0


def test_allowed_privileges_default_to_none_and_match_operator() -> None:
    def allowed(*settings: str) -> list[str]:
        arguments = one(render(*settings), "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
        return [argument.partition("=")[2] for argument in arguments if argument.startswith("--allow-privilege=")]

    assert allowed() == []
    assert allowed(f"podOverlay.allowedPrivileges={{{','.join(PRIVILEGES)}}}") == list(PRIVILEGES)
    assert helm("template", "t", str(CHART), "--set", "podOverlay.allowedPrivileges={hostPID}").returncode != 0


def test_network_policies_let_the_operators_own_pods_in() -> None:
    peer = choices()["--network-policy"]["operator"]
    labels = one(render(), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= labels.items()
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}


@pytest.mark.parametrize(
    ("settings", "options"),
    [(["networkPolicy.enabled=false"], []), ([], ["--kube-version", "1.20.2"])],  # no names on namespaces there
)
def test_network_policy_needs_operator_peer(settings: list[str], options: list[str]) -> None:
    assert "--network-policy" not in choices(*settings, options=options)


@pytest.mark.parametrize(
    "setting",
    [
        "imagee.tag=1",
        "replicas=-1",
        "webhook.port=80",
        "watchNamespaces={Team_A}",
        "metrics.interval=15s",
        "networkPolicy.clients[0].port=1",
    ],
)
def test_values_that_the_chart_does_not_know_are_refused(setting: str) -> None:
    done = helm("template", "trimtab", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert "schema" in done.stderr


def test_prometheus_is_named_with_what_it_takes_to_be_believed() -> None:
    settings = (
        "prometheus.url=https://prometheus.monitoring:9090",
        "prometheus.caConfigMap.name=prometheus-ca",
        "prometheus.username=trimtab",
        "prometheus.passwordSecret.name=prometheus-login",
        "prometheus.match.cluster=eu",
        "prometheus.aliases.vllm:num_requests_running=vllm_running",
    )
    pod = one(render(*settings), "Deployment")["spec"]["template"]["spec"]
    assert {
        "--prometheus-url=https://prometheus.monitoring:9090",
        "--prometheus-ca-file=/etc/trimtab/prometheus/ca.crt",
        "--prometheus-username=trimtab",
        "--prometheus-password-file=/etc/trimtab/prometheus/password",
        "--prometheus-match=cluster=eu",
        "--prometheus-alias=vllm:num_requests_running=vllm_running",
        "--prometheus-scrape-seconds=15",
    } <= set(pod["containers"][0]["args"])
    volume = next(volume for volume in pod["volumes"] if volume["name"] == "prometheus")
    assert volume["projected"]["sources"] == [
        {"configMap": {"name": "prometheus-ca", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"secret": {"name": "prometheus-login", "items": [{"key": "password", "path": "password"}]}},
    ]


def test_values_without_prometheus_render_no_monitoring() -> None:
    pod = one(render(), "Deployment")["spec"]["template"]["spec"]
    assert not [argument for argument in pod["containers"][0]["args"] if "prometheus" in argument]
    assert "prometheus" not in {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("url", ["prometheus:9090", "http://user:secret@prometheus", "http://prometheus/?x=y"])
def test_an_address_of_prometheus_that_cannot_be_is_refused(url: str) -> None:
    assert helm("template", "trimtab", str(CHART), "--set", f"prometheus.url={url}").returncode != 0


# --- other clusters and tools -----------------------------------------------------------------------------------------

LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


@pytest.mark.parametrize("version", ["0.1.0+9414ed9678d1", f"0.1.0-rc.1+{'a' * 80}"])
def test_labels_are_valid_for_any_version(version: str, tmp_path: Path) -> None:
    """Flux and CI systems add build metadata to the version of a chart."""
    copied = tmp_path / "trimtab"
    shutil.copytree(CHART, copied)
    chart = copied / "Chart.yaml"
    chart.write_text(re.sub(r"(?m)^(version|appVersion):.*$", rf"\1: {version}", chart.read_text()))
    done = helm("template", "t", str(copied))
    assert done.returncode == 0, done.stderr
    for manifest in yaml.safe_load_all(done.stdout):
        for value in (manifest["metadata"].get("labels") or {}).values():
            assert LABEL.fullmatch(value), f"{manifest['kind']}: {value}"


def test_ids_of_the_pods_can_be_removed() -> None:
    """OpenShift assigns user and group ids and rejects others."""
    settings = [f"podSecurityContext.{name}=null" for name in ("runAsUser", "runAsGroup", "fsGroup")]
    pod = one(render(*settings), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert violations({"spec": pod}) == []


def test_host_network_needs_a_peer_for_network_policies() -> None:
    done = helm("template", "t", str(CHART), "--set", "hostNetwork=true")
    assert "networkPolicy.operator: is empty" in done.stderr
    manifests = render("hostNetwork=true", "networkPolicy.operator.ipBlock.cidr=10.0.0.0/8")
    pod = one(manifests, "Deployment")["spec"]["template"]["spec"]
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert any('"operator":{"ipBlock":{"cidr":"10.0.0.0/8"}}' in each for each in pod["containers"][0]["args"])
    assert "NetworkPolicy" not in {manifest["kind"] for manifest in manifests}


@pytest.mark.parametrize(("version", "has_conditions"), [("1.27.0", False), ("1.28.0", True)])
def test_webhook_is_called_for_changed_specs_of_its_class(version: str, has_conditions: bool) -> None:
    manifests = render("class=blue", options=["--kube-version", version])
    (hook,) = one(manifests, "ValidatingWebhookConfiguration")["webhooks"]
    assert ("matchConditions" in hook) is has_conditions
    if has_conditions:
        changed, own = (each["expression"] for each in hook["matchConditions"])
        assert "object.spec != oldObject.spec" in changed
        assert "deletionTimestamp" in changed
        assert own == "has(object.spec) && has(object.spec.class) && object.spec.class == 'blue'"


def test_metrics_keep_the_namespace_of_resources() -> None:
    monitor = one(render(options=["--api-versions", "monitoring.coreos.com/v1"]), "PodMonitor")
    assert monitor["spec"]["podMetricsEndpoints"][0]["honorLabels"] is True


VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
OBJECTS = sorted(name for name, value in VALUES.items() if name not in ("image", "engine"))


def test_values_of_an_older_release_render() -> None:
    """`helm upgrade --reuse-values` lacks every value that a newer chart added."""
    nested = [f"{name}.{key}" for name in OBJECTS if isinstance(VALUES[name], dict) for key in VALUES[name]]
    for name in (*OBJECTS, *(each for each in nested if isinstance(VALUES[each.partition(".")[0]], dict))):
        if name.endswith(".image"):
            continue
        done = helm("template", "t", str(CHART), "--api-versions", "monitoring.coreos.com/v1", "--set", f"{name}=null")
        assert done.returncode == 0, f"{name}: {done.stderr}"


def test_own_network_policy_opens_webhook_and_metrics_only() -> None:
    policy = one(render("operatorNetworkPolicy.monitoring[0].podSelector.matchLabels.app=prometheus"), "NetworkPolicy")
    webhook, metrics = policy["spec"]["ingress"]
    assert (webhook["ports"][0]["port"], "from" in webhook) == ("webhook", False)
    assert metrics["from"] == [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]


def test_roles_of_users_are_aggregated() -> None:
    roles = [manifest for manifest in render() if manifest["kind"] == "ClusterRole"]
    name = f"{NAMESPACE}-trimtab"
    edit = next(role for role in roles if role["metadata"]["name"] == f"{name}-edit")
    view = next(role for role in roles if role["metadata"]["name"] == f"{name}-view")
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert ("trimtab.dev", "inferencedeployments", "get", None) in rights(view)
    assert ("trimtab.dev", "inferencedeployments", "create", None) in rights(edit)
    assert not any(resource.endswith("/status") for _, resource, verb, _ in rights(edit) if verb != "get")
    assert len([m for m in render("watchNamespaces[0]=a") if m["kind"] == "ClusterRole"]) == 1
