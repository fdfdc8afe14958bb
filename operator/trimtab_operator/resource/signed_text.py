"""Signed text in ConfigMaps. The operator ignores text that it has not signed. Pure.

A user with write access to ConfigMaps must not be able to control the operator or the engines' parameters.
"""

from __future__ import annotations

import hashlib
import hmac
import json


def sign(body: str, *, key: str, kind: str) -> str:
    """Return the signed text. `kind` is part of the signature, so that one kind is not valid as another."""
    return json.dumps({"signature": _signature(body, key, kind), "state": body}, indent=1)


def verify(text: str | None, *, key: str, kind: str, former_key: str | None = None) -> str | None:
    """Return the body of signed text. None if the text is missing or malformed, or the signature is invalid.

    `former_key` is also accepted, for text from before a key rotation.
    """
    try:
        outer = json.loads(text or "")
        signature, body = str(outer["signature"]), outer["state"]
        keys = (key,) if former_key is None else (key, former_key)
        is_ours = any(hmac.compare_digest(signature, _signature(body, one, kind)) for one in keys)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return str(body) if is_ours else None


def read_unverified(text: str | None) -> str | None:
    """Return the body without verifying the signature, for readers without the key. None if missing or malformed."""
    try:
        return str(json.loads(text or "")["state"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _signature(body: str, key: str, kind: str) -> str:
    return hmac.new(key.encode(), f"{kind}:{body}".encode(), hashlib.sha256).hexdigest()
