"""Volume and mount of a model on a PersistentVolumeClaim or in an image volume."""

from __future__ import annotations

from typing import Any

from trimtab_operator.resource.spec import Scheme, Spec

MODEL_VOLUME, MODEL_MOUNT = "model", "/models/claim"


def mounted_path(spec: Spec) -> str | None:
    """Return the path of the model in the pod; None if it is not in a volume."""
    folder = _folder(spec)
    if folder is None:
        return None
    return f"{MODEL_MOUNT}/{folder}" if folder else MODEL_MOUNT


def model_claim(spec: Spec) -> str | None:
    """Return the PersistentVolumeClaim of a pvc:// model; None for others."""
    return spec.model.parts[0].split("/", 1)[0] if spec.model.scheme is Scheme.CLAIM else None


def model_volumes(spec: Spec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volume with the model and its read-only mount."""
    claim = model_claim(spec)
    if claim is not None:
        source: dict[str, Any] = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    elif spec.model.is_in_image_volume:
        reference = spec.model.uri.partition("://")[2]
        source = {"image": {"reference": reference, "pullPolicy": "IfNotPresent"}}
    else:
        return [], []
    mount = {"name": MODEL_VOLUME, "mountPath": MODEL_MOUNT, "readOnly": True}
    return [{"name": MODEL_VOLUME, **source}], [mount]


def _folder(spec: Spec) -> str | None:
    """Return the model's folder in its volume; None if it is not in a volume."""
    if spec.model.scheme is Scheme.CLAIM:
        return spec.model.parts[0].partition("/")[2].strip("/")
    if spec.model.is_in_image_volume and spec.model.oci is not None:
        return (spec.model.oci.folder or "").strip("/")
    return None
