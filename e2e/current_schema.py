"""`make schema-current`: validate the CRD and all invalid specs with a current API server.

The Kubernetes that `make e2e` builds is older than CEL rules. Here a current `apiextensions` server, with etcd on
loopback, accepts the CRD (including its CEL cost estimate) and validates each resource of the e2e validation scenarios.
Its message must be the expected one; if it accepts a resource, the webhook's message must be.
The exit code is 0 only if all results are as expected.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from devtools.errors import ClusterError
from harness.deployment import sample
from harness.rejected_specs import REJECTED
from offline import schema_server
from rich.console import Console
from rich.table import Table
from trimtab_operator.planning.admission import validation_messages
from trimtab_operator.resource.crd import DEFAULT_PATH
from trimtab_operator.resource.spec import GROUP, MAX_NAME_LENGTH, PLURAL, VERSION

REPOSITORY = Path(__file__).resolve().parents[1]
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
RESOURCES = f"/apis/{GROUP}/{VERSION}/namespaces/default/{PLURAL}"
READY_SECONDS = 60.0
# Admission plugins that need a cluster, which this server does not have.
CLUSTER_PLUGINS = (
    "NamespaceLifecycle",
    "MutatingAdmissionWebhook",
    "ValidatingAdmissionWebhook",
    "ValidatingAdmissionPolicy",
    "MutatingAdmissionPolicy",
)
WITHOUT_CLUSTER = (
    "--authentication-skip-lookup",
    "--enable-priority-and-fairness=false",
    f"--disable-admission-plugins={','.join(CLUSTER_PLUGINS)}",
)
NO_CLUSTER = """\
apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
current-context: none
users: [{name: none, user: {}}]
"""
KEY = ("-newkey", "rsa:2048", "-nodes")


@dataclass(frozen=True, slots=True)
class Result:
    """The validation result of one resource: the rejecting component, its message, and missing parts of the message."""

    case: str
    rejected_by: str
    message: str
    missing: list[str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--crd", type=Path, default=REPOSITORY / DEFAULT_PATH, help="the CRD to validate (default: crds/)"
    )
    options = parser.parse_args()
    console = Console(width=160)
    try:
        folder = schema_server.server()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with running(folder) as client:
        answer = client.post(CRDS, content=options.crd.read_bytes(), headers={"Content-Type": "application/yaml"})
        if not answer.is_success:
            print(f"error: Kubernetes {folder.name} rejects the CRD: {answer.json()['message']}", file=sys.stderr)
            return 1
        wait_for_resources(client)
        results = [validate(client, case, changes, parts) for case, changes, parts in (*ACCEPTED, *REJECTED)]
        results += [validate_long_name(client), validate_replicas_change(client)]
    table = Table("case", "rejected by", "message", title=f"Kubernetes {folder.name}")
    for result in results:
        table.add_row(result.case, result.rejected_by, result.message)
    console.print(table)
    wrong = [result for result in results if result.missing]
    for result in wrong:
        print(f"error: {result.case}: missing in the message: {', '.join(result.missing)}", file=sys.stderr)
    print(f"{len(results)} resources validated, {len(wrong)} with unexpected results")
    return 1 if wrong else 0


ACCEPTED: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("the sample", {}, ()),
    ("both objectives", {"objectives": {"ttft": {"target": "2s"}, "itl": {"target": "80ms"}}}, ()),
    ("scaled", {"replicas": None, "scaling": {"minReplicas": 1, "maxReplicas": 3}}, ()),
)


def validate(client: httpx.Client, case: str, changes: dict[str, Any], parts: tuple[str, ...]) -> Result:
    """Validate the sample with these changes; cases without `parts` must be accepted."""
    resource = sample("validated", image="engine:1", **changes)
    answer = create(client, resource, is_kept=False)
    if not answer.is_success:
        message = answer.json()["message"]
        missing = [part for part in parts if part not in message]
        return Result(case, "CRD", message, missing or _unexpected_rejection(parts, message))
    if not parts:
        return Result(case, "none", "", [])
    message = "; ".join(validation_messages(answer.json(), default_image=None))
    return Result(case, "webhook", message, [part for part in parts if part not in message])


def validate_long_name(client: httpx.Client) -> Result:
    """Validate a name that is too long, rejected by the rule at the resource's root."""
    answer = create(client, sample("x" * (MAX_NAME_LENGTH + 1), image="engine:1"), is_kept=False)
    message = "" if answer.is_success else answer.json()["message"]
    part = f"has {MAX_NAME_LENGTH + 1} characters"
    return Result("a long name", "CRD" if message else "none", message, [] if part in message else [part])


def validate_replicas_change(client: httpx.Client) -> Result:
    """Validate a write of `replicas` while `scaling` is set, rejected by the rule with `oldSelf`."""
    stored = create(client, sample("scaled", image="engine:1", scaling={"maxReplicas": 3}), is_kept=True).json()
    stored["spec"]["replicas"] = 3
    answer = client.put(f"{RESOURCES}/scaled", json=stored)
    message = "" if answer.is_success else answer.json()["message"]
    part = "spec.replicas: is ignored while spec.scaling is set"
    return Result("replicas with scaling", "CRD" if message else "none", message, [] if part in message else [part])


def _unexpected_rejection(parts: tuple[str, ...], message: str) -> list[str]:
    """Return the message as an error if the resource was expected to be accepted."""
    return [] if parts else [f"acceptance, but got: {message}"]


def create(client: httpx.Client, resource: dict[str, Any], *, is_kept: bool) -> httpx.Response:
    """Create a resource, or only dry-run it; unknown fields are errors."""
    parameters = {"fieldValidation": "Strict"} | ({} if is_kept else {"dryRun": "All"})
    return client.post(RESOURCES, json=resource, params=parameters)


def wait_for_resources(client: httpx.Client) -> None:
    """Wait until the CRD is served."""
    deadline = time.monotonic() + READY_SECONDS
    while not client.get(RESOURCES).is_success:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{RESOURCES} is not served after {READY_SECONDS:.0f} s")
        time.sleep(0.2)


@contextlib.contextmanager
def running(binaries: Path) -> Iterator[httpx.Client]:
    """Run both servers on free loopback ports, and yield a client with all permissions."""
    with tempfile.TemporaryDirectory(prefix="trimtab-schema-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        _make_certificates(folder)
        (folder / "no-cluster").write_text(NO_CLUSTER)
        store, peer, port = free_ports(3)
        etcd: list[str | Path] = [binaries / "etcd", "--data-dir", folder / "etcd"]
        etcd += _pairs("--listen-client-urls", "--advertise-client-urls", value=f"http://127.0.0.1:{store}")
        etcd += _pairs("--listen-peer-urls", "--initial-advertise-peer-urls", value=f"http://127.0.0.1:{peer}")
        etcd += ["--initial-cluster", f"default=http://127.0.0.1:{peer}"]
        stack.enter_context(program(etcd, folder / "etcd.log"))
        none = str(folder / "no-cluster")
        server: list[str | Path] = [binaries / "apiextensions-apiserver", *WITHOUT_CLUSTER]
        server += ["--etcd-servers", f"http://127.0.0.1:{store}", "--client-ca-file", folder / "ca.crt"]
        server += ["--bind-address", "127.0.0.1", "--secure-port", str(port), "--cert-dir", folder / "serving"]
        server += _pairs("--kubeconfig", "--authentication-kubeconfig", "--authorization-kubeconfig", value=none)
        stack.enter_context(program(server, folder / "server.log"))
        # The server has a self-signed certificate and listens only on loopback.
        client = stack.enter_context(
            httpx.Client(
                base_url=f"https://127.0.0.1:{port}",
                verify=False,
                cert=(str(folder / "client.crt"), str(folder / "client.key")),
                timeout=30,
            )
        )
        _wait_until_ready(client, folder / "server.log")
        yield client


def _wait_until_ready(client: httpx.Client, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        with contextlib.suppress(httpx.TransportError):
            if client.get(CRDS).is_success:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"no response after {READY_SECONDS:.0f} s; end of its log: {log.read_text()[-1000:]}")
        time.sleep(0.2)


@contextlib.contextmanager
def program(command: list[str | Path], log: Path) -> Iterator[None]:
    """Run a program within the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_ports(count: int) -> list[int]:
    """Return free loopback ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _pairs(*flags: str, value: str) -> list[str | Path]:
    return [word for flag in flags for word in (flag, value)]


def _make_certificates(folder: Path) -> None:
    """Create a CA, and a client certificate of the group system:masters."""
    authority = ["-x509", "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=authority", "-days", "1"]
    request = ["-keyout", "client.key", "-out", "client.csr", "-subj", "/O=system:masters/CN=judge"]
    signed = ["-in", "client.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-out", "client.crt"]
    for words in (["req", *KEY, *authority], ["req", *KEY, *request], ["x509", "-req", *signed, "-days", "1"]):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
