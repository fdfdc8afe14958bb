"""Command line `trimtab-operator run | validate | render`."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import socket
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import yaml
from pydantic import BaseModel, ValidationError

from trimtab_operator.builders.account import service_account
from trimtab_operator.builders.admin_token import TokenHashes
from trimtab_operator.builders.rendezvous_secret import rendezvous_secret
from trimtab_operator.builders.service import client_service, rendezvous_service
from trimtab_operator.builders.stateful_set import leader_stateful_set, rendered, worker_stateful_set
from trimtab_operator.cli import prometheus_flags
from trimtab_operator.cli.model_argument import facts_of
from trimtab_operator.cli.shared import EXIT_INVALID_INPUT, HELP, exit_with_error, parse_gpu, version_callback
from trimtab_operator.errors import InvalidSpec, MisconfiguredOperator, TrimtabError
from trimtab_operator.layout import layout_of
from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import Gpu
from trimtab_operator.planning.admission import validation_messages, warnings_of
from trimtab_operator.planning.router import router_manifests
from trimtab_operator.planning.tuning import current_replicas
from trimtab_operator.resource.allowed_privileges import PRIVILEGES
from trimtab_operator.resource.installation import (
    DEFAULT_DISRUPTION_BUDGETS,
    Alerts,
    DisruptionBudgets,
    GpuBudget,
    Installation,
    NetworkAccess,
    PodMonitoring,
    RouterDefaults,
    RouterRole,
)
from trimtab_operator.resource.spec import GROUP, KIND, VERSION, InferenceDeployment

EXIT_FAILED = 1
UNKNOWN_TOKEN_HASH = "0" * 64  # placeholder of the hash that depends on the resource's uid
UNKNOWN_SECRET = base64.b64encode(b"0" * 64).decode()
UNKNOWN_ADDRESS = "0.0.0.0"
UNKNOWN_ROUTER = RouterDefaults(
    image="the-operators-router-image", role=RouterRole(kind="ClusterRole", name="the-operators-router-role")
)
UNKNOWN_IMAGE = "the-operators-default-image"
"""Placeholder of the operator's default image if --default-image is not set. The chart always sets it."""

ABOUT = (
    "Run and tune large language models on Kubernetes. The chart starts `run`; `validate` and `render` work without a "
    "cluster."
)

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=ABOUT, context_settings=HELP)


AllowPrivilege = Annotated[
    list[str] | None,
    typer.Option(help=f"Privilege that spec.template may give pods; may be repeated: {', '.join(PRIVILEGES)}."),
]


class LogFormat(StrEnum):
    JSON = "json"
    TEXT = "text"


class Output(StrEnum):
    TEXT = "text"
    JSON = "json"


File = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="YAML file with InferenceDeployments; - reads standard input."),
]
FileOption = Annotated[
    Path | None, typer.Option("--file", "-f", metavar="FILE", help="Same as the argument FILE, as in kubectl.")
]
DefaultImage = Annotated[
    str | None,
    typer.Option(help="Engine image of resources without spec.runtime.image.", envvar="TRIMTAB_DEFAULT_IMAGE"),
]


@app.callback(help=ABOUT)
def commands(
    shows_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=version_callback("trimtab-operator"), is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Handle the options before every command."""


@app.command()
def run(
    namespace: Annotated[
        list[str] | None, typer.Option(help="Namespace to watch; may be repeated. Default: all.")
    ] = None,
    operator_class: Annotated[
        str | None,
        typer.Option("--class", help="Serve resources with this spec.class only. Default: those without a class."),
    ] = None,
    operator_namespace: Annotated[
        str, typer.Option(help="Namespace of the operator's Lease and Secrets.", envvar="POD_NAMESPACE")
    ] = "trimtab-system",
    identity: Annotated[
        str, typer.Option(help="Holder identity in the Lease. Default: host name and process id.", envvar="POD_NAME")
    ] = "",
    tick_seconds: Annotated[
        float,
        typer.Option(min=1.0, max=300.0, help="Maximum time between two reconciliations of a resource, in seconds."),
    ] = 15.0,
    default_image: DefaultImage = None,
    lease_name: Annotated[str, typer.Option(help="Name of the Lease.")] = "trimtab-operator",
    secret_name: Annotated[
        str, typer.Option(help="Secret from which admin tokens are derived; created if absent.")
    ] = "trimtab-operator",  # noqa: S107 - a name, not a password
    webhook_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the webhook; 0 disables it.")] = 9443,
    webhook_config_name: Annotated[
        str | None, typer.Option(help="ValidatingWebhookConfiguration whose caBundle the operator updates.")
    ] = None,
    webhook_secret_name: Annotated[
        str, typer.Option(help="Secret with the webhook's certificates; created if absent.")
    ] = "trimtab-operator-webhook",  # noqa: S107 - a name, not a password
    service_name: Annotated[str, typer.Option(help="Service through which the API server calls the webhook.")] = (
        "trimtab-operator"
    ),
    liveness_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of /healthz and /readyz.")] = 8080,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of /metrics.")] = 8081,
    board_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the board, on 127.0.0.1 only; 0 disables it.")
    ] = 8082,
    network_policy: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Create a NetworkPolicy per resource: {"operator": PEER, "clients": [PEER], "monitoring": [PEER]}.',
        ),
    ] = None,
    pod_monitors: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='Create a PodMonitor per resource: {"labels": {…}, "interval": "15s"}.'),
    ] = None,
    alerts: Annotated[
        str | None, typer.Option(metavar="JSON", help='Create a PrometheusRule per resource: {"labels": {…}}.')
    ] = None,
    gpu_budget: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Maximum GPUs of all engines together and per namespace: {"total": 64, "namespaces": {…}}.',
        ),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Permit routers (spec.router): {"image": IMAGE, "role": {"kind": KIND, "name": NAME}, '
            '"evictUnhealthy": true}.',
        ),
    ] = None,
    disruption_budgets: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='PodDisruptionBudgets of replicas: {"enabled": true, "evictUnhealthy": true}. Default: both true.',
        ),
    ] = None,
    allow_privilege: AllowPrivilege = None,
    log_format: Annotated[LogFormat, typer.Option(help="One JSON object per line, or text.")] = LogFormat.JSON,
    log_level: Annotated[str, typer.Option(help="Log level: debug, info, warning or error.")] = "info",
    prometheus_url: Annotated[
        str | None,
        typer.Option(
            help="URL of the Prometheus to read engine metrics from. Default: scrape the pods.",
            envvar="TRIMTAB_PROMETHEUS_URL",
            rich_help_panel=prometheus_flags.PANEL,
        ),
    ] = None,
    prometheus_ca_file: prometheus_flags.CaFile = None,
    prometheus_insecure: prometheus_flags.Insecure = False,
    prometheus_token_file: prometheus_flags.TokenFile = None,
    prometheus_username: prometheus_flags.Username = None,
    prometheus_password_file: prometheus_flags.PasswordFile = None,
    prometheus_scrape_seconds: prometheus_flags.ScrapeSeconds = prometheus_flags.SCRAPE_SECONDS,
    prometheus_pod_label: prometheus_flags.PodLabel = "pod",
    prometheus_namespace_label: prometheus_flags.NamespaceLabel = "namespace",
    prometheus_match: prometheus_flags.Match = None,
    prometheus_alias: prometheus_flags.Alias = None,
) -> None:
    """Reconcile InferenceDeployments.

    With several replicas, the holder of the Lease reconciles and all serve the webhook.
    """
    from trimtab_operator.cli.file_limits import allow_open_files
    from trimtab_operator.cli.log_setup import configure_logging
    from trimtab_operator.reconcile.process import (  # here, so that `validate` needs no cluster client
        Options,
        run_operator,
    )

    configure_logging(log_format.value, log_level)
    flags = prometheus_flags.Flags(
        prometheus_ca_file,
        prometheus_insecure,
        prometheus_token_file,
        prometheus_username,
        prometheus_password_file,
        prometheus_scrape_seconds,
        prometheus_pod_label,
        prometheus_namespace_label,
        tuple(prometheus_match or ()),
        tuple(prometheus_alias or ()),
    )
    try:
        prometheus = prometheus_flags.connection_of(prometheus_url, flags)
    except MisconfiguredOperator as error:
        exit_with_error(str(error))
    options = Options(
        namespaces=tuple(namespace or ()),
        operator_namespace=operator_namespace,
        identity=identity or f"{socket.gethostname()}-{os.getpid()}",
        tick_seconds=tick_seconds,
        default_image=default_image,
        lease_name=lease_name,
        secret_name=secret_name,
        webhook_port=webhook_port,
        webhook_config_name=webhook_config_name,
        webhook_secret_name=webhook_secret_name,
        service_name=service_name,
        liveness_port=liveness_port,
        metrics_port=metrics_port,
        board_port=board_port,
        installation=Installation(
            _choice("--network-policy", network_policy, NetworkAccess),
            _choice("--pod-monitors", pod_monitors, PodMonitoring),
            _choice("--alerts", alerts, Alerts),
            _parse_privileges(allow_privilege),
            _choice("--gpu-budget", gpu_budget, GpuBudget),
            _choice("--router", router, RouterDefaults),
            operator_class,
            _choice("--disruption-budgets", disruption_budgets, DisruptionBudgets) or DEFAULT_DISRUPTION_BUDGETS,
        ),
        prometheus=prometheus,
    )
    allow_open_files()
    try:
        raise typer.Exit(asyncio.run(run_operator(options)))
    except (TrimtabError, OSError) as error:
        logging.getLogger(__name__).error("%s", error)
        raise typer.Exit(EXIT_INVALID_INPUT if isinstance(error, TrimtabError) else EXIT_FAILED) from error


def _parse_privileges(given: list[str] | None) -> frozenset[str]:
    """Return the privileges of --allow-privilege. Exits with an error for an unknown one."""
    for privilege in given or ():
        if privilege not in PRIVILEGES:
            exit_with_error(f"--allow-privilege: {privilege!r} is not supported; use one of {', '.join(PRIVILEGES)}")
    return frozenset(given or ())


Choice = TypeVar("Choice", bound=BaseModel)


def _choice(flag: str, text: str | None, kind: type[Choice]) -> Choice | None:
    """Parse the JSON of a flag; None if it is not set. Exits with one line if it cannot be parsed."""
    if text is None:
        return None
    try:
        return kind.model_validate_json(text, by_alias=True, by_name=False)
    except ValidationError as error:
        messages = (f"{'.'.join(map(str, entry['loc'])) or 'value'}: {entry['msg']}" for entry in error.errors())
        exit_with_error(f"{flag}: {'; '.join(messages)}")


@app.command()
def validate(
    file: File = None,
    file_option: FileOption = None,
    default_image: DefaultImage = None,
    facts: Annotated[
        str | None,
        typer.Option(
            help="Model to check the layout against: a folder with a config.json, a config.json, or the output of "
            "`trimtab-engine inspect MODEL -o json`; - reads standard input."
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="With --facts: also check that the layout fits the memory of this GPU.")
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="text or json.")] = Output.TEXT,
    allow_privilege: AllowPrivilege = None,
) -> None:
    """Validate resources as the webhook does, without a cluster. Exit code 2 if a resource is rejected."""
    resources = _the_file(file, file_option)
    if facts == "-" and str(resources) == "-":
        exit_with_error("--facts: standard input is already used for the resources; pass one of the two as a file")
    model, device = None if facts is None else _facts(facts), None if gpu is None else parse_gpu(gpu)
    if gpu is not None and facts is None:
        exit_with_error("--gpu: needs the facts of the model; set --facts as well")
    allowed_privileges = _parse_privileges(allow_privilege)
    found = [
        _verdict(body, default_image or UNKNOWN_IMAGE, allowed_privileges, model, device)
        for body in _resources(resources)
    ]
    if output is Output.JSON:
        typer.echo(json.dumps(found, indent=2))
    else:
        for entry in found:
            typer.echo(f"{entry['name']}: {'rejected' if entry['refusals'] else 'accepted'}")
            for line in (*entry["refusals"], *(f"warning: {warning}" for warning in entry["warnings"])):
                typer.echo(f"  {line}")
    if any(entry["refusals"] for entry in found):
        raise typer.Exit(EXIT_INVALID_INPUT)


def _verdict(
    body: dict[str, Any], image: str, allowed_privileges: frozenset[str], facts: ModelFacts | None, gpu: Gpu | None
) -> dict[str, Any]:
    """Return the name, validation errors and warnings of one resource; an invalid resource has no warnings."""
    wrong = validation_messages(body, default_image=image, allowed_privileges=allowed_privileges, facts=facts, gpu=gpu)
    warnings = [] if wrong else warnings_of(InferenceDeployment.parse(body, default_image=image))
    return {"name": _name(body), "refusals": wrong, "warnings": warnings}


@app.command()
def render(
    file: File = None,
    file_option: FileOption = None,
    default_image: DefaultImage = None,
    allow_privilege: AllowPrivilege = None,
) -> None:
    """Print the objects that the operator would create, as YAML.

    Values that depend on the cluster are shown as zeros: the token's hash, the addresses of rendezvous Services and the
    secret that the pods of a replica share. An unknown default image is shown as a placeholder, and so are image and
    role of routers.
    """
    manifests: list[dict[str, Any]] = []
    allowed_privileges, image = _parse_privileges(allow_privilege), default_image or UNKNOWN_IMAGE
    for body in _resources(_the_file(file, file_option)):
        wrong = validation_messages(body, default_image=image, allowed_privileges=allowed_privileges)
        if wrong:
            exit_with_error("\n".join(f"{_name(body)}: {line}" for line in wrong))
        deployment = InferenceDeployment.parse(body, default_image=image, allowed_privileges=allowed_privileges)
        if deployment.image == UNKNOWN_IMAGE:
            message = f"spec.runtime.image: not set (rendered as {UNKNOWN_IMAGE}); set it, or pass --default-image"
            typer.echo(f"{_name(body)}: {message}", err=True)
        manifests += _manifests(deployment)
    typer.echo(yaml.safe_dump_all(manifests, sort_keys=False, width=120), nl=False)


def _manifests(deployment: InferenceDeployment) -> list[dict[str, Any]]:
    wanted = rendered(deployment, token_hashes=TokenHashes(UNKNOWN_TOKEN_HASH, UNKNOWN_TOKEN_HASH))
    router = deployment.spec.active_router
    found = [service_account(deployment), client_service(deployment, to_router=router is not None)]
    if router is not None:
        found += map(dict, router_manifests(deployment, router, Installation(), UNKNOWN_ROUTER, UNKNOWN_TOKEN_HASH))
    if layout_of(deployment.spec).pods > 1:
        found.append({**rendezvous_secret(deployment, token=""), "data": {deployment.name: UNKNOWN_SECRET}})
    for ordinal in range(current_replicas(deployment, None)):
        if layout_of(deployment.spec).pods == 1:
            found.append(leader_stateful_set(wanted, ordinal))
        else:
            found.append(rendezvous_service(deployment, ordinal))
            found.append(leader_stateful_set(wanted, ordinal, address=UNKNOWN_ADDRESS))
            found.append(worker_stateful_set(wanted, ordinal, address=UNKNOWN_ADDRESS))
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def _the_file(argument: Path | None, option: Path | None) -> Path:
    """Return the file from the argument or --file. Exits with one line if there is none, or both."""
    if argument is not None and option is not None:
        exit_with_error(f"--file: two files given ({argument}, {option}); pass only one")
    given = argument or option
    if given is None:
        exit_with_error("FILE: not set; pass a YAML file with InferenceDeployments, or - for standard input")
    return given


def _resources(file: Path) -> list[dict[str, Any]]:
    """Return the InferenceDeployments of a file. Exits with one line if there is none, or no YAML."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except (OSError, UnicodeDecodeError) as error:
        exit_with_error(f"{file}: cannot be read: {error.strerror if isinstance(error, OSError) else error}")
    except yaml.YAMLError as error:
        exit_with_error(f"{file}: not YAML: {_fault(error)}")
    found = [d for d in documents if isinstance(d, dict) and d.get("kind") == KIND]
    if not found:
        kinds = [str(d["kind"]) for d in documents if isinstance(d, dict) and d.get("kind")]
        others = f"; it contains {', '.join(dict.fromkeys(kinds))}" if kinds else ""
        exit_with_error(f"{file}: contains no {KIND} ({GROUP}/{VERSION}){others}")
    for body in found:
        if body.get("apiVersion") != f"{GROUP}/{VERSION}":
            exit_with_error(f"{_name(body)}: apiVersion is {body.get('apiVersion')!r}; write {GROUP}/{VERSION}")
        if not isinstance(body.get("metadata"), dict) or not isinstance(body.get("spec"), dict):
            exit_with_error(f"{_name(body)}: metadata or spec is missing; add both")
        if not body["metadata"].get("name"):
            exit_with_error("metadata.name is missing; give the resource a name")
    return [_as_sent(body) for body in found]


def _fault(error: yaml.YAMLError) -> str:
    """Return a YAML error in one line, without the source excerpt."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    message = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return message + (": indent YAML with spaces" if "'\\t'" in (error.problem or "") else "")


def _facts(model: str) -> ModelFacts:
    try:
        return facts_of(model)
    except ValueError as error:
        exit_with_error(f"--facts: {error}")


def _as_sent(body: dict[str, Any]) -> dict[str, Any]:
    """Return a resource as kubectl sends it: JSON with dates as strings, without fields that the API server sets."""
    names = {key: body["metadata"][key] for key in ("name", "namespace") if body["metadata"].get(key)}
    try:
        return json.loads(json.dumps({**body, "metadata": names}, default=str))  # type: ignore[no-any-return]
    except (ValueError, TypeError, RecursionError) as error:
        exit_with_error(
            f"{_name(body)}: cannot be converted to JSON ({error}); remove YAML aliases that refer to a parent node"
        )


def _name(body: dict[str, Any]) -> str:
    metadata = body.get("metadata")
    return str(metadata.get("name", "(no name)")) if isinstance(metadata, dict) else "(no name)"


def main() -> None:
    """Run the console entry point."""
    try:
        app()
    except InvalidSpec as error:
        typer.echo(str(error), err=True)
        sys.exit(EXIT_INVALID_INPUT)


if __name__ == "__main__":
    main()
