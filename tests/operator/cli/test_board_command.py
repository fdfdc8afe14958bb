"""`trimtab board`: the leader, the forwarded port, and the errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import WSMsgType, web
from trimtab_operator.board.recorder import Recorder
from trimtab_operator.board.server import serve_board
from trimtab_operator.cli.board_command import _Connection, _Server, find_board
from trimtab_operator.cli.cluster import Cluster
from trimtab_operator.cli.trimtab_command import app
from typer.testing import CliRunner

# The client library leaves the socket of an ended forward to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
NAMESPACE = "trimtab-system"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/trimtab-operator"


def make_pod(name: str, port: str) -> dict[str, Any]:
    args = ["run", "--lease-name=trimtab-operator", f"--board-port={port}"]
    return {"metadata": {"name": name}, "spec": {"containers": [{"args": args}]}}


class ForwardingApiServer:
    """An API server with two operator pods, whose `pods/portforward` leads to a real board."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self.pods = [make_pod("op-0", "0"), make_pod("op-1", "0")]
        self.holder = "op-1"
        self.may_forward = True
        self.forwarded: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._ready = threading.Event()

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        thread.start()
        assert self._ready.wait(20)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._stopped.set)
            thread.join()
            self._loop.close()

    async def _serve(self) -> None:
        board = await serve_board(0, Recorder(), lambda: 2e9)
        assert board is not None
        self.pods = [make_pod("op-0", "1"), make_pod("op-1", str(board.addresses[0][1]))]
        application = web.Application()
        application.router.add_get(f"/api/v1/namespaces/{NAMESPACE}/pods", self._list_pods)
        application.router.add_get(LEASE, self._get_lease)
        application.router.add_get(f"/api/v1/namespaces/{NAMESPACE}/pods/{{pod}}/portforward", self._forward)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        config = {
            "current-context": "mine",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "mine", "context": {"cluster": "c", "user": "u"}}],
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))
        self._ready.set()
        await self._stopped.wait()
        await runner.cleanup()
        await board.cleanup()

    async def _list_pods(self, request: web.Request) -> web.Response:
        assert "component=operator" in request.query["labelSelector"]
        return web.json_response({"metadata": {}, "items": self.pods})

    async def _get_lease(self, _: web.Request) -> web.Response:
        return web.json_response({"metadata": {}, "spec": {"holderIdentity": self.holder}})

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        """Relay channel 0 to the port as the kubelet does; channel 1 is for errors."""
        if not self.may_forward:
            return web.json_response({"message": "forbidden"}, status=403)
        self.forwarded.append(request.match_info["pod"])
        port = int(request.query["ports"])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        for channel in (0, 1):
            await socket.send_bytes(bytes([channel]) + port.to_bytes(2, "little"))
        back = asyncio.create_task(_send_all(reader, socket))
        try:
            async for message in socket:
                if message.type is WSMsgType.BINARY and message.data[0] == 0:
                    writer.write(message.data[1:])
        finally:
            back.cancel()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        return socket


async def _send_all(reader: asyncio.StreamReader, socket: web.WebSocketResponse) -> None:
    while data := await reader.read(65_536):
        await socket.send_bytes(b"\0" + data)
    await socket.close()


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForwardingApiServer]:
    server = ForwardingApiServer(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    with server.served():
        yield server


@pytest.fixture
def forwarded(api: ForwardingApiServer) -> Iterator[str]:
    """Serve the command's local port, and return its URL."""
    with _Server(("127.0.0.1", 0), _Connection) as server:
        server.cluster = Cluster.connect("board", NAMESPACE, None)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://localhost:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["board", *arguments])


def test_board_reaches_the_leader(api: ForwardingApiServer, forwarded: str) -> None:
    with urllib.request.urlopen(f"{forwarded}/api/deployments", timeout=20) as response:
        assert json.load(response)["deployments"] == []
    with urllib.request.urlopen(f"{forwarded}/", timeout=20) as response:
        assert b"Trimtab board" in response.read()
    assert set(api.forwarded) == {"op-1"}


def test_new_leader_is_found_by_the_next_connection(api: ForwardingApiServer, forwarded: str) -> None:
    urllib.request.urlopen(forwarded, timeout=20).close()
    api.pods, api.holder = [make_pod("op-2", api.pods[1]["spec"]["containers"][0]["args"][2].partition("=")[2])], "op-2"
    urllib.request.urlopen(forwarded, timeout=20).close()
    assert api.forwarded == ["op-1", "op-2"]


def test_command_prints_the_url(api: ForwardingApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(_Server, "serve_forever", lambda _: None)
    done = run("--port", "0", "--open")
    assert done.exit_code == 0, done.output
    assert "shows the board of op-1 until Ctrl-C" in done.stdout
    assert [done.stdout.split()[0]] == opened


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pods": []}, "no operator pod in namespace trimtab-system; pass the operator's namespace with -n"),
        ({"holder": "gone"}, "no operator pod in namespace trimtab-system leads"),
        ({"pods": [make_pod("op-1", "0")]}, "set board.enabled in the chart's values"),
        ({"may_forward": False}, "it needs permission to create pods/portforward in namespace trimtab-system"),
    ],
)
def test_obstacle_is_named(api: ForwardingApiServer, change: dict[str, Any], message: str) -> None:
    for name, value in change.items():
        setattr(api, name, value)
    done = run("--port", "0")
    assert done.exit_code == 2
    assert done.stderr.startswith("board: ")
    assert message in done.stderr


def test_used_local_port_is_named(api: ForwardingApiServer, forwarded: str) -> None:
    done = run("--port", forwarded.rpartition(":")[2])
    assert done.exit_code == 2
    assert "choose another, or 0 for a free one" in done.stderr


def test_leader_and_port_come_from_lease_and_flags(api: ForwardingApiServer) -> None:
    pod, port = find_board(Cluster.connect("board", NAMESPACE, None))
    assert (pod, str(port)) == ("op-1", api.pods[1]["spec"]["containers"][0]["args"][2].partition("=")[2])
