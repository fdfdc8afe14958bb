"""Overlay of the user's pod template on the rendered pod. The `validation` package restricts the overlay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trimtab_operator.resource.allowed_privileges import LOCK_MEMORY, LOCK_MEMORY_SECURITY_CONTEXT
from trimtab_operator.resource.spec import ContainerOverlay, InferenceDeployment, PodOverlay

COPIED_FIELDS = {  # attribute of the overlay → field of the pod, copied unchanged
    "node_selector": "nodeSelector",
    "tolerations": "tolerations",
    "affinity": "affinity",
    "topology_spread_constraints": "topologySpreadConstraints",
    "image_pull_secrets": "imagePullSecrets",
    "priority_class_name": "priorityClassName",
    "runtime_class_name": "runtimeClassName",
    "scheduler_name": "schedulerName",
    "termination_grace_period_seconds": "terminationGracePeriodSeconds",
}


def apply_overlay(template: Mapping[str, Any], deployment: InferenceDeployment) -> dict[str, Any]:
    """Return the rendered pod template with the user's overlay; the arguments are not modified."""
    overlay = deployment.spec.template
    metadata = template["metadata"]
    merged = {
        "metadata": {**metadata, "labels": {**overlay.metadata.labels, **metadata["labels"]}},
        "spec": _pod(template["spec"], overlay.spec, deployment.allowed_privileges),
    }
    if overlay.metadata.annotations:
        merged["metadata"]["annotations"] = dict(overlay.metadata.annotations)
    return merged


def _pod(pod: Mapping[str, Any], overlay: PodOverlay, allowed_privileges: frozenset[str]) -> dict[str, Any]:
    merged = dict(pod)
    for attribute, field in COPIED_FIELDS.items():
        value = getattr(overlay, attribute)
        if value not in (None, (), {}):
            merged[field] = list(value) if isinstance(value, tuple) else value
    merged |= {name: value for name, value in (overlay.model_extra or {}).items() if name in allowed_privileges}
    if overlay.volumes:
        merged["volumes"] = [*pod["volumes"], *map(_volume, overlay.volumes)]
    if overlay.security_context:
        security = {**pod["securityContext"], **overlay.security_context}  # null removes a field, as OpenShift needs it
        merged["securityContext"] = {name: value for name, value in security.items() if value is not None}
    (main,) = pod["containers"]
    for container in overlay.containers:
        main = _container(main, container)
        if (
            LOCK_MEMORY in allowed_privileges
            and (container.model_extra or {}).get("securityContext") == LOCK_MEMORY_SECURITY_CONTEXT
        ):
            main = _with_memory_lock(main)
    merged["containers"] = [main]
    return merged


def _volume(volume: Mapping[str, Any]) -> dict[str, Any]:
    """Return the volume without `readOnly: false`, which the API server omits and which would be permanent drift."""
    claim = volume.get("persistentVolumeClaim")
    if not isinstance(claim, Mapping):
        return dict(volume)
    return {**volume, "persistentVolumeClaim": {k: v for k, v in claim.items() if v is not False}}


def _container(container: Mapping[str, Any], overlay: ContainerOverlay) -> dict[str, Any]:
    merged = dict(container)
    if overlay.resources:
        merged["resources"] = _resources(container.get("resources", {}), overlay.resources)
    if overlay.env:
        merged["env"] = _by_key(container["env"], overlay.env, "name")
    if overlay.env_from:
        merged["envFrom"] = list(overlay.env_from)
    if overlay.volume_mounts:
        mounts = [{k: v for k, v in mount.items() if v is not False} for mount in overlay.volume_mounts]
        merged["volumeMounts"] = _by_key(container["volumeMounts"], mounts, "mountPath")
    if overlay.image_pull_policy:
        merged["imagePullPolicy"] = overlay.image_pull_policy
    return merged


def _with_memory_lock(container: Mapping[str, Any]) -> dict[str, Any]:
    security = container["securityContext"]
    capabilities = {**security["capabilities"], **LOCK_MEMORY_SECURITY_CONTEXT["capabilities"]}
    return {**container, "securityContext": {**security, "capabilities": capabilities}}


def _resources(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    kinds = sorted({*base, *over})
    return {kind: {**base.get(kind, {}), **over.get(kind, {})} for kind in kinds}


def _by_key(base: Iterable[Mapping[str, Any]], over: Iterable[Mapping[str, Any]], key: str) -> list[Mapping[str, Any]]:
    """Merge two lists: items of `over` replace items of `base` with the same key and keep their position."""
    return list({item[key]: item for item in (*base, *over)}.values())
