"""StatefulSets of one replica group: one for the leader pod and one for the worker pods."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trimtab_operator.builders.admin_token import TokenHashes
from trimtab_operator.builders.engine_args import (
    group_flags,
    live_start_flags,
    start_value_args,
    with_start_values,
    without_flags,
)
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
from trimtab_operator.builders.overlay import apply_overlay
from trimtab_operator.builders.pod import pod_spec, worker_pod_spec
from trimtab_operator.builders.record import RECORD_ANNOTATION, Record, asked_of
from trimtab_operator.layout import layout_of
from trimtab_operator.resource.canonical_json import compact
from trimtab_operator.resource.live_parameters import caps_of
from trimtab_operator.resource.spec import DOWNLOADED, PIN, RESTARTED_AT, InferenceDeployment, Spec

GANG_BACKOFF_ANNOTATION = "trimtab.dev/gang-backoff"  # on a leader's StatefulSet: see observed/hold.py
REVISION_LENGTH = 10  # hex digits: 40 bits distinguish the few revisions of one resource
NO_RECORDS: Mapping[str, Record] = {}


def pod_template(deployment: InferenceDeployment, *, token_hashes: TokenHashes) -> dict[str, Any]:
    """Return the leader's pod template, shared by all groups. Labels and flags of a group are added later."""
    rendered = {
        "metadata": {"labels": common_labels(deployment)},
        "spec": pod_spec(deployment, token_hashes=token_hashes),
    }
    made = apply_overlay(rendered, deployment)
    if deployment.restarted_at is not None:
        metadata = made["metadata"]
        metadata["annotations"] = {**metadata.get("annotations", {}), RESTARTED_AT: deployment.restarted_at}
    return made


def revision_of(template: Mapping[str, Any], spec: Spec) -> str:
    """Return the hash of a pod template without the start values that are PATCHed to running engines."""
    (main,) = template["spec"]["containers"]
    hashed = _with_args(template, without_flags(main["args"], live_start_flags(spec)))
    return hashlib.sha256(compact(hashed).encode()).hexdigest()[:REVISION_LENGTH]


def _with_args(template: Mapping[str, Any], args: list[str]) -> dict[str, Any]:
    (main,) = template["spec"]["containers"]
    return {**template, "spec": {**template["spec"], "containers": [{**main, "args": args}]}}


@dataclass(frozen=True, slots=True)
class Rendered:
    """A resource with its rendered pod template, shared by all replicas.

    `asked` is the hash of the requested spec. `is_recorded` is True if the template is from a record.
    """

    deployment: InferenceDeployment
    template: Mapping[str, Any]
    revision: str
    asked: str
    is_recorded: bool = False

    @property
    def model_revision(self) -> str | None:
        """Pinned revision of a downloaded model; None for other models."""
        (main,) = self.template["spec"]["containers"]
        model = str(main["args"][1])
        pin = model.rpartition("@")[2]
        return pin if PIN.fullmatch(pin) and model.startswith(tuple(f"{scheme}://" for scheme in DOWNLOADED)) else None

    def with_start_values_of(self, pod: Mapping[str, Any]) -> Rendered:
        """Return the same revision with the live start values of another pod or pod template of it."""
        (main,) = self.template["spec"]["containers"]
        containers = (pod.get("spec") or {}).get("containers") or ()  # a pod may have injected sidecars
        other = [arg for container in containers for arg in container.get("args") or ()]
        return replace(
            self, template=_with_args(self.template, with_start_values(main["args"], other, self.deployment.spec))
        )

    @property
    def record(self) -> Record:
        """Record that is stored with each replica."""
        return Record(self.asked, self.deployment.image, self.template, caps_of(self.deployment))


def rendered(
    deployment: InferenceDeployment, *, token_hashes: TokenHashes, records: Mapping[str, Record] = NO_RECORDS
) -> Rendered:
    """Return the rendered resource: with the recorded pod template for its spec if there is one, else a new template.

    Live start values are always those of the spec.
    `records` are indexed by the hash of the requested spec (`records_of`).
    """
    asked = asked_of(deployment)
    record = records.get(asked)
    if record is None:
        template = pod_template(deployment, token_hashes=token_hashes)
    else:
        (main,) = record.template["spec"]["containers"]
        args = with_start_values(main["args"], start_value_args(deployment), deployment.spec)
        template = _with_args(record.template, args)
    return Rendered(deployment, template, revision_of(template, deployment.spec), asked, record is not None)


def leader_stateful_set(
    wanted: Rendered, ordinal: int, *, address: str | None = None, held: Held | None = None
) -> dict[str, Any]:
    """Return the leader's StatefulSet. `address` is the rendezvous address of a group with several pods."""
    name, selector = group_name(wanted.deployment, ordinal), group_selector(wanted.deployment, ordinal)
    made = _stateful_set(wanted, name, ordinal, selector, address)
    made["metadata"]["annotations"] = {RECORD_ANNOTATION: wanted.record.to_text()}
    if held is not None:
        made["metadata"]["annotations"][GANG_BACKOFF_ANNOTATION] = held.note
    return _with_replicas(made, 1, held)


def worker_stateful_set(wanted: Rendered, ordinal: int, *, address: str, held: Held | None = None) -> dict[str, Any]:
    """Return the workers' StatefulSet, from the leader's template, so that both have the same revision."""
    name, selector = worker_set_name(wanted.deployment, ordinal), worker_selector(wanted.deployment, ordinal)
    made = _stateful_set(wanted, name, ordinal, selector, address)
    made["spec"]["template"]["spec"] = worker_pod_spec(made["spec"]["template"]["spec"])
    return _with_replicas(made, layout_of(wanted.deployment.spec).pods - 1, held)


@dataclass(frozen=True, slots=True)
class Held:
    """Gang-scheduling back-off of a group. `note` is its annotation; `has_pods` is True if its pods exist."""

    note: str
    has_pods: bool


def _with_replicas(stateful_set: dict[str, Any], pods: int, held: Held | None) -> dict[str, Any]:
    stateful_set["spec"]["replicas"] = pods if held is None or held.has_pods else 0
    return stateful_set


def _stateful_set(
    wanted: Rendered, name: str, ordinal: int, selector: dict[str, str], address: str | None
) -> dict[str, Any]:
    """Return a StatefulSet.

    `Parallel`, because pods of a group wait for each other. `OnDelete`, because rollout/pod_replacement.py selects the
    pods to replace.
    """
    deployment, template, revision = wanted.deployment, wanted.template, wanted.revision
    own = {**selector, REVISION_LABEL: revision}
    metadata, pod = template["metadata"], template["spec"]
    if address is not None:
        (main,) = pod["containers"]
        flags = group_flags(address=address, revision=revision, role=selector[ROLE_LABEL])
        pod = {**pod, "containers": [{**main, "args": [*main["args"], *flags]}]}
        pod.setdefault("affinity", _anti_affinity(deployment, ordinal))
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


def _anti_affinity(deployment: InferenceDeployment, ordinal: int) -> dict[str, Any]:
    """Return a preferred anti-affinity between the pods of one group. template.spec.affinity replaces it.

    On GPUs gpusPerNode has the same effect; on the CPU it avoids sharing one node's cores.
    """
    group = {DEPLOYMENT_LABEL: deployment.name, GROUP_LABEL: str(ordinal)}
    term = {"labelSelector": {"matchLabels": group}, "topologyKey": "kubernetes.io/hostname"}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
