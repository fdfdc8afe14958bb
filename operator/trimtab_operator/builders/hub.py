"""What a pod has for a model of the Hugging Face hub: a cache that it may write, and the token, as files."""

from __future__ import annotations

from typing import Any

from trimtab_operator.resource.spec import ModelSource, Spec

CACHE_VOLUME, TOKEN_VOLUME = "trimtab-model-cache", "trimtab-hub-token"
CACHE_MOUNT = "/models/cache"
TOKEN_MOUNT, TOKEN_FILE = "/etc/trimtab/hub", "token"
OWN_CACHE_SIZE = "200Gi"  # of a pod's own cache: a node's disk is everybody's


def hub_flags(spec: Spec) -> dict[str, object | None]:
    """Where the engine keeps what it fetches."""
    if not spec.model.is_of_hub:
        return {}
    return {"--download-dir": CACHE_MOUNT, "--download-dir-size": _size(spec.model)}


def hub_env(spec: Spec) -> list[dict[str, str]]:
    """Where huggingface_hub finds the token. Nobody but the engine's container reads it."""
    if spec.model.token_secret_ref is None:
        return []
    return [{"name": "HF_TOKEN_PATH", "value": f"{TOKEN_MOUNT}/{TOKEN_FILE}"}]


def cache_volumes(spec: Spec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The volume for what is fetched, and its mount."""
    if not spec.model.is_of_hub:
        return [], []
    claim = cache_claim(spec)
    if claim is None:
        source: dict[str, Any] = {"emptyDir": {"sizeLimit": _size(spec.model)}}
    else:
        source = {"persistentVolumeClaim": {"claimName": claim}}
    return [{"name": CACHE_VOLUME, **source}], [{"name": CACHE_VOLUME, "mountPath": CACHE_MOUNT}]


def cache_claim(spec: Spec) -> str | None:
    """The claim that holds what is fetched; None: a volume of the pod's own does."""
    return None if spec.model.cache is None else spec.model.cache.claim_name


def token_volumes(spec: Spec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The volume with the token, and its mount."""
    secret = spec.model.token_secret_ref
    if secret is None:
        return [], []
    items = [{"key": secret.key, "path": TOKEN_FILE}]
    volume = {"name": TOKEN_VOLUME, "secret": {"secretName": secret.name, "items": items}}
    return [volume], [{"name": TOKEN_VOLUME, "mountPath": TOKEN_MOUNT, "readOnly": True}]


def _size(model: ModelSource) -> str | None:
    cache = model.cache
    if cache is not None and (cache.size is not None or cache.claim_name is not None):
        return cache.size
    return OWN_CACHE_SIZE
