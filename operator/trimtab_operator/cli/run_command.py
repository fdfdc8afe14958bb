"""`trimtab install`, `catalogue` and `run MODEL`: from a cluster to a first answer in three commands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from trimtab_operator.cli.catalogue import build_manifest, default_model_len, load_catalogue, smallest_layout
from trimtab_operator.cli.cluster import Cluster, Context, Namespace
from trimtab_operator.cli.shared import exit_with_error, parse_gpu
from trimtab_operator.cli.terminal_output import new_console, new_table
from trimtab_operator.cli.why_command import Output
from trimtab_operator.layout.gpus import GIB, GPUS, Gpu, gpu_of_label
from trimtab_operator.layout.node_gpus import PRODUCT_LABEL
from trimtab_operator.planning.admission import validation_messages
from trimtab_operator.resource.spec import GROUP, PLURAL, VERSION

EXIT_NOT_READY = 1
POLL_SECONDS = 2.0
DEFAULT_CHART = "charts/trimtab"
PLACEHOLDER_IMAGE = "trimtab-engine"  # the operator's default image is not known here


def install(
    chart: Annotated[str, typer.Option(help="Chart: a folder, an archive or an oci:// address.")] = DEFAULT_CHART,
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the operator.")] = "trimtab-system",
    values: Annotated[list[str] | None, typer.Option("--set", help="Value of the chart, as KEY=VALUE.")] = None,
    context: Context = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the helm command instead of running it.")] = False,
) -> None:
    """Install or upgrade the operator with helm, and wait until it is ready.

    The exit code is helm's; 2 if helm or the chart is missing.
    """
    command = [
        "helm",
        "upgrade",
        "--install",
        "trimtab",
        chart,
        "--namespace",
        namespace,
        "--create-namespace",
        "--wait",
    ]
    command += ["--kube-context", context] if context else []
    command += [argument for value in values or () for argument in ("--set", value)]
    if dry_run:
        typer.echo(shlex.join(command))
        return
    if shutil.which("helm") is None:
        exit_with_error("install: helm is not on PATH; install helm, or use --dry-run to print the command")
    if "://" not in chart and not Path(chart).exists():
        exit_with_error(
            f"--chart: {chart} does not exist; run this in a checkout, or pass an archive or oci:// address"
        )
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def catalogue(
    gpu: Annotated[str, typer.Option(help=f"Kind of GPU: {', '.join(gpu.name for gpu in GPUS)}.")] = "H100",
    output: Annotated[Output, typer.Option("--output", "-o", help="Output format: text or json.")] = Output.TEXT,
) -> None:
    """List the models that `trimtab run` knows by name, with their memory and the GPUs that they need."""
    device = parse_gpu(gpu)
    rows: list[dict[str, Any]] = []
    for model in load_catalogue().values():
        facts = model.facts
        layout = smallest_layout(facts, device, max_model_len=default_model_len(facts))
        rows.append(
            {
                "name": model.name,
                "uri": model.uri,
                "parameters": model.parameters,
                "weights_bytes": facts.weights_bytes,
                "gpus": None if layout is None else layout.gpus,
                "kv_tokens": None if layout is None else layout.fit.kv_tokens,
                "max_model_len": default_model_len(facts),
                "needs_token": model.needs_token,
            }
        )
    if output is Output.JSON:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = new_table("NAME", "PARAMETERS", "WEIGHTS", f"{device.name} GPUS", "KV TOKENS", "TOKEN", "MODEL")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['parameters'] / 1e9:.3g} B",
            f"{row['weights_bytes'] / GIB:.1f} GiB",
            str(row["gpus"] or "too large"),
            "" if row["kv_tokens"] is None else f"{row['kv_tokens']:,}",
            "yes" if row["needs_token"] else "",
            row["uri"],
        )
    new_console().print(table)


def complete_model(incomplete: str) -> list[str]:
    """Return the names of the catalogue that begin with `incomplete`."""
    return [name for name in load_catalogue() if name.startswith(incomplete)]


def run(
    model: Annotated[
        str,
        typer.Argument(help="Name of `trimtab catalogue`, or hf://ORG/NAME.", autocompletion=complete_model),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the InferenceDeployment. Default: the model's.")] = None,
    namespace: Namespace = None,
    context: Context = None,
    gpu: Annotated[str | None, typer.Option(help="Kind of GPU, or cpu. Default: the nodes' label.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Maximum length of prompt plus output, in tokens. Default: at most 32768.")
    ] = None,
    token_secret: Annotated[
        str | None, typer.Option(help="Secret with the hub's access token under the key `token`.")
    ] = None,
    timeout: Annotated[int, typer.Option(min=0, help="Time to wait for the model, in seconds; 0: do not wait.")] = 1800,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the manifest instead of creating it.")] = False,
) -> None:
    """Create an InferenceDeployment for a model with the fewest GPUs that hold it, and wait until it serves.

    A model that is not in the catalogue gets one GPU; the operator checks its layout. Exit code 1 if it is not ready in
    time, 2 if the input is invalid or the cluster cannot be read.
    """
    known = load_catalogue().get(model)
    if known is None and not model.startswith("hf://"):
        exit_with_error(
            f"MODEL: {model} is not in the catalogue; list it with `trimtab catalogue`, or pass hf://ORG/NAME"
        )
    cluster = None if dry_run else Cluster.connect("run", namespace, context)
    device = _gpu(gpu, cluster)
    parallelism = None
    length = max_model_len
    if known is not None:
        length = max_model_len or default_model_len(known.facts)
        if known.needs_token and token_secret is None:
            typer.echo(
                f"{model}: its license must be accepted on the hub; pass --token-secret if downloads fail", err=True
            )
        if device is not None:
            layout = smallest_layout(known.facts, device, max_model_len=length)
            if layout is None:
                exit_with_error(f"MODEL: {model} does not fit on four nodes of {device.name}; use a larger GPU")
            parallelism = layout.parallelism
    manifest = build_manifest(
        name or _resource_name(model),
        model if known is None else known.uri,
        device="cpu" if device is None else "cuda",
        parallelism=parallelism,
        max_model_len=length,
        token_secret=token_secret,
    )
    problems = validation_messages(manifest, default_image=PLACEHOLDER_IMAGE)
    if problems:
        exit_with_error("\n".join(problems))
    if cluster is None:
        typer.echo(yaml.safe_dump(manifest, sort_keys=False), nl=False)
        return
    path = f"/apis/{GROUP}/{VERSION}/namespaces/{cluster.namespace}/{PLURAL}"
    cluster.request("POST", path, body=manifest)
    typer.echo(f"{manifest['metadata']['name']} created in namespace {cluster.namespace}")
    if timeout:
        _wait(cluster, manifest["metadata"]["name"], timeout)


def _gpu(name: str | None, cluster: Cluster | None) -> Gpu | None:
    """Return the GPU that --gpu names or the nodes' labels name; None for the CPU."""
    if name is not None:
        return None if name.lower() == "cpu" else parse_gpu(name)
    if cluster is None:
        exit_with_error("--gpu: is needed with --dry-run; pass a kind of GPU, or cpu")
    nodes = (cluster.find("/api/v1/nodes") or {}).get("items") or ()
    labels = sorted({(node["metadata"].get("labels") or {}).get(PRODUCT_LABEL, "") for node in nodes} - {""})
    found = [gpu for gpu in map(gpu_of_label, labels) if gpu is not None]
    if not found:
        exit_with_error(f"--gpu: no node has a known label {PRODUCT_LABEL}; pass a kind of GPU, or cpu")
    return min(found, key=lambda gpu: gpu.memory_bytes)


def _resource_name(model: str) -> str:
    """Return a valid name: hf://Qwen/Qwen2.5-0.5B → qwen2-5-0-5b."""
    last = model.rstrip("/").rpartition("/")[2].partition("@")[0]
    return re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:40].rstrip("-")


def _wait(cluster: Cluster, name: str, timeout: float) -> None:
    """Print each new state until the deployment is ready."""
    shown, began = "", time.monotonic()
    while time.monotonic() - began < timeout:
        status: dict[str, Any] = cluster.resource(name).get("status") or {}
        if status.get("readyReplicas"):
            typer.echo(
                f"ready after {time.monotonic() - began:.0f} s at {status.get('url', '')}; try: trimtab chat {name}"
            )
            return
        loads = [group.get("load") for group in status.get("groups") or () if group.get("load")]
        text = str(status.get("phase", "Pending"))
        text += "".join(f": {load['stage']} {load['percent']} %" for load in loads[:1])
        if text != shown:
            typer.echo(text)
            shown = text
        time.sleep(POLL_SECONDS)
    typer.echo(f"{name} is not ready after {timeout:.0f} s; see trimtab status {name}", err=True)
    raise typer.Exit(EXIT_NOT_READY)
