"""Settings of one router, from its command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab_router.endpoints.endpoint import Endpoint

DEFAULT_MAX_BODY_BYTES = 64 << 20
"""The engine's limit for vision models; engines apply their own lower one."""
DEFAULT_MAX_HELD_REQUESTS = 10_000
DEFAULT_MAX_HELD_BYTES = 1 << 30
DEFAULT_MAX_HOLD_SECONDS = 600.0
DEFAULT_DRAIN_TIMEOUT_SECONDS = 630.0


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of one router."""

    host: str = "0.0.0.0"
    port: int = 8000
    admin_host: str = "0.0.0.0"
    admin_port: int = 8002
    processes: int = 1
    service: str | None = None
    """NAMESPACE/NAME of the headless Service whose EndpointSlices list the replicas."""
    endpoints: tuple[Endpoint, ...] = ()
    """Fixed replicas, if there is no Service."""
    served_models: tuple[str, ...] = ()
    """Names of the base model: other values of a request's `model` are adapters."""
    max_hold_seconds: float = DEFAULT_MAX_HOLD_SECONDS
    max_held_requests: int = DEFAULT_MAX_HELD_REQUESTS
    max_held_bytes: int = DEFAULT_MAX_HELD_BYTES
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Priority by name, as in Kubernetes: higher values are served first. `default` applies to other requests."""
    key_priorities: Mapping[str, str] = field(default_factory=dict)
    """Name of a priority by the SHA-256 of an API key, in hexadecimal digits."""
    priority_header: str = "x-trimtab-priority"
    tenant_header: str = "x-trimtab-tenant"
    session_header: str = "x-session-id"
    trust_headers: bool = False
    """True to use the priority and tenant headers of clients; otherwise they are removed."""
    salt_api_keys: bool = False
    """True if the engines separate prefix caches by API key (several `--api-key`)."""
    itl_target_seconds: float | None = None
    admin_token_sha256: str | None = None
    drain_timeout_seconds: float = DEFAULT_DRAIN_TIMEOUT_SECONDS
    endpoint_picker_port: int | None = None
    """Port of the endpoint picker; None for none."""
    endpoint_picker_tls: tuple[str, str] | None = None
    """Files with the endpoint picker's private key and certificate chain."""
    access_log: bool = False
    log_level: str = "info"

    def band(self, priority: str | None) -> int:
        """Return the queue's band of a named priority; unknown names are the default priority."""
        value = self.priorities.get(priority or "default")
        return -(self.priorities.get("default", 0) if value is None else value)
