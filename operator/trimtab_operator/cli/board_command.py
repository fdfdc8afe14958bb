"""`trimtab board`: forwards a local port to the board of the leading operator pod, through the API server.

The user needs the permissions to list pods, get the Lease and create `pods/portforward` in the operator's namespace.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import socketserver
import sys
import threading
import webbrowser
from typing import Annotated, Any

import typer

from trimtab_operator.cli.cluster import ApiError, Cluster, Context
from trimtab_operator.cli.doctor_command import OPERATOR_SELECTOR
from trimtab_operator.cli.shared import exit_with_error
from trimtab_operator.observed.groups import flag_of
from trimtab_operator.resource.manifest import Manifest

BUFFER_BYTES = 65_536
PROBE_SECONDS = 10.0


def board(
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the operator.")] = "trimtab-system",
    context: Context = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Local port; 0 chooses a free one.")] = 8082,
    opens: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show load, latencies, parameters and decisions of all deployments on a local web page, until Ctrl-C.

    The page is served by the operator and is read-only. Access needs permission to forward ports to the operator's
    pods. Exit code 2 if the board cannot be reached.
    """
    cluster = Cluster.connect("board", namespace, context)
    leader, remote_port = find_board(cluster)
    _check_board(cluster, leader, remote_port)
    try:
        server = _Server(("127.0.0.1", port), _Connection)
    except OSError as error:
        exit_with_error(f"--port: {port} cannot be used ({error.strerror}); choose another, or 0 for a free one")
    server.cluster = cluster
    url = f"http://localhost:{server.server_address[1]}/"
    typer.echo(f"{url} shows the board of {leader} until Ctrl-C")
    if opens:
        webbrowser.open(url)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def find_board(cluster: Cluster) -> tuple[str, int]:
    """Return the leading operator pod and the port of its board. Exits with an error if there is none."""
    namespace = cluster.namespace
    pods: list[Manifest] = (
        cluster.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector=OPERATOR_SELECTOR).get("items") or []
    )
    if not pods:
        exit_with_error(f"board: no operator pod in namespace {namespace}; pass the operator's namespace with -n")
    holders = {lease: _holder(cluster, lease) for lease in sorted({flag_of(pod, "--lease-name") or "" for pod in pods})}
    leaders = [pod for pod in pods if pod["metadata"]["name"] in holders.values()]
    if not leaders:
        exit_with_error(f"board: no operator pod in namespace {namespace} leads; check `trimtab doctor`, then repeat")
    port = flag_of(leaders[0], "--board-port") or ""
    if not port.isdigit() or port == "0":
        exit_with_error("board: the operator does not serve it; set board.enabled in the chart's values")
    return str(leaders[0]["metadata"]["name"]), int(port)


def _holder(cluster: Cluster, lease: str) -> str:
    """Return the pod that holds a Lease; "" if none does."""
    path = f"/apis/coordination.k8s.io/v1/namespaces/{cluster.namespace}/leases/{lease}"
    return str((cluster.get(path).get("spec") or {}).get("holderIdentity") or "")


def _check_board(cluster: Cluster, pod: str, port: int) -> None:
    """Exit with an error if the board does not answer."""
    connection = http.client.HTTPConnection("localhost", port, timeout=PROBE_SECONDS)
    try:
        connection.sock = cluster.forward_port(cluster.namespace, pod, port)
        connection.sock.settimeout(PROBE_SECONDS)
        connection.request("GET", "/")
        status = connection.getresponse().status
    except ApiError as error:
        exit_with_error(
            f"board: cannot forward a port to {pod} ({error.reason}); it needs permission to create pods/portforward "
            f"in namespace {cluster.namespace}"
        )
    except (OSError, http.client.HTTPException):
        exit_with_error(f"board: port {port} of {pod} does not answer; see its log for --board-port")
    finally:
        connection.close()
    if status != http.client.OK:
        exit_with_error(f"board: {pod} answers with status {status}; update trimtab and the operator to one version")


class _Server(socketserver.ThreadingTCPServer):
    """Local listener. Each connection finds the leader again, so that the page survives a change of the leader."""

    allow_reuse_address = True
    daemon_threads = True
    cluster: Cluster

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print one line; the browser sees a closed connection and retries."""
        error = sys.exception()
        if not isinstance(error, typer.Exit):  # its line was printed
            typer.echo(f"board: a connection failed: {error!r}", err=True)


class _Connection(socketserver.BaseRequestHandler):
    """One connection of the browser, relayed in both directions."""

    server: _Server

    def handle(self) -> None:
        """Relay until one side closes."""
        cluster = self.server.cluster
        with contextlib.closing(cluster.forward_port(cluster.namespace, *find_board(cluster))) as remote:
            upward = threading.Thread(target=_relay, args=(self.request, remote), daemon=True)
            upward.start()
            _relay(remote, self.request)
            upward.join()


def _relay(source: Any, target: Any) -> None:
    """Copy bytes until the source ends, then end both."""
    try:
        while data := source.recv(BUFFER_BYTES):
            target.sendall(data)
    except OSError:
        pass  # one side closed its connection
    for end in (source, target):
        with contextlib.suppress(OSError):  # it is closed already
            end.shutdown(socket.SHUT_RDWR)
