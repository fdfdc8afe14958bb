"""Flags of `trimtab-router`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import NoReturn

from trimtab_router.config import (
    DEFAULT_DRAIN_TIMEOUT_SECONDS,
    DEFAULT_MAX_BODY_BYTES,
    DEFAULT_MAX_HELD_BYTES,
    DEFAULT_MAX_HELD_REQUESTS,
    DEFAULT_MAX_HOLD_SECONDS,
    RouterConfig,
)
from trimtab_router.endpoints.fixed import parse_endpoint

UNITS_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
UNITS_BYTES = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "k": 10**3, "M": 10**6, "G": 10**9}
LOOPBACK = "127.0.0.1"
LOG_LEVELS = ("debug", "info", "warning", "error")


class ConfigError(Exception):
    """The command line does not allow a router."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see trimtab-router --help")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(
        prog="trimtab-router",
        description="Sends each request to the replica that is predicted to answer first.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trimtab-router {_version()}")
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="0.0.0.0", help="listen address (default: %(default)s)")
    server.add_argument("--port", type=_port, default=8000, help="port of the API (default: %(default)s)")
    server.add_argument(
        "--admin-port",
        type=_port,
        default=8002,
        help="port of probes, /metrics and the admin API (default: %(default)s)",
    )
    server.add_argument(
        "--admin-token-sha256",
        type=_sha256,
        metavar="HEX",
        help="SHA-256 of the admin token; without it the admin port listens on loopback only",
    )
    server.add_argument(
        "--processes",
        type=_positive,
        default=1,
        metavar="N",
        help="worker processes that share the port; each routes on its own (default: %(default)s)",
    )
    server.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=DEFAULT_DRAIN_TIMEOUT_SECONDS,
        metavar="DURATION",
        help="time for requests in progress after SIGTERM, such as 630s (default: %(default)s seconds)",
    )
    server.add_argument(
        "--max-body-bytes",
        type=_bytes,
        default=DEFAULT_MAX_BODY_BYTES,
        metavar="BYTES",
        help="size of a request's body, such as 8Mi (default: 64Mi)",
    )
    server.add_argument("--access-log", action="store_true", help="log each request as a JSON object")
    server.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="log level (default: %(default)s)")
    picker = parser.add_argument_group("endpoint picker (Gateway API Inference Extension)")
    picker.add_argument(
        "--endpoint-picker-port",
        type=_port,
        metavar="PORT",
        help="port on which gateways request choices of replicas over gRPC, in addition to the proxy (default: none)",
    )
    picker.add_argument(
        "--endpoint-picker-tls",
        nargs=2,
        metavar=("KEY", "CERTIFICATE"),
        help="PEM files of that port (default: no TLS)",
    )
    _add_replica_flags(parser.add_argument_group("replicas"))
    _add_hold_flags(parser.add_argument_group("holding and priorities"))
    return parser


def _add_replica_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--service",
        type=_service,
        metavar="NAMESPACE/NAME",
        help="headless Service whose EndpointSlices list the replicas; its ports are named http and admin",
    )
    group.add_argument(
        "--endpoint",
        type=_checked(parse_endpoint),
        action="append",
        default=[],
        metavar="URL",
        help="a fixed replica: http://HOST:PORT, with ?admin=PORT if it has a state stream; repeatable",
    )
    group.add_argument(
        "--served-model",
        action="append",
        default=[],
        metavar="NAME",
        help="a name of the base model; other models are adapters. Repeatable (default: the names that engines report)",
    )
    group.add_argument(
        "--itl-target",
        type=_seconds,
        metavar="DURATION",
        help="objective of the inter-token latency, such as 50ms: replicas with longer steps are used last "
        "(default: none)",
    )


def _add_hold_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-hold",
        type=_seconds,
        default=DEFAULT_MAX_HOLD_SECONDS,
        metavar="DURATION",
        help="longest time that a request waits for a replica, such as 10m; 0 rejects at once "
        "(default: %(default)s seconds)",
    )
    group.add_argument(
        "--max-held-requests",
        type=_positive,
        default=DEFAULT_MAX_HELD_REQUESTS,
        metavar="N",
        help="requests that may wait in one process (default: %(default)s)",
    )
    group.add_argument(
        "--max-held-bytes",
        type=_bytes,
        default=DEFAULT_MAX_HELD_BYTES,
        metavar="BYTES",
        help="memory of request bodies in one process, such as 1Gi (default: 1Gi)",
    )
    group.add_argument(
        "--priority",
        type=_priority,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a priority; higher values are served first. `default` applies to other requests (default: 0). Repeatable",
    )
    group.add_argument(
        "--key-priority",
        type=_key_priority,
        action="append",
        default=[],
        metavar="SHA256=NAME",
        help="the priority of an API key, given by its SHA-256. Repeatable",
    )
    group.add_argument(
        "--priority-header",
        default="x-trimtab-priority",
        metavar="NAME",
        help="header with the name of a priority, with --trust-headers (default: %(default)s)",
    )
    group.add_argument(
        "--tenant-header",
        default="x-trimtab-tenant",
        metavar="NAME",
        help="header with the tenant, with --trust-headers; otherwise tenants are API keys (default: %(default)s)",
    )
    group.add_argument(
        "--session-header",
        default="x-session-id",
        metavar="NAME",
        help="header with the session, which decides between equal replicas (default: %(default)s)",
    )
    group.add_argument(
        "--trust-headers",
        action="store_true",
        help="use the priority and tenant headers of clients; without it they are removed",
    )


def parse_arguments(arguments: Sequence[str]) -> RouterConfig:
    """Return the settings of a command line.

    Raises:
        ConfigError: A flag is wrong.
    """
    given = build_parser().parse_args(arguments)
    if (given.service is None) == (not given.endpoint):
        raise ConfigError("replicas: give either --service NAMESPACE/NAME or --endpoint URL")
    names = [endpoint.name for endpoint in given.endpoint]
    if len(set(names)) != len(names):
        raise ConfigError("--endpoint: the same address is given twice")
    priorities = dict(given.priority)
    for _, name in given.key_priority:
        if name not in priorities:
            raise ConfigError(f"--key-priority: no --priority {name}=VALUE is given")
    return RouterConfig(
        host=given.host,
        port=given.port,
        admin_host=given.host if given.admin_token_sha256 else LOOPBACK,
        admin_port=given.admin_port,
        processes=given.processes,
        service=given.service,
        endpoints=tuple(given.endpoint),
        served_models=tuple(given.served_model),
        max_hold_seconds=given.max_hold,
        max_held_requests=given.max_held_requests,
        max_held_bytes=given.max_held_bytes,
        max_body_bytes=given.max_body_bytes,
        priorities=priorities,
        key_priorities=dict(given.key_priority),
        priority_header=given.priority_header,
        tenant_header=given.tenant_header,
        session_header=given.session_header,
        trust_headers=given.trust_headers,
        itl_target_seconds=given.itl_target,
        admin_token_sha256=given.admin_token_sha256,
        drain_timeout_seconds=given.drain_timeout,
        endpoint_picker_port=given.endpoint_picker_port,
        endpoint_picker_tls=tuple(given.endpoint_picker_tls) if given.endpoint_picker_tls else None,
        access_log=given.access_log,
        log_level=given.log_level,
    )


def _checked(parse: Callable[[str], object]) -> Callable[[str], object]:
    """Return `parse` with its errors in the message."""

    def checked(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _port(text: str) -> int:
    if not text.isdigit() or not 0 <= int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 30, 30s or 10m")
    return float(found[1]) * UNITS_SECONDS[found[2]]


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)(Ki|Mi|Gi|k|M|G|)", text)
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 8Mi")
    return int(found[1]) * UNITS_BYTES[found[2]]


def _sha256(text: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError("must be the 64 hexadecimal digits of a SHA-256")
    return text.lower()


def _service(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9]*[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/NAME")
    return text


def _priority(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not name or not re.fullmatch(r"-?\d{1,10}", value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE with a whole number")
    return name, int(value)


def _key_priority(text: str) -> tuple[str, str]:
    digest, _, name = text.partition("=")
    return _sha256(digest), name


def _version() -> str:
    try:
        return metadata.version("trimtab")
    except metadata.PackageNotFoundError:
        return "unknown"
