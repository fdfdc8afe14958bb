"""What a pod has for a model that is downloaded: a cache that it may write, and what the source wants of who asks.

Secrets go into the engine's container as files or variables; the operator renders their names and reads none of them.
"""

from __future__ import annotations

from typing import Any

from trimtab_operator.resource.spec import ModelSource, Scheme, Spec

CACHE_VOLUME, TOKEN_VOLUME = "trimtab-model-cache", "trimtab-hub-token"
CACHE_MOUNT = "/models/cache"
TOKEN_MOUNT, TOKEN_FILE = "/etc/trimtab/hub", "token"
ACCOUNTS_VOLUME, ACCOUNTS_MOUNT, ACCOUNTS_FILE = "trimtab-registry", "/etc/trimtab/registry", "config.json"
PULL_SECRET_KEY = ".dockerconfigjson"  # noqa: S105 - the key in Secrets of the type kubernetes.io/dockerconfigjson
OWN_CACHE_SIZE = "200Gi"  # of a pod's own cache: a node's disk is everybody's
S3_KEYS = {"AWS_ACCESS_KEY_ID": False, "AWS_SECRET_ACCESS_KEY": False, "AWS_SESSION_TOKEN": True}
"""Keys of the Secret, which are the variables too; whether one may be missing."""

SWITCH = object()  # in place of the value of a flag that has none


def download_flags(spec: Spec) -> dict[str, object | None]:
    """Where the engine keeps what it fetches, and how it asks for it."""
    if not spec.model.is_downloaded:
        return {}
    return {"--download-dir": CACHE_MOUNT, "--download-dir-size": _size(spec.model), **asking_flags(spec)}


def asking_flags(spec: Spec) -> dict[str, object | None]:
    """How the source is asked, also by who keeps nothing."""
    s3, oci = spec.model.s3, spec.model.oci
    has_accounts = oci is not None and oci.pull_secret is not None
    return {
        "--s3-addressing-style": None if s3 is None else s3.addressing,
        "--registry-auth-file": f"{ACCOUNTS_MOUNT}/{ACCOUNTS_FILE}" if has_accounts else None,
        "--registry-plain-http": SWITCH if oci is not None and oci.plain_http else None,
    }


def download_env(spec: Spec) -> list[dict[str, Any]]:
    """Where the sources' own libraries find token, keys and address. Nobody but the engine's container reads them."""
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
    """The volume for what is fetched, and its mount."""
    if not spec.model.is_downloaded:
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


def secret_volumes(spec: Spec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The volume with the hub's token or the registry's accounts, and its mount."""
    token, oci = spec.model.token_secret_ref, spec.model.oci
    if token is not None:
        return _as_file(TOKEN_VOLUME, token.name, token.key, TOKEN_MOUNT, TOKEN_FILE)
    if oci is not None and oci.pull_secret is not None:
        return _as_file(ACCOUNTS_VOLUME, oci.pull_secret, PULL_SECRET_KEY, ACCOUNTS_MOUNT, ACCOUNTS_FILE)
    return [], []


def pinned_uri(model: ModelSource, pin: str | None) -> str:
    """The uri with what its revision meant when the model was read; without that, as it is written."""
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
