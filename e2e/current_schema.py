"""`make schema-current`: the CRD and every refusal before the code of a current API server.

The Kubernetes that `make e2e` builds is older than rules in CEL, so it never reads ours. Here a current `apiextensions`
server, with an etcd of its own on loopback, takes the CRD, whose cost it foresees, and judges each resource that the
stories of refusals apply: what it says must be what the story expects, and where it is silent, what the webhook says.
Exit code 0 only when all was as expected.
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
# The server has no cluster behind it: what would ask one is off.
ASKING = (
    "NamespaceLifecycle",
    "MutatingAdmissionWebhook",
    "ValidatingAdmissionWebhook",
    "ValidatingAdmissionPolicy",
    "MutatingAdmissionPolicy",
)
WITHOUT_CLUSTER = (
    "--authentication-skip-lookup",
    "--enable-priority-and-fairness=false",
    f"--disable-admission-plugins={','.join(ASKING)}",
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
class Verdict:
    """One resource: who refused it, in which words, and the parts that should have been in them and were not."""

    story: str
    by: str
    words: str
    missing: list[str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crd", type=Path, default=REPOSITORY / DEFAULT_PATH, help="the CRD to judge (default: crds/)")
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
            print(f"error: Kubernetes {folder.name} refuses the CRD: {answer.json()['message']}", file=sys.stderr)
            return 1
        wait_for_resources(client)
        verdicts = [judge(client, story, changes, parts) for story, changes, parts in (*ACCEPTED, *REJECTED)]
        verdicts += [judge_name(client), judge_change(client)]
    table = Table("story", "refused by", "in the words", title=f"Kubernetes {folder.name}")
    for verdict in verdicts:
        table.add_row(verdict.story, verdict.by, verdict.words)
    console.print(table)
    wrong = [verdict for verdict in verdicts if verdict.missing]
    for verdict in wrong:
        print(f"error: {verdict.story}: not in the words: {', '.join(verdict.missing)}", file=sys.stderr)
    print(f"{len(verdicts)} resources judged, {len(wrong)} otherwise than expected")
    return 1 if wrong else 0


ACCEPTED: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("the sample", {}, ()),
    ("both promises", {"objectives": {"ttft": {"target": "2s"}, "itl": {"target": "80ms"}}}, ()),
    ("scaled", {"replicas": None, "scaling": {"minReplicas": 1, "maxReplicas": 3}}, ()),
)


def judge(client: httpx.Client, story: str, changes: dict[str, Any], parts: tuple[str, ...]) -> Verdict:
    """What is said of the sample with these changes; stories without `parts` must be taken."""
    resource = sample("judged", image="engine:1", **changes)
    answer = create(client, resource, is_kept=False)
    if not answer.is_success:
        words = answer.json()["message"]
        return Verdict(story, "the CRD", words, [part for part in parts if part not in words] or _unless(parts, words))
    if not parts:
        return Verdict(story, "nobody", "", [])
    words = "; ".join(validation_messages(answer.json(), default_image=None))
    return Verdict(story, "the webhook", words, [part for part in parts if part not in words])


def judge_name(client: httpx.Client) -> Verdict:
    """A name that is too long: the rule at the resource's root."""
    answer = create(client, sample("x" * (MAX_NAME_LENGTH + 1), image="engine:1"), is_kept=False)
    words = "" if answer.is_success else answer.json()["message"]
    part = f"has {MAX_NAME_LENGTH + 1} characters"
    return Verdict("a long name", "the CRD" if words else "nobody", words, [] if part in words else [part])


def judge_change(client: httpx.Client) -> Verdict:
    """A count of replicas that somebody writes while `scaling` decides: the rule that knows the resource before."""
    stored = create(client, sample("scaled", image="engine:1", scaling={"maxReplicas": 3}), is_kept=True).json()
    stored["spec"]["replicas"] = 3
    answer = client.put(f"{RESOURCES}/scaled", json=stored)
    words = "" if answer.is_success else answer.json()["message"]
    part = "spec.replicas: is ignored while spec.scaling is set"
    return Verdict("replicas beside scaling", "the CRD" if words else "nobody", words, [] if part in words else [part])


def _unless(parts: tuple[str, ...], words: str) -> list[str]:
    """A resource that ought to be taken was not: what was said is what is wrong."""
    return [] if parts else [f"nothing, but {words}"]


def create(client: httpx.Client, resource: dict[str, Any], *, is_kept: bool) -> httpx.Response:
    """Create it, or only ask whether it could be; unknown fields are errors."""
    asked = {"fieldValidation": "Strict"} | ({} if is_kept else {"dryRun": "All"})
    return client.post(RESOURCES, json=resource, params=asked)


def wait_for_resources(client: httpx.Client) -> None:
    """A CRD is served a moment after it was taken."""
    deadline = time.monotonic() + READY_SECONDS
    while not client.get(RESOURCES).is_success:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{RESOURCES} is not served after {READY_SECONDS:.0f} s")
        time.sleep(0.2)


@contextlib.contextmanager
def running(binaries: Path) -> Iterator[httpx.Client]:
    """Both servers on free ports of loopback, and a client that may do everything; all ends with the block."""
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
        # The server made its own certificate a moment ago, and speaks on loopback alone.
        client = stack.enter_context(
            httpx.Client(
                base_url=f"https://127.0.0.1:{port}",
                verify=False,
                cert=(str(folder / "client.crt"), str(folder / "client.key")),
                timeout=30,
            )
        )
        _wait_until_it_answers(client, folder / "server.log")
        yield client


def _wait_until_it_answers(client: httpx.Client, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        with contextlib.suppress(httpx.TransportError):
            if client.get(CRDS).is_success:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer after {READY_SECONDS:.0f} s; its last words: {log.read_text()[-1000:]}")
        time.sleep(0.2)


@contextlib.contextmanager
def program(command: list[str | Path], log: Path) -> Iterator[None]:
    """A program that runs as long as the block."""
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
    """Ports of loopback that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _pairs(*flags: str, value: str) -> list[str | Path]:
    return [word for flag in flags for word in (flag, value)]


def _make_certificates(folder: Path) -> None:
    """An authority, and a client of the group that may do everything."""
    authority = ["-x509", "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=authority", "-days", "1"]
    request = ["-keyout", "client.key", "-out", "client.csr", "-subj", "/O=system:masters/CN=judge"]
    signed = ["-in", "client.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-out", "client.crt"]
    for words in (["req", *KEY, *authority], ["req", *KEY, *request], ["x509", "-req", *signed, "-days", "1"]):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
