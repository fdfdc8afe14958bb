"""`trimtab doctor`: what a cluster lacks for serving models, each with what to do. Nothing is written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.text import Text

from trimtab_operator.cli.cluster import Cluster, Context, Namespace, has_kubeconfig
from trimtab_operator.cli.terminal_output import new_console, new_table
from trimtab_operator.cli.why_command import Output
from trimtab_operator.layout.node_gpus import GPU_RESOURCE, num_gpus
from trimtab_operator.observed.groups import is_pod_ready
from trimtab_operator.resource.crd import structural
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import GROUP, PLURAL, VERSION, Spec

EXIT_PROBLEMS = 1
MIN_KUBERNETES = (1, 20)  # as the chart's kubeVersion
OPERATOR_SELECTOR = "app.kubernetes.io/part-of=trimtab,app.kubernetes.io/component=operator"
Json = Mapping[str, Any]


class Verdict(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """One check with its result; `remedy` is empty if it is ok."""

    name: str
    verdict: Verdict
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Objects of the cluster; None if one does not exist or cannot be read."""

    version: Json | None
    crd: Json | None
    operators: Sequence[Manifest] | None
    """Pods of the operator in all namespaces."""
    nodes: Sequence[Manifest] | None
    webhooks: Sequence[Json] | None
    groups: frozenset[str]
    """API groups with versions, such as monitoring.coreos.com/v1."""
    denied: tuple[str, ...] = ()
    """What the user may not do with InferenceDeployments in the namespace."""
    storage_classes: Sequence[Json] | None = None


def doctor(
    namespace: Namespace = None,
    context: Context = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Output format: text or json.")] = Output.TEXT,
) -> None:
    """Check this machine and the cluster for everything that serving needs, and print a remedy for each finding.

    Exit code 1 if a check found a problem; warnings do not count. Without a cluster, only this machine is checked.
    """
    checks = check_machine(has_kubeconfig=has_kubeconfig(context), which=shutil.which)
    if has_kubeconfig(context):
        cluster = Cluster.connect("doctor", namespace, context)
        checks += check_cluster(read_facts(cluster), namespace=cluster.namespace)
    if output is Output.JSON:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        _print(checks)
    if any(check.verdict is Verdict.PROBLEM for check in checks):
        raise typer.Exit(EXIT_PROBLEMS)


def _print(checks: Iterable[Check]) -> None:
    table = new_table("", "CHECK", "MESSAGE", "WHAT TO DO")
    signs = {
        Verdict.OK: Text("✓", style="green"),
        Verdict.WARNING: Text("!", style="yellow"),
        Verdict.PROBLEM: Text("✗", style="red"),
    }
    for check in checks:
        table.add_row(signs[check.verdict], check.name, check.message, check.remedy)
    new_console().print(table)


def read_facts(cluster: Cluster) -> Facts:
    """Read the cluster. What the user may not read is None."""
    groups = _items(cluster.find("/apis"), "groups") or []
    pods = _items(cluster.find("/api/v1/pods", labelSelector=OPERATOR_SELECTOR))
    webhooks = _items(cluster.find("/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"))
    verbs = ("get", "list", "create", "patch")
    return Facts(
        version=cluster.find("/version"),
        crd=cluster.find(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL}.{GROUP}"),
        operators=pods,
        nodes=_items(cluster.find("/api/v1/nodes")),
        webhooks=None if webhooks is None else [entry for entry in webhooks if _is_ours(entry)],
        groups=frozenset(version["groupVersion"] for group in groups for version in group.get("versions") or ()),
        denied=tuple(verb for verb in verbs if not _is_allowed(cluster, verb)),
        storage_classes=_items(cluster.find("/apis/storage.k8s.io/v1/storageclasses")),
    )


def _items(found: Json | None, key: str = "items") -> list[Any] | None:
    return None if found is None else list(found.get(key) or ())


def _is_ours(webhook: Json) -> bool:
    rules = [rule for entry in webhook.get("webhooks") or () for rule in entry.get("rules") or ()]
    return any(GROUP in (rule.get("apiGroups") or ()) for rule in rules)


def _is_allowed(cluster: Cluster, verb: str) -> bool:
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {
            "resourceAttributes": {"verb": verb, "group": GROUP, "resource": PLURAL, "namespace": cluster.namespace}
        },
    }
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    answer = json.loads(cluster.request("POST", path, body=review).read())
    return bool((answer.get("status") or {}).get("allowed"))


def check_machine(*, has_kubeconfig: bool, which: Callable[[str], str | None]) -> list[Check]:
    """Check the programs on this machine."""
    checks = [
        Check("trimtab", Verdict.OK, f"version {version('trimtab')}"),
        _program(which, "kubectl", "completion of names uses it"),
        _program(which, "helm", "`trimtab install` uses it"),
    ]
    if not has_kubeconfig:
        remedy = "set KUBECONFIG or --context; to try without a cluster: trimtab serve MODEL --device cpu"
        checks.append(Check("kubeconfig", Verdict.PROBLEM, "no cluster configured", remedy))
    return checks


def _program(which: Callable[[str], str | None], name: str, use: str) -> Check:
    path = which(name)
    if path is None:
        return Check(name, Verdict.WARNING, f"not on PATH; {use}", f"install {name}")
    return Check(name, Verdict.OK, path)


def check_cluster(facts: Facts, *, namespace: str) -> list[Check]:
    """Check the cluster in the order in which an installation needs things."""
    return [
        _kubernetes(facts),
        _crd(facts),
        _operator(facts),
        _webhook(facts),
        _gpus(facts),
        _storage(facts),
        _prometheus(facts),
        _permissions(facts, namespace),
    ]


def _kubernetes(facts: Facts) -> Check:
    name = "Kubernetes"
    text = str((facts.version or {}).get("gitVersion", ""))
    found = re.match(r"v?(\d+)\.(\d+)", text)
    if found is None:
        return Check(name, Verdict.PROBLEM, "the API server reports no version", "check KUBECONFIG and --context")
    if (int(found[1]), int(found[2])) < MIN_KUBERNETES:
        return Check(name, Verdict.PROBLEM, f"{text} is not supported", "upgrade to Kubernetes 1.20 or later")
    return Check(name, Verdict.OK, text)


def _crd(facts: Facts) -> Check:
    name = "CRD"
    if facts.crd is None:
        return Check(name, Verdict.PROBLEM, f"{PLURAL}.{GROUP} is not installed or not readable", "run trimtab install")
    served = {entry.get("name"): entry for entry in (facts.crd.get("spec") or {}).get("versions") or ()}
    if VERSION not in served:
        return Check(
            name,
            Verdict.PROBLEM,
            f"version {VERSION} is not served (served: {', '.join(served)})",
            "run trimtab install",
        )
    schema = (served[VERSION].get("schema") or {}).get("openAPIV3Schema") or {}
    installed = ((schema.get("properties") or {}).get("spec") or {}).get("properties") or {}
    missing = sorted(structural(Spec)["properties"].keys() - installed.keys())
    if missing:
        message = f"older than this program: it has no spec.{', spec.'.join(missing)}"
        return Check(name, Verdict.WARNING, message, "upgrade the chart: trimtab install, or apply crds/")
    return Check(name, Verdict.OK, f"{VERSION} is served")


def _operator(facts: Facts) -> Check:
    name = "Operator"
    if facts.operators is None:
        return Check(
            name, Verdict.WARNING, "no permission to list pods of all namespaces", "repeat it as an administrator"
        )
    if not facts.operators:
        return Check(name, Verdict.PROBLEM, "no operator pod in any namespace", "run trimtab install")
    ready = [pod for pod in facts.operators if is_pod_ready(pod)]
    namespaces = ", ".join(sorted({pod["metadata"]["namespace"] for pod in facts.operators}))
    message = f"{len(ready)} of {len(facts.operators)} pods ready in {namespaces}"
    if not ready:
        first = facts.operators[0]["metadata"]
        remedy = f"kubectl -n {first['namespace']} describe pod {first['name']}"
        return Check(name, Verdict.PROBLEM, message, remedy)
    return Check(name, Verdict.OK, message)


def _webhook(facts: Facts) -> Check:
    name = "Webhook"
    if facts.webhooks is None:
        return Check(
            name, Verdict.WARNING, "no permission to read webhook configurations", "repeat it as an administrator"
        )
    if not facts.webhooks:
        message = "none: errors in a resource are reported in its conditions, not when it is applied"
        return Check(name, Verdict.WARNING, message, "set webhook.enabled in the chart")
    bundles = [
        (entry.get("clientConfig") or {}).get("caBundle")
        for webhook in facts.webhooks
        for entry in webhook.get("webhooks") or ()
    ]
    if not all(bundles):
        message = "its caBundle is empty, so the API server cannot call it"
        return Check(name, Verdict.PROBLEM, message, "check that the operator runs and may patch the configuration")
    return Check(name, Verdict.OK, facts.webhooks[0]["metadata"]["name"])


def _gpus(facts: Facts) -> Check:
    name = "GPUs"
    if facts.nodes is None:
        return Check(name, Verdict.WARNING, "no permission to list nodes", "repeat it as an administrator")
    counts = [count for count in map(num_gpus, facts.nodes) if count]
    if not counts:
        labelled = [node for node in facts.nodes if _has_gpu_label(node)]
        message = f"no node offers {GPU_RESOURCE}"
        if labelled:
            message += f", although {len(labelled)} are labelled as GPU nodes"
        remedy = "install NVIDIA's device plugin or GPU operator; without GPUs, set runtime.device: cpu"
        return Check(name, Verdict.WARNING, message, remedy)
    return Check(name, Verdict.OK, f"{sum(counts)} GPUs on {len(counts)} nodes")


def _has_gpu_label(node: Manifest) -> bool:
    labels = node["metadata"].get("labels") or {}
    return any(label.startswith(GPU_RESOURCE) for label in labels)


def _storage(facts: Facts) -> Check:
    name = "Storage"
    if not facts.storage_classes:
        message = "no StorageClass: model volumes need existing PersistentVolumes"
        return Check(name, Verdict.WARNING, message, "models are downloaded by each pod, or use an existing claim")
    default = "storageclass.kubernetes.io/is-default-class"
    names = [entry["metadata"]["name"] for entry in facts.storage_classes]
    chosen = [
        entry["metadata"]["name"]
        for entry in facts.storage_classes
        if (entry["metadata"].get("annotations") or {}).get(default) == "true"
    ]
    return Check(name, Verdict.OK, f"default StorageClass {chosen[0]}" if chosen else f"{', '.join(names)}; no default")


def _prometheus(facts: Facts) -> Check:
    name = "Prometheus"
    if "monitoring.coreos.com/v1" in facts.groups:
        return Check(name, Verdict.OK, "the Prometheus Operator's API is served: PodMonitors and alerts are created")
    message = "the Prometheus Operator's API is not served: no PodMonitors and no alerts; tuning works without them"
    return Check(name, Verdict.WARNING, message, "install the Prometheus Operator for dashboards and alerts")


def _permissions(facts: Facts, namespace: str) -> Check:
    name = "Permissions"
    if facts.denied:
        message = f"you may not {', '.join(facts.denied)} {PLURAL} in namespace {namespace}"
        remedy = "request the role edit in the namespace"
        return Check(name, Verdict.WARNING, message, remedy)
    return Check(name, Verdict.OK, f"you may read and change {PLURAL} in namespace {namespace}")
