"""Secret with which the pods of a replica authenticate each other before they form one engine.

Its value is derived from the resource's admin token, which no pod has, so the operator can recreate a lost Secret.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

from trimtab_operator.builders.labels import common_labels, rendezvous_secret_name
from trimtab_operator.resource.spec import InferenceDeployment

RENDEZVOUS_SECRET_KEY = "secret"  # noqa: S105 - the name of a field
RENDEZVOUS_MOUNT = "/etc/trimtab/rendezvous"


def rendezvous_secret(deployment: InferenceDeployment, *, token: str) -> dict[str, Any]:
    """Return the Secret. `token` is the resource's admin token; see docs/reference/contract.md, section 7."""
    value = hmac.new(token.encode(), b"rendezvous", hashlib.sha256).hexdigest()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": rendezvous_secret_name(deployment),
            "namespace": deployment.namespace,
            "labels": common_labels(deployment),
        },
        "type": "Opaque",
        "data": {RENDEZVOUS_SECRET_KEY: base64.b64encode(value.encode()).decode()},
    }
