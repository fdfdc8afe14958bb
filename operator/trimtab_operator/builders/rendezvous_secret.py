"""Secret with which the pods of a replica authenticate each other before they form one engine.

All resources of a namespace share one Secret of a fixed name, with one key each, so that the operator's role can name
it and gives access to no other Secret. The value is derived from the resource's admin token, which no pod has, so the
operator can recreate a lost Secret.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

from trimtab_operator.builders.labels import MANAGED_BY, RENDEZVOUS_SECRET_NAME
from trimtab_operator.resource.spec import InferenceDeployment

RENDEZVOUS_FILE = "secret"
RENDEZVOUS_MOUNT = "/etc/trimtab/rendezvous"


def rendezvous_volume(deployment: InferenceDeployment) -> dict[str, Any]:
    """Return the volume with the resource's value as the file RENDEZVOUS_FILE."""
    items = [{"key": deployment.name, "path": RENDEZVOUS_FILE}]
    return {"name": "rendezvous", "secret": {"secretName": RENDEZVOUS_SECRET_NAME, "items": items}}


def rendezvous_secret(deployment: InferenceDeployment, *, token: str) -> dict[str, Any]:
    """Return the Secret. `token` is the resource's admin token; see docs/reference/contract.md, section 7."""
    value = hmac.new(token.encode(), b"rendezvous", hashlib.sha256).hexdigest()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": RENDEZVOUS_SECRET_NAME,
            "namespace": deployment.namespace,
            "labels": {"app.kubernetes.io/managed-by": MANAGED_BY, "app.kubernetes.io/part-of": "trimtab"},
        },
        "type": "Opaque",
        "data": {deployment.name: base64.b64encode(value.encode()).decode()},
    }
