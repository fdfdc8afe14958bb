"""A fixed list of replicas from the command line."""

from __future__ import annotations

from urllib.parse import urlsplit

from trimtab_router.endpoints.endpoint import Endpoint

HTTP_PORT = 80


def parse_endpoint(url: str) -> Endpoint:
    """Return the endpoint of `http://HOST[:PORT][?admin=PORT]`; `admin` is the port of the state stream.

    Raises:
        ValueError: The URL is not of this form.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.username:
        raise ValueError(f"{url!r} is not http://HOST:PORT or http://HOST:PORT?admin=PORT")
    port = parts.port or HTTP_PORT
    admin_port: int | None = None
    if parts.query:
        name, _, value = parts.query.partition("=")
        if name != "admin" or not value.isdigit() or not 0 < int(value) < 1 << 16:
            raise ValueError(f"{url!r}: only ?admin=PORT may follow the port")
        admin_port = int(value)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Endpoint(name=f"{host}:{port}", host=parts.hostname, port=port, admin_port=admin_port)
