"""The StatefulSets of one replica group: the leader's one pod and the workers', which come back under their names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_operator.builders.engine_args import group_flags
from trimtab_operator.builders.labels import (
    DEPLOYMENT_LABEL,
    GROUP_LABEL,
    REVISION_LABEL,
    ROLE_LABEL,
    common_labels,
    group_name,
    group_selector,
    worker_selector,
    worker_set_name,
)
from trimtab_operator.builders.overlay import lay_over
from trimtab_operator.builders.pod import pod_spec, worker_pod_spec
from trimtab_operator.builders.record import RECORD_ANNOTATION, Record, asked_of
from trimtab_operator.layout import layout_of
from trimtab_operator.resource.canonical_json import compact
from trimtab_operator.resource.spec import DOWNLOADED, PIN, RESTARTED_AT, InferenceDeployment

GANG_BACKOFF_ANNOTATION = "trimtab.dev/gang-backoff"  # on a leader's StatefulSet: see observed/hold.py
REVISION_LENGTH = 10  # hex digits: 40 bits tell the few revisions of one resource apart
NO_RECORDS: Mapping[str, Record] = {}


def pod_template(deployment: InferenceDeployment, *, admin_token_sha256: str) -> dict[str, Any]:
    """The leader's pod template, which all groups share; labels and flags of a group's own are added to it below."""
    rendered = {
        "metadata": {"labels": common_labels(deployment)},
        "spec": pod_spec(deployment, admin_token_sha256=admin_token_sha256),
    }
    made = lay_over(rendered, deployment)
    if deployment.restarted_at is not None:
        metadata = made["metadata"]
        metadata["annotations"] = {**metadata.get("annotations", {}), RESTARTED_AT: deployment.restarted_at}
    return made


def revision_of(template: Mapping[str, Any]) -> str:
    """Hash of a pod template: equal templates, equal revision."""
    return hashlib.sha256(compact(template).encode()).hexdigest()[:REVISION_LENGTH]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A resource and what its replicas are rendered from: done once, used for all of them. `asked` names what was asked
    for; `is_recorded`: the template is the one that replicas were rendered from before."""

    deployment: InferenceDeployment
    template: Mapping[str, Any]
    revision: str
    asked: str
    is_recorded: bool = False

    @property
    def model_revision(self) -> str | None:
        """The pin of a downloaded model that these replicas serve; None of other models."""
        (main,) = self.template["spec"]["containers"]
        model = str(main["args"][1])
        pin = model.rpartition("@")[2]
        return pin if PIN.fullmatch(pin) and model.startswith(tuple(f"{scheme}://" for scheme in DOWNLOADED)) else None

    @property
    def record(self) -> Record:
        """What a replica keeps of it."""
        return Record(self.asked, self.deployment.image, self.template)


def rendered(
    deployment: InferenceDeployment, *, admin_token_sha256: str, records: Mapping[str, Record] = NO_RECORDS
) -> Rendered:
    """The pod template of a resource, named by its hash: the one that `records` hold for what is asked, or a new one.

    `records` are by what was asked for (`records_of`).
    """
    asked = asked_of(deployment)
    record = records.get(asked)
    template = pod_template(deployment, admin_token_sha256=admin_token_sha256) if record is None else record.template
    return Rendered(deployment, template, revision_of(template), asked, record is not None)


def leader_stateful_set(
    wanted: Rendered, ordinal: int, *, address: str | None = None, held: Held | None = None
) -> dict[str, Any]:
    """The StatefulSet of the group's leader. `address`: where the ranks of a group of several pods meet."""
    name, selector = group_name(wanted.deployment, ordinal), group_selector(wanted.deployment, ordinal)
    made = _stateful_set(wanted, name, ordinal, selector, address)
    made["metadata"]["annotations"] = {RECORD_ANNOTATION: wanted.record.to_text()}
    if held is not None:
        made["metadata"]["annotations"][GANG_BACKOFF_ANNOTATION] = held.note
    return _sized(made, 1, held)


def worker_stateful_set(wanted: Rendered, ordinal: int, *, address: str, held: Held | None = None) -> dict[str, Any]:
    """The StatefulSet of the workers of a group of several pods, from the leader's template: one revision for both."""
    name, selector = worker_set_name(wanted.deployment, ordinal), worker_selector(wanted.deployment, ordinal)
    made = _stateful_set(wanted, name, ordinal, selector, address)
    made["spec"]["template"]["spec"] = worker_pod_spec(made["spec"]["template"]["spec"])
    return _sized(made, layout_of(wanted.deployment.spec).pods - 1, held)


@dataclass(frozen=True, slots=True)
class Held:
    """A group that gave its pods back because not all found a node. `note` is kept with it, `has_pods` by the time."""

    note: str
    has_pods: bool


def _sized(stateful_set: dict[str, Any], pods: int, held: Held | None) -> dict[str, Any]:
    stateful_set["spec"]["replicas"] = pods if held is None or held.has_pods else 0
    return stateful_set


def _stateful_set(
    wanted: Rendered, name: str, ordinal: int, selector: dict[str, str], address: str | None
) -> dict[str, Any]:
    """Parallel: pods of a group wait for each other. OnDelete: rollout/pod_replacement.py says which are replaced."""
    deployment, template, revision = wanted.deployment, wanted.template, wanted.revision
    own = {**selector, REVISION_LABEL: revision}
    metadata, pod = template["metadata"], template["spec"]
    if address is not None:
        (main,) = pod["containers"]
        flags = group_flags(address=address, revision=revision, role=selector[ROLE_LABEL])
        pod = {**pod, "containers": [{**main, "args": [*main["args"], *flags]}]}
        pod.setdefault("affinity", _apart(deployment, ordinal))
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {
            "name": name,
            "namespace": deployment.namespace,
            "labels": {**common_labels(deployment), **own},
        },
        "spec": {
            "replicas": 1,
            "serviceName": group_name(deployment, ordinal),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": selector},
            "template": {
                "metadata": {**metadata, "labels": {**metadata["labels"], **own}},
                "spec": pod,
            },
        },
    }


def _apart(deployment: InferenceDeployment, ordinal: int) -> dict[str, Any]:
    """The pods of one group rather on different nodes: asked for, not insisted on. template.spec.affinity replaces it.

    On GPUs that follows from gpusPerNode anyway; on the CPU nothing else would keep them off one node's cores.
    """
    group = {DEPLOYMENT_LABEL: deployment.name, GROUP_LABEL: str(ordinal)}
    term = {"labelSelector": {"matchLabels": group}, "topologyKey": "kubernetes.io/hostname"}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
