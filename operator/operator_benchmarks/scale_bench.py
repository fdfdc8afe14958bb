"""What many resources cost one operator, at a real API server (docs/results/operator-scale.md).

    python -m operator_benchmarks.scale_bench --etcd ETCD --apiserver KUBE_APISERVER --resources 1000

No node and no engine: a script fakes the children Ready and answers as engines at rest do. The operator is the command
that its image runs, as a process of its own. Reads and writes are counted by the API server's audit log, processor time
and memory by the kernel: work beside it on the machine moves neither. It moves latencies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from operator_benchmarks.api_server import DRIVER, OPERATOR, READS, ApiServer, Audit, Client

NAMESPACE = "bench"
ROOT = Path(__file__).parents[2]
CRD = ROOT / "crds/trimtab.dev_inferencedeployments.yaml"
RESOURCES = f"/apis/trimtab.dev/v1alpha1/namespaces/{NAMESPACE}/inferencedeployments"
SETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets"
JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
COMMAND = "from trimtab_operator.command import operator; operator()"
TURNS = "trimtab_operator_reconcile_seconds_count"
LEADER = "trimtab_operator_leader"
POLL_SECONDS = 0.25
AWAY_SECONDS = 30.0
START_SECONDS = 3.0  # of a leader, for its first lists
HUNG = 30
PHASES = ("idle", "edits", "restart", "away", "hung")


@dataclass
class Process:
    """The operator's process, and what the kernel says of it."""

    folder: Path
    kubeconfig: Path
    ports: int
    flags: tuple[str, ...]
    _started: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            *(sys.executable, "-c", COMMAND, "run"),
            *("--operator-namespace", NAMESPACE, "--webhook-port", "0", "--default-image", "engine:1"),
            *("--liveness-port", str(self.ports), "--metrics-port", str(self.ports + 1)),
            *("--network-policy", json.dumps({"operator": {"podSelector": {}}})),
            *self.flags,
        ]
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        with (self.folder / "operator.log").open("ab") as log:
            self._started = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def revive(self) -> None:
        """Start it again if it has ended, as the kubelet does: without its Lease it does not go on."""
        if self._started is not None and self._started.poll() is not None:
            self.start()

    def stop(self) -> None:
        if self._started is not None and self._started.poll() is None:
            self._started.terminate()
            try:
                self._started.wait(45)
            except subprocess.TimeoutExpired:
                self._started.kill()
                self._started.wait()

    @property
    def cpu_seconds(self) -> float:
        """Processor time so far, of all its threads. Raises SystemExit where it has ended, as without its Lease."""
        assert self._started is not None
        if self._started.poll() is not None:
            words = (self.folder / "operator.log").read_text().splitlines()[-3:]
            raise SystemExit("\n".join(["the operator ended; its last words:", *words]))
        fields = Path(f"/proc/{self._started.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def turns(self) -> float:
        """How many turns it has taken, of all resources."""
        return self._metric(TURNS)

    @property
    def is_leading(self) -> bool:
        """Whether it has the Lease; not before it says so."""
        try:
            return self._metric(LEADER) == 1.0
        except OSError:
            return False

    def _metric(self, family: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports + 1}/metrics", timeout=60) as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith(f"{family} "))

    @property
    def rss_mebibytes(self) -> float:
        assert self._started is not None
        status = Path(f"/proc/{self._started.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) / 1024


@dataclass
class Script:
    """The process that fakes the children Ready."""

    folder: Path
    arguments: list[str]
    _started: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "kubelet.log").open("ab") as log:
            command = [sys.executable, "-m", "operator_benchmarks.faked_kubelet", *self.arguments]
            self._started = subprocess.Popen(command, stdout=log, stderr=log)

    def stop(self) -> None:
        if self._started is not None:
            self._started.kill()
            self._started.wait()


@dataclass
class Seen:
    """When something of each resource was first seen, by a watch of the driver's own (monotonic)."""

    sets: dict[str, float] = field(default_factory=dict)
    """By the StatefulSet's name and the value of its mark, which an edit changes."""
    jobs: dict[str, float] = field(default_factory=dict)
    """By the name of the Job that reads a model, which the first turn of a resource makes."""
    ready: dict[str, float] = field(default_factory=dict)
    """By resource and generation."""

    async def follow_sets(self, client: Client) -> None:
        async for _, found, at in _tireless(lambda: client.watch(SETS)):
            mark = (found["spec"]["template"]["metadata"].get("labels") or {}).get("mark", "")
            self.sets.setdefault(f"{found['metadata']['name']}={mark}", at)

    async def follow_jobs(self, client: Client) -> None:
        async for _, found, at in _tireless(lambda: client.watch(JOBS)):
            self.jobs.setdefault(found["metadata"]["name"], at)

    async def follow_resources(self, client: Client) -> None:
        async for _, found, at in _tireless(lambda: client.watch(RESOURCES)):
            name, generation, status = found["metadata"]["name"], found["metadata"]["generation"], found.get("status")
            conditions = {c["type"]: c["status"] for c in (status or {}).get("conditions") or []}
            if conditions.get("Ready") == "True" and (status or {}).get("observedGeneration") == generation:
                self.ready.setdefault(f"{name}={generation}", at)


async def _tireless(watch: Callable[[], Any]) -> Any:
    """A watch that begins anew whenever it ends: the API server goes away in one phase."""
    while True:
        with suppress(aiohttp.ClientError, OSError, KeyError, ValueError):
            async for event in watch():
                yield event
        await asyncio.sleep(0.5)


def a_resource(name: str, mode: str) -> dict[str, Any]:
    """A resource of one replica on the CPU."""
    spec = {
        "model": {"uri": "file:///models/m"},
        "runtime": {"device": "cpu"},
        "replicas": 1,
        "tuning": {"mode": mode},
        "rollout": {"bakeTime": "0s"},
    }
    kind = {"apiVersion": "trimtab.dev/v1alpha1", "kind": "InferenceDeployment"}
    return {**kind, "metadata": {"name": name}, "spec": spec}


def percentiles(values: Iterable[float]) -> str:
    found = sorted(values)
    if not found:
        return "none"
    at = {p: found[min(len(found) - 1, math.ceil(len(found) * p / 100) - 1)] for p in (50, 99)}
    return f"p50 {at[50]:.2f} s, p99 {at[99]:.2f} s, all {found[-1]:.2f} s of {len(found)}"


@dataclass
class Bench:
    """One run: what it measures with, and what it has found."""

    client: Client
    server: ApiServer
    audit: Audit
    operator: Process
    seen: Seen
    names: list[str]
    options: argparse.Namespace
    rows: dict[str, str] = field(default_factory=dict)

    def tell(self, what: str, found: str) -> None:
        self.rows[what] = found
        print(f"{what}: {found}", flush=True)

    async def paced(self, names: Iterable[str], act: Callable[[str], Coroutine[None, None, None]]) -> None:
        """Do something with each resource, so many a second."""
        began, tasks = time.monotonic(), list[asyncio.Task[None]]()
        for number, name in enumerate(names):
            await asyncio.sleep(max(0.0, began + number / self.options.rate - time.monotonic()))
            tasks.append(asyncio.create_task(act(name)))
        await asyncio.gather(*tasks)

    async def until(self, done: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:  # noqa: ASYNC110 - what is seen comes from several tasks
            await asyncio.sleep(POLL_SECONDS)
        return done()

    async def create(self) -> None:
        """Create all resources once there is an operator, and wait until they are Ready."""
        await self.until(lambda: self.operator.is_leading, self.options.limit)
        await asyncio.sleep(START_SECONDS)
        at: dict[str, float] = {}

        async def make(name: str) -> None:
            at[name] = time.monotonic()
            status, said = await self.client.call("POST", RESOURCES, a_resource(name, self.options.mode))
            assert status == 201, said

        before = self.operator.cpu_seconds
        await self.paced(self.names, make)
        await self.until(lambda: all(f"{name}=1" in self.seen.ready for name in self.names), self.options.limit)
        made = [self.seen.sets[f"{n}-g0="] - at[n] for n in self.names if f"{n}-g0=" in self.seen.sets]
        ready = [self.seen.ready[f"{n}=1"] - at[n] for n in self.names if f"{n}=1" in self.seen.ready]
        first = [self.seen.jobs[f"{n}-facts"] - at[n] for n in self.names if f"{n}-facts" in self.seen.jobs]
        self.tell("created → the children of its first turn", percentiles(first))
        self.tell("created → StatefulSet (its model read by a Job before)", percentiles(made))
        self.tell("created → Ready", percentiles(ready))
        self.tell("processor time of the operator, created to Ready", f"{self.operator.cpu_seconds - before:.1f} s")
        self.tell_calls("created to Ready", len(self.names))

    def tell_calls(self, when: str, per: float, unit: str = "per resource") -> None:
        calls = {what: count for what, count in self.audit.since_last().items() if what[1] != "leases"}
        reads = sum(count for (verb, _), count in calls.items() if verb in READS)
        watches = sum(count for (verb, _), count in calls.items() if verb == "watch")
        writes = sum(calls.values()) - reads - watches
        self.tell(f"API calls, {when}", f"{reads} reads, {watches} watches, {writes} writes; {reads / per:.2f} {unit}")
        most = Counter(calls).most_common(12)
        print("  " + ", ".join(f"{verb} {of} {count}" for (verb, of), count in most), flush=True)

    async def idle(self) -> None:
        """Let nothing happen."""
        await asyncio.sleep(self.options.settle)
        self.audit.since_last()
        cpu, turns, began = self.operator.cpu_seconds, self.operator.turns, time.monotonic()
        await asyncio.sleep(self.options.idle)
        passed = time.monotonic() - began
        cpu, turns = self.operator.cpu_seconds - cpu, self.operator.turns - turns
        self.tell_calls(f"idle for {passed:.0f} s", len(self.names) * passed / 60, "reads per resource and minute")
        self.tell("idle, processor time", f"{cpu:.1f} s in {passed:.0f} s, of {turns:.0f} turns")
        if turns:
            self.tell("idle, processor time per turn", f"{cpu / turns * 1000:.1f} ms")
        self.tell(
            f"idle, processor time per sweep of {self.options.tick_seconds:g} s",
            f"{cpu / passed * self.options.tick_seconds:.2f} s",
        )
        self.tell("idle, RSS", f"{self.operator.rss_mebibytes:.0f} MiB")

    async def edited(self, names: list[str], mark: str) -> list[float]:
        """Change the template of each; how long until its children show it."""
        at: dict[str, float] = {}

        async def edit(name: str) -> None:
            at[name] = time.monotonic()
            change = {"spec": {"template": {"metadata": {"labels": {"mark": mark}}}}}
            status, said = await self.client.call("PATCH", f"{RESOURCES}/{name}", change)
            assert status == 200, said

        def shown(name: str) -> float | None:
            return min(
                (self.seen.sets[k] for k in (f"{name}-g0={mark}", f"{name}-g1={mark}") if k in self.seen.sets),
                default=None,
            )

        await self.paced(names, edit)
        await self.until(lambda: all(shown(name) is not None for name in names), self.options.limit)
        return [found - at[name] for name in names if (found := shown(name)) is not None]

    async def edits(self) -> None:
        """Edit every resource once."""
        before, turns, began = self.operator.cpu_seconds, self.operator.turns, time.monotonic()
        took = await self.edited(self.names, "a")
        self.tell(f"edits at {self.options.rate:g} a second → children", percentiles(took))
        used, passed = self.operator.cpu_seconds - before, time.monotonic() - began
        self.tell("processor time of the operator while edits came", f"{used:.1f} s in {passed:.0f} s")
        await self.until(lambda: all(f"{name}=2" in self.seen.ready for name in self.names), self.options.limit)
        self.tell("the first edit → all Ready again", f"{time.monotonic() - began:.1f} s")
        await asyncio.sleep(self.options.settle)
        used, turns = self.operator.cpu_seconds - before, self.operator.turns - turns
        each = f"{used / len(self.names) * 1000:.0f} ms in {turns / len(self.names):.1f} turns"
        self.tell("an edit and all that follows from it: processor time", each)
        self.tell_calls("edits", len(self.names))

    async def restart(self) -> None:
        """What was changed while no operator ran stands in every status."""
        self.operator.stop()
        generations: dict[str, int] = {}

        async def edit(name: str) -> None:
            change = {"spec": {"rollout": {"bakeTime": "1s"}}}
            _, said = await self.client.call("PATCH", f"{RESOURCES}/{name}", change)
            generations[name] = said["metadata"]["generation"]

        await self.paced(self.names, edit)
        self.audit.since_last()
        began = time.monotonic()
        self.operator.start()
        await self.until(lambda: all(f"{n}={g}" in self.seen.ready for n, g in generations.items()), self.options.limit)
        told = [self.seen.ready[k] - began for n, g in generations.items() if (k := f"{n}={g}") in self.seen.ready]
        self.tell("restarted → first correct status", percentiles(told))
        self.tell("processor time of the operator until then", f"{self.operator.cpu_seconds:.1f} s")
        self.tell_calls("restart", len(self.names))

    async def away(self) -> None:
        """An API server that is away for a while, and an edit as soon as it is back."""
        self.server.pause()
        await asyncio.sleep(AWAY_SECONDS)
        await self.server.resume()
        self.operator.revive()
        took = await self.edited(self.names[:1], "away")
        self.tell(f"API server away for {AWAY_SECONDS:g} s: back → an edit's children", percentiles(took))

    async def hung(self) -> None:
        """One healthy resource beside some whose engines accept connections and say nothing."""
        hung = [f"hung-{number}" for number in range(HUNG)]
        for name in hung:
            await self.client.call("POST", RESOURCES, a_resource(name, self.options.mode))
        await self.until(lambda: all(f"{name}-g0=" in self.seen.sets for name in hung), self.options.limit)
        await asyncio.sleep(10.0)
        took = []
        for number in range(self.options.rounds):
            took += await self.edited(self.names[:1], f"h{number}")
            await asyncio.sleep(3.0)
        self.tell(f"edits of one resource beside {HUNG} with hung engines", percentiles(took))


async def run(options: argparse.Namespace, folder: Path) -> Mapping[str, str]:
    """One run, whose logs and data are in `folder`."""
    server = ApiServer(options.etcd, options.apiserver, folder, options.port)
    flags = ("--tick-seconds", f"{options.tick_seconds:g}")
    operator = Process(folder, server.kubeconfig(OPERATOR), options.port + 3, flags)
    kubelet = Script(folder, [server.url, server.tokens[DRIVER], NAMESPACE])
    followers: list[asyncio.Task[None]] = []
    try:
        await server.start()
        async with Client(server.url, server.tokens[DRIVER]) as client:
            _, version = await client.call("GET", "/version")
            await _prepare(client)
            kubelet.start()
            seen = Seen()
            all_of_them = (seen.follow_sets, seen.follow_jobs, seen.follow_resources)
            followers = [asyncio.create_task(follow(client)) for follow in all_of_them]
            operator.start()
            names = [f"m-{number}" for number in range(options.resources)]
            bench = Bench(client, server, Audit(server.audit_log), operator, seen, names, options)
            bench.tell("Kubernetes", version["gitVersion"])
            bench.tell("resources", f"{options.resources}, tuning {options.mode}, tick {options.tick_seconds:g} s")
            await bench.create()
            for phase in options.phases:
                await getattr(bench, phase)()
            return bench.rows
    finally:
        for follower in followers:
            follower.cancel()
        operator.stop()
        kubelet.stop()
        server.stop()


async def _prepare(client: Client) -> None:
    """The namespace and the CRD."""
    await client.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    crd = yaml.safe_load(CRD.read_text())
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    status, said = await client.call("POST", crds, crd)
    assert status == 201, said
    while (await client.call("GET", RESOURCES))[0] != 200:  # noqa: ASYNC110 - there is nobody to tell us
        await asyncio.sleep(POLL_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--etcd", type=Path, required=True, help="etcd's binary")
    parser.add_argument("--apiserver", type=Path, required=True, help="kube-apiserver's binary")
    parser.add_argument("--resources", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=50.0, help="how many are created or edited a second")
    parser.add_argument("--mode", default="Recommend", choices=["Off", "Recommend", "Auto"], help="tuning.mode")
    parser.add_argument("--tick-seconds", type=float, default=5.0, help="as the chart's tickSeconds")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds before idleness is measured")
    parser.add_argument("--idle", type=float, default=120.0, help="seconds for which it is measured")
    parser.add_argument("--limit", type=float, default=300.0, help="longest wait of a phase, in seconds")
    parser.add_argument("--rounds", type=int, default=20, help="edits beside hung engines")
    parser.add_argument("--phases", nargs="*", default=list(PHASES), choices=PHASES)
    parser.add_argument("--port", type=int, default=26443, help="the first of five ports on loopback")
    parser.add_argument("--keep", action="store_true", help="keep logs and data")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended
    folder = Path(tempfile.mkdtemp(prefix="operator-scale-"))
    try:
        rows = asyncio.run(run(options, folder))
    finally:
        if options.keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print("\n| what | found |\n|---|---|")
    for what, found in rows.items():
        print(f"| {what} | {found} |")


if __name__ == "__main__":
    main()
