"""A request in the terms of routing: prompt, prefix keys, tenant, priority."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Protocol

import orjson

from trimtab_router.config import RouterConfig
from trimtab_router.proxy.http1 import RequestHead
from trimtab_router.proxy.routes import COMPUTE_PATHS
from trimtab_router.scoring.state import RoutedRequest

MAX_CONTAINERS = 200_000
"""JSON arrays and objects in a body that is parsed: each takes about 64 bytes of memory, so a few megabytes of brackets
would take hundreds."""
ASSUMED_BYTES_PER_TOKEN = 4
"""For bodies whose prompt is not known, such as embeddings."""
TENANT_DIGITS = 16
MAX_NAME_BYTES = 128


class RequestRouter(Protocol):
    """The part of the registry that knows prefix keys, adapters and token lengths."""

    def routed_request(
        self,
        body: dict[str, Any],
        *,
        path: str,
        api_key: bytes | None,
        tenant: str,
        priority: int,
        session: str | None,
    ) -> RoutedRequest:
        """Return a request in the terms of routing."""


@dataclass(frozen=True, slots=True)
class Description:
    """A request's body in the terms of routing."""

    routed: RoutedRequest
    computes: bool
    """True if a replica computes a prompt for it; otherwise the request only needs a tokenizer."""
    is_stream: bool
    """True if the client wants the answer as a stream of events."""


class Describer:
    """Describes requests for scoring. A request that cannot be parsed is still routed: the engine rejects it."""

    def __init__(self, config: RouterConfig, registry: RequestRouter) -> None:
        self._config, self._registry = config, registry
        self._priority_header = config.priority_header.lower().encode()
        self._tenant_header = config.tenant_header.lower().encode()
        self._session_header = config.session_header.lower().encode()
        self.untrusted_headers = (
            frozenset() if config.trust_headers else frozenset((self._priority_header, self._tenant_header))
        )
        """Lower-case names of headers that are removed from requests."""

    def describe(self, head: RequestHead, body: bytes | bytearray) -> Description:
        """Return the description of a request for the model."""
        api_key = _api_key(head)
        tenant, band = self._identity(head, api_key)
        fields = _parse(body)
        routed = self._registry.routed_request(
            fields,
            path=head.path,
            api_key=api_key,
            tenant=tenant,
            priority=band,
            session=_text(head.fields.get(self._session_header)),
        )
        if not routed.prompt_tokens:
            routed = replace(routed, prompt_tokens=1 + len(body) // ASSUMED_BYTES_PER_TOKEN)
        return Description(
            routed, computes=head.path in COMPUTE_PATHS, is_stream=fields.get("stream") is True and head.is_http11
        )

    def _identity(self, head: RequestHead, api_key: bytes | None) -> tuple[str, int]:
        """Return tenant and priority band."""
        config = self._config
        digest = hashlib.sha256(api_key).hexdigest() if api_key else ""
        tenant, priority = digest[:TENANT_DIGITS], config.key_priorities.get(digest)
        if config.trust_headers:
            tenant = _text(head.fields.get(self._tenant_header)) or tenant
            priority = _text(head.fields.get(self._priority_header)) or priority
        return tenant, config.band(priority)


def _parse(body: bytes | bytearray) -> dict[str, Any]:
    if len(body) > MAX_CONTAINERS and body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        return {}
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _api_key(head: RequestHead) -> bytes | None:
    scheme, _, key = head.fields.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip()
    return head.fields.get(b"x-api-key") or None  # of Anthropic's clients


def _text(value: bytes | None) -> str | None:
    return value[:MAX_NAME_BYTES].decode("latin-1") if value else None
