"""Volumes, flags and environment of pods with a downloaded model: the cache and the credentials of the source.

Secrets are mounted or set as variables in the engine's container. The operator renders their names and reads none.
"""

from __future__ import annotations

from typing import Any

from trimtab_operator.resource.spec import ModelSource, Scheme, Spec

CACHE_VOLUME, TOKEN_VOLUME = "trimtab-model-cache", "trimtab-hub-token"
CACHE_MOUNT = "/models/cache"
TOKEN_MOUNT, TOKEN_FILE = "/etc/trimtab/hub", "token"
ACCOUNTS_VOLUME, ACCOUNTS_MOUNT, ACCOUNTS_FILE = "trimtab-registry", "/etc/trimtab/registry", "config.json"
PULL_SECRET_KEY = ".dockerconfigjson"  # noqa: S105 - the key in Secrets of the type kubernetes.io/dockerconfigjson
OWN_CACHE_SIZE = "200Gi"  # of a cache in the pod, which shares the node's disk with other pods
S3_KEYS = {"AWS_ACCESS_KEY_ID": False, "AWS_SECRET_ACCESS_KEY": False, "AWS_SESSION_TOKEN": True}
"""Keys of the Secret, which are also the names of the variables; True if a key is optional."""

SWITCH = object()  # value of a flag without a value


def download_flags(spec: Spec) -> dict[str, object | None]:
    """Return the engine's flags for the download folder and the source."""
    if not spec.model.is_downloaded:
        return {}
    return {"--download-dir": CACHE_MOUNT, "--download-dir-size": _size(spec.model), **source_flags(spec)}


def source_flags(spec: Spec) -> dict[str, object | None]:
    """Return the flags for access to the source, also used by the Job that reads the model."""
    s3, oci = spec.model.s3, spec.model.oci
    has_accounts = oci is not None and oci.pull_secret is not None
    return {
        "--s3-addressing-style": None if s3 is None else s3.addressing,
        "--registry-auth-file": f"{ACCOUNTS_MOUNT}/{ACCOUNTS_FILE}" if has_accounts else None,
        "--registry-plain-http": SWITCH if oci is not None and oci.plain_http else None,
    }


def download_env(spec: Spec) -> list[dict[str, Any]]:
    """Return the variables with token, keys and endpoint for the sources' libraries. Only the engine's container has
    them.
    """
    found: list[dict[str, Any]] = []
    if spec.model.token_secret_ref is not None:
        found.append({"name": "HF_TOKEN_PATH", "value": f"{TOKEN_MOUNT}/{TOKEN_FILE}"})
    s3 = spec.model.s3
    if s3 is None:
        return found
    if s3.endpoint is not None:
        found.append({"name": "AWS_ENDPOINT_URL", "value": s3.endpoint})
    if s3.region is not None:
        found.append({"name": "AWS_DEFAULT_REGION", "value": s3.region})
    if s3.credentials_secret is not None:
        for key, is_optional in S3_KEYS.items():
            reference = {"name": s3.credentials_secret, "key": key} | ({"optional": True} if is_optional else {})
            found.append({"name": key, "valueFrom": {"secretKeyRef": reference}})
    return found


def cache_volumes(spec: Spec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volume of the download cache and its mount."""
    if not spec.model.is_downloaded:
        return [], []
    claim = cache_claim(spec)
    if claim is None:
        source: dict[str, Any] = {"emptyDir": {"sizeLimit": _size(spec.model)}}
    else:
        source = {"persistentVolumeClaim": {"claimName": claim}}
    return [{"name": CACHE_VOLUME, **source}], [{"name": CACHE_VOLUME, "mountPath": CACHE_MOUNT}]


def cache_claim(spec: Spec) -> str | None:
    """Return the PersistentVolumeClaim of the cache; None if the cache is a volume of the pod."""
    return None if spec.model.cache is None else spec.model.cache.claim_name


def secret_volumes(spec: Spec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volume with the hub's token or the registry's credentials, and its mount."""
    token, oci = spec.model.token_secret_ref, spec.model.oci
    if token is not None:
        return _as_file(TOKEN_VOLUME, token.name, token.key, TOKEN_MOUNT, TOKEN_FILE)
    if oci is not None and oci.pull_secret is not None:
        return _as_file(ACCOUNTS_VOLUME, oci.pull_secret, PULL_SECRET_KEY, ACCOUNTS_MOUNT, ACCOUNTS_FILE)
    return [], []


def pinned_uri(model: ModelSource, pin: str | None) -> str:
    """Return the uri with the pinned revision; with the revision of the spec if there is no pin."""
    place, revision = model.parts
    wanted = pin or revision
    if wanted is None:
        return f"{model.scheme}://{place}"
    is_tag = model.scheme is Scheme.OCI and not wanted.startswith("sha256:")
    return f"{model.scheme}://{place}{':' if is_tag else '@'}{wanted}"


def _as_file(volume: str, secret: str, key: str, mount: str, file: str) -> tuple[list[Any], list[Any]]:
    source = {"secretName": secret, "items": [{"key": key, "path": file}]}
    return [{"name": volume, "secret": source}], [{"name": volume, "mountPath": mount, "readOnly": True}]


def _size(model: ModelSource) -> str | None:
    cache = model.cache
    if cache is not None and (cache.size is not None or cache.claim_name is not None):
        return cache.size
    return OWN_CACHE_SIZE
