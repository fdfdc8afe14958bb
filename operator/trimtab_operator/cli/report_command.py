"""`trimtab report`: a support bundle of a deployment, as a tar file without secrets."""

from __future__ import annotations

import io
import json
import re
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from trimtab_operator.builders.labels import children_selector
from trimtab_operator.cli.cluster import Cluster, Context, Namespace
from trimtab_operator.cli.cluster_commands import LAST_APPLIED
from trimtab_operator.cli.doctor_command import OPERATOR_SELECTOR, check_cluster, read_facts
from trimtab_operator.cli.history_command import is_about
from trimtab_operator.cli.names import complete_name
from trimtab_operator.cli.pod_commands import pods_of
from trimtab_operator.cli.shared import check_writable

LOG_LINES = 2000
MASK = "***"
SENSITIVE_NAME = re.compile(r"(?i)(token|secret|password|passwd|api[-_]?key|access[-_]?key|credential|authorization)")
SENSITIVE_TEXT = re.compile(
    r"(?i)hf_[A-Za-z0-9]{16,}"
    r"|sk-[A-Za-z0-9_-]{16,}"
    r"|AKIA[0-9A-Z]{16}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"
    r"|(?<=bearer )[A-Za-z0-9._~+/=-]{8,}"
    r"|(?<=--api-key[= ])[^\s\"']+"
    r"|(?<=://)[^/\s:@]+:[^/\s:@]+(?=@)"
)
SAFE_NAMES = ("max_tokens", "tokens", "tokenizer", "token_budget", "secretkeyref", "secretname", "tokensecretref")
CHILDREN = (
    ("statefulsets", "/apis/apps/v1"),
    ("deployments", "/apis/apps/v1"),
    ("pods", "/api/v1"),
    ("services", "/api/v1"),
    ("configmaps", "/api/v1"),
    ("jobs", "/apis/batch/v1"),
    ("poddisruptionbudgets", "/apis/policy/v1"),
    ("networkpolicies", "/apis/networking.k8s.io/v1"),
)


def report(
    name: Annotated[str, typer.Argument(help="Name of the InferenceDeployment.", autocompletion=complete_name)],
    namespace: Namespace = None,
    context: Context = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="File to write. Default: trimtab-NAME-TIME.tar.gz.")
    ] = None,
) -> None:
    """Write a support bundle: the deployment, its children, Events, logs, the operator's log and the cluster's checks.

    Secrets are not read; values of sensitive fields and text that looks like a credential are masked. Look through the
    bundle before you send it: prompts are not logged by default, but names of hosts and models are in it.
    """
    now = datetime.now(UTC)
    path = file or Path(f"trimtab-{name}-{now:%Y%m%d-%H%M%S}.tar.gz")
    check_writable("--file", path)
    cluster = Cluster.connect("report", namespace, context)
    cluster.resource(name)
    count = 0
    with tarfile.open(path, "w:gz") as bundle:
        for member, text in contents(cluster, name):
            body = mask_text(text).encode()
            info = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{member}")
            info.size, info.mtime = len(body), int(time.time())
            bundle.addfile(info, io.BytesIO(body))
            count += 1
    typer.echo(f"{path}: {count} files, {path.stat().st_size / 1024:.0f} KiB")


def contents(cluster: Cluster, name: str) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each file."""
    scope = f"namespaces/{cluster.namespace}"
    yield "version.txt", f"trimtab {version('trimtab')}\n"
    yield "resource.yaml", _yaml(cluster.resource(name))
    for kind, group in CHILDREN:
        found = cluster.find(f"{group}/{scope}/{kind}", labelSelector=children_selector(name))
        yield f"{kind}.yaml", _yaml({"items": (found or {}).get("items", "not readable")})
    events = (cluster.find(f"/api/v1/{scope}/events") or {}).get("items") or ()
    own = [event for event in events if is_about(event, name)]
    yield "events.yaml", _yaml({"items": own})
    for is_router in (False, True):
        for pod in pods_of(cluster, name, router=is_router):
            yield from _logs(cluster, pod, "logs")
    operators = (cluster.find("/api/v1/pods", labelSelector=OPERATOR_SELECTOR) or {}).get("items") or ()
    for pod in operators:
        yield from _logs(cluster, pod, "operator")
    facts = read_facts(cluster)
    checks = [asdict(check) for check in check_cluster(facts, namespace=cluster.namespace)]
    yield "doctor.json", json.dumps(checks, indent=2)
    yield "nodes.yaml", _yaml({"items": [_node(node) for node in facts.nodes or ()]})


def _logs(cluster: Cluster, pod: Mapping[str, Any], folder: str) -> Iterator[tuple[str, str]]:
    """Yield the log of each container, and of its run before the last restart."""
    metadata = pod["metadata"]
    path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/log"
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        for previous in (False, True) if status.get("restartCount") else (False,):
            query = {"container": status["name"], "tailLines": LOG_LINES, "previous": str(previous).lower()}
            text = cluster.text(path, **query)
            if text is not None:
                end = "-previous" if previous else ""
                yield f"{folder}/{metadata['name']}-{status['name']}{end}.log", text.decode(errors="replace")


def _node(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a node that placement depends on."""
    status = node.get("status") or {}
    return {
        "name": node["metadata"]["name"],
        "labels": node["metadata"].get("labels"),
        "taints": (node.get("spec") or {}).get("taints"),
        "allocatable": status.get("allocatable"),
        "conditions": status.get("conditions"),
        "versions": status.get("nodeInfo"),
    }


def _yaml(value: Any) -> str:
    return yaml.safe_dump(mask(value), sort_keys=False, allow_unicode=True)


def mask(value: Any) -> Any:
    """Return a manifest with masked values of sensitive fields and without managed fields."""
    if isinstance(value, list):
        return [mask(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("name"), str) and "value" in value and SENSITIVE_NAME.search(value["name"]):
        return {**value, "value": MASK}  # an environment variable
    return {
        key: MASK if _is_sensitive(key, entry) else mask(entry)
        for key, entry in value.items()
        if key not in ("managedFields", LAST_APPLIED)
    }


def _is_sensitive(key: str, value: Any) -> bool:
    plain = str(key).lower().replace("-", "_")
    return isinstance(value, str) and bool(SENSITIVE_NAME.search(plain)) and not plain.endswith(SAFE_NAMES)


def mask_text(text: str) -> str:
    """Return text in which what looks like a credential is masked."""
    return SENSITIVE_TEXT.sub(MASK, text)
