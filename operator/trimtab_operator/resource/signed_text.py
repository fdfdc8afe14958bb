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


def opened(text: str | None, *, key: str, kind: str, former_key: str | None = None) -> str | None:
    """What was sealed, with `key` or with the one before it; None when the text is missing, damaged or not ours."""
    try:
        outer = json.loads(text or "")
        signature, body = str(outer["signature"]), outer["state"]
        keys = (key,) if former_key is None else (key, former_key)
        is_ours = any(hmac.compare_digest(signature, _signature(body, one, kind)) for one in keys)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return str(body) if is_ours else None


def unverified(text: str | None) -> str | None:
    """What stands in sealed text, whoever wrote it: for readers without the key. None when it is missing or damaged."""
    try:
        return str(json.loads(text or "")["state"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _signature(body: str, key: str, kind: str) -> str:
    return hmac.new(key.encode(), f"{kind}:{body}".encode(), hashlib.sha256).hexdigest()
