"""One bearer token per resource, derived from a single secret of the operator's; pods hold only the hash.

So users' namespaces need no Secret, and reading a pod's arguments gives nobody access to the admin API.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

SECRET_KEY = "key"  # noqa: S105 - the name of a field
SECRET_BYTES = 32


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def admin_token(secret: bytes, uid: str) -> str:
    """hex(HMAC-SHA256(secret, uid)): docs/contract.md, section 7."""
    return hmac.new(secret, uid.encode(), hashlib.sha256).hexdigest()


def token_hash(token: str) -> str:
    """What the engine is started with."""
    return hashlib.sha256(token.encode()).hexdigest()
