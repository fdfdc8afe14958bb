"""Admin bearer tokens (docs/reference/contract.md)."""

from __future__ import annotations

import hashlib
import hmac

from trimtab_operator.builders.admin_token import admin_token, token_hash


def test_the_token_is_the_contracts() -> None:
    token = admin_token(b"secret", "uid-1")
    assert token == hmac.new(b"secret", b"uid-1", hashlib.sha256).hexdigest()
    assert token_hash(token) == hashlib.sha256(token.encode()).hexdigest()


def test_each_resource_has_its_own() -> None:
    assert admin_token(b"secret", "uid-1") != admin_token(b"secret", "uid-2")
