"""Text that the operator signs before it keeps it in a ConfigMap, and believes only if it has signed it. Pure.

Whoever may write ConfigMaps may not thereby choose what the operator runs, or to which values it sets engines.
"""

from __future__ import annotations

import hashlib
import hmac
import json


def sealed(body: str, *, key: str, kind: str) -> str:
    """The text to keep. `kind` says what it is: one kind of text does not pass for another."""
    return json.dumps({"signature": _signature(body, key, kind), "state": body}, indent=1)


def opened(text: str | None, *, key: str, kind: str) -> str | None:
    """What was sealed; None when the text is missing, damaged or not ours."""
    try:
        outer = json.loads(text or "")
        body = outer["state"]
        if not hmac.compare_digest(str(outer["signature"]), _signature(body, key, kind)):
            return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return str(body)


def _signature(body: str, key: str, kind: str) -> str:
    return hmac.new(key.encode(), f"{kind}:{body}".encode(), hashlib.sha256).hexdigest()
