"""The address of one replica."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica as its source lists it: a Service's EndpointSlice, or the command line."""

    name: str
    """Unique name: the pod's name, or host:port."""
    host: str
    """IP address or DNS name, without brackets."""
    port: int
    """Port of the API."""
    admin_port: int | None = None
    """Port of the state stream; None if the replica has none."""
    ready: bool = True
    """False while the pod is not Ready or is being deleted: no new requests, but requests in flight continue."""
