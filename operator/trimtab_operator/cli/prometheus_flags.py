"""The flags that say where the administrator's Prometheus is, and how it is asked: the operator's and `replay`'s."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab_operator.errors import MisconfiguredOperator
from trimtab_operator.tuner.samples.prometheus import Naming

if TYPE_CHECKING:
    from trimtab_operator.engines.prometheus import Connection

PANEL = "Prometheus"
SCRAPE_SECONDS = 15.0

CaFile = Annotated[
    Path | None,
    typer.Option(
        "--prometheus-ca-file", help="CA that signed its certificate. Default: the system's.", rich_help_panel=PANEL
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--prometheus-insecure",
        help="Believe any certificate, and send credentials over http.",
        rich_help_panel=PANEL,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--prometheus-token-file", help="File with a bearer token; read anew each time.", rich_help_panel=PANEL
    ),
]
Username = Annotated[
    str | None, typer.Option("--prometheus-username", help="User of basic authentication.", rich_help_panel=PANEL)
]
PasswordFile = Annotated[
    Path | None, typer.Option("--prometheus-password-file", help="File with its password.", rich_help_panel=PANEL)
]
ScrapeSeconds = Annotated[
    float,
    typer.Option("--prometheus-scrape-seconds", help="How often Prometheus scrapes engines.", rich_help_panel=PANEL),
]
PodLabel = Annotated[
    str, typer.Option("--prometheus-pod-label", help="Label with the pod's name.", rich_help_panel=PANEL)
]
NamespaceLabel = Annotated[
    str, typer.Option("--prometheus-namespace-label", help="Label with its namespace.", rich_help_panel=PANEL)
]
Match = Annotated[
    list[str] | None,
    typer.Option(
        "--prometheus-match", help="NAME=VALUE that every series has; may be repeated.", rich_help_panel=PANEL
    ),
]
Alias = Annotated[
    list[str] | None,
    typer.Option(
        "--prometheus-alias",
        help="OURS=THEIRS: a family that is stored under another name; may be repeated.",
        rich_help_panel=PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags beside the address, as they were given."""

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
    """What the flags say; None without an address. Raises MisconfiguredOperator, also for flags that say something of
    a Prometheus that was not named."""
    if not url:
        if flags != Flags():
            raise MisconfiguredOperator(
                "--prometheus-url is missing: the other flags of Prometheus say nothing without"
            )
        return None
    from trimtab_operator.engines.prometheus import Connection  # here, so that --help waits for no HTTP client

    return Connection(
        url=url,
        naming=Naming(
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
    """What was given as NAME=VALUE. Raises MisconfiguredOperator."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals or not value:
            raise MisconfiguredOperator(f"{flag}: {text!r} is no pair; write NAME=VALUE")
        if name in found:
            raise MisconfiguredOperator(f"{flag}: {name} is given twice")
        found[name] = value
    return found
