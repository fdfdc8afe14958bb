"""Flags for the connection to a Prometheus server, shared by the operator and `replay`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab_operator.errors import MisconfiguredOperator
from trimtab_operator.tuner.samples.prometheus import PrometheusNaming

if TYPE_CHECKING:
    from trimtab_operator.engines.prometheus import Connection

PANEL = "Prometheus"
SCRAPE_SECONDS = 15.0

CaFile = Annotated[
    Path | None,
    typer.Option(
        "--prometheus-ca-file", help="CA certificate of Prometheus. Default: the system's CAs.", rich_help_panel=PANEL
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--prometheus-insecure",
        help="Accept any certificate, and send credentials over http.",
        rich_help_panel=PANEL,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--prometheus-token-file", help="File with a bearer token; read for each request.", rich_help_panel=PANEL
    ),
]
Username = Annotated[
    str | None, typer.Option("--prometheus-username", help="User for basic authentication.", rich_help_panel=PANEL)
]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        "--prometheus-password-file", help="File with the password for basic authentication.", rich_help_panel=PANEL
    ),
]
ScrapeSeconds = Annotated[
    float,
    typer.Option(
        "--prometheus-scrape-seconds", help="Scrape interval of Prometheus, in seconds.", rich_help_panel=PANEL
    ),
]
PodLabel = Annotated[
    str, typer.Option("--prometheus-pod-label", help="Label with the name of the pod.", rich_help_panel=PANEL)
]
NamespaceLabel = Annotated[
    str,
    typer.Option("--prometheus-namespace-label", help="Label with the namespace of the pod.", rich_help_panel=PANEL),
]
Match = Annotated[
    list[str] | None,
    typer.Option(
        "--prometheus-match", help="Label matcher NAME=VALUE for every series; may be repeated.", rich_help_panel=PANEL
    ),
]
Alias = Annotated[
    list[str] | None,
    typer.Option(
        "--prometheus-alias",
        help="OURS=THEIRS: name of a metric family in Prometheus if it differs; may be repeated.",
        rich_help_panel=PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class Flags:
    """Values of the Prometheus flags except the URL."""

    ca_file: Path | None = None
    is_insecure: bool = False
    token_file: Path | None = None
    username: str | None = None
    password_file: Path | None = None
    scrape_seconds: float = SCRAPE_SECONDS
    pod_label: str = "pod"
    namespace_label: str = "namespace"
    match: tuple[str, ...] = ()
    alias: tuple[str, ...] = ()


def connection_of(url: str | None, flags: Flags) -> Connection | None:
    """Return the connection that the flags describe; None without a URL.

    Raises:
        MisconfiguredOperator: A flag is invalid, or flags are set without a URL.
    """
    if not url:
        if flags != Flags():
            raise MisconfiguredOperator(
                "--prometheus-url: not set, but other --prometheus flags are; set it, or remove them"
            )
        return None
    from trimtab_operator.engines.prometheus import (
        Connection,
    )  # imported here, so that --help does not import an HTTP client

    return Connection(
        url=url,
        naming=PrometheusNaming(
            flags.pod_label,
            flags.namespace_label,
            pairs_of("--prometheus-match", flags.match),
            pairs_of("--prometheus-alias", flags.alias),
        ),
        scrape_seconds=flags.scrape_seconds,
        ca_file=flags.ca_file,
        is_insecure=flags.is_insecure,
        token_file=flags.token_file,
        username=flags.username,
        password_file=flags.password_file,
    )


def pairs_of(flag: str, given: Iterable[str]) -> dict[str, str]:
    """Parse NAME=VALUE pairs.

    Raises:
        MisconfiguredOperator: A pair is malformed or repeated.
    """
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals or not value:
            raise MisconfiguredOperator(f"{flag}: not a pair ({text!r}); write NAME=VALUE")
        if name in found:
            raise MisconfiguredOperator(f"{flag}: repeated name ({name}); set it once")
        found[name] = value
    return found
