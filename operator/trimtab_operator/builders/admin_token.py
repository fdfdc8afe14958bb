"""Admin bearer tokens, one per resource, derived from the operator's secret. Pods have only the hash.

Therefore users' namespaces need no Secret, and a pod's arguments do not give access to the admin API.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

SECRET_KEY = "key"  # noqa: S105 - the name of a field
FORMER_KEY = "former-key"  # the name of a field: the previous value of `key`
SECRET_BYTES = 32


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def admin_token(secret: bytes, uid: str) -> str:
    """Return hex(HMAC-SHA256(secret, uid)); see docs/reference/contract.md, section 7."""
    return hmac.new(secret, uid.encode(), hashlib.sha256).hexdigest()


def state_token(admin_token: str) -> str:
    """Return the token with which routers read the state of engines. It permits nothing else."""
    return _derive(admin_token, "state")


def router_token(admin_token: str) -> str:
    """Return the token of the routers' admin port, so that a router is never sent the token of the engines."""
    return _derive(admin_token, "router")


def _derive(admin_token: str, purpose: str) -> str:
    return hmac.new(admin_token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def token_hash(token: str) -> str:
    """Return the hash of a token, which is an argument of the engine."""
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TokenHashes:
    """Hashes of an engine's tokens: of the admin API, and of the state stream for routers."""

    admin: str
    state: str

    @classmethod
    def of(cls, token: str) -> TokenHashes:
        """Return the hashes of a resource's admin token and of the state token that is derived from it."""
        return cls(token_hash(token), token_hash(state_token(token)))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Admin tokens of one resource: `present` for new pods, `former` for pods from before a rotation of the secret."""

    present: str = field(repr=False)
    former: str | None = field(default=None, repr=False)

    def for_hash(self, sha256: str | None) -> str:
        """Return the token of an engine with this hash; the present token if the hash is unknown."""
        if self.former is not None and sha256 == token_hash(self.former):
            return self.former
        return self.present
