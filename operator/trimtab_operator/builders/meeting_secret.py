"""The Secret that the pods of a replica of several prove to each other before they form one engine.

Its value is derived from the resource's admin token, which no pod holds: an operator that lost it makes the same again.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

from trimtab_operator.builders.labels import common_labels, meeting_secret_name
from trimtab_operator.resource.spec import InferenceDeployment

MEETING_SECRET_KEY = "secret"  # noqa: S105 - the name of a field
MEETING_MOUNT = "/etc/trimtab/meeting"


def meeting_secret(deployment: InferenceDeployment, *, token: str) -> dict[str, Any]:
    """`token` is the resource's admin token: docs/reference/contract.md, section 7."""
    value = hmac.new(token.encode(), b"meeting", hashlib.sha256).hexdigest()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": meeting_secret_name(deployment),
            "namespace": deployment.namespace,
            "labels": common_labels(deployment),
        },
        "type": "Opaque",
        "data": {MEETING_SECRET_KEY: base64.b64encode(value.encode()).decode()},
    }
