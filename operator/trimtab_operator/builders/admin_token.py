"""One bearer token per resource, derived from a single secret of the operator's; pods hold only the hash.

So users' namespaces need no Secret, and reading a pod's arguments gives nobody access to the admin API.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

SECRET_KEY = "key"  # noqa: S105 - the name of a field
FORMER_KEY = "former-key"  # the name of a field: what `key` was before it was changed
SECRET_BYTES = 32


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def admin_token(secret: bytes, uid: str) -> str:
    """hex(HMAC-SHA256(secret, uid)): docs/reference/contract.md, section 7."""
    return hmac.new(secret, uid.encode(), hashlib.sha256).hexdigest()


def token_hash(token: str) -> str:
    """What the engine is started with."""
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Tokens:
    """The admin tokens of one resource: the `present` one, which new pods are told, and the `former` one, which pods
    keep that were started before the operator's secret was changed."""

    present: str = field(repr=False)
    former: str | None = field(default=None, repr=False)

    def for_hash(self, sha256: str | None) -> str:
        """The token of an engine that was started with this hash; of one whose hash is not known, the present one."""
        if self.former is not None and sha256 == token_hash(self.former):
            return self.former
        return self.present
