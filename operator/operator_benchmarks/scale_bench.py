"""Cost of many resources for one operator, at a real API server (docs/results/operator-scale.md).

    python -m operator_benchmarks.scale_bench --etcd ETCD --apiserver KUBE_APISERVER --resources 1000

No node and no engine: a script sets children Ready and answers like idle engines. The operator is the command
of its image, as a separate process. Reads and writes are counted by the API server's audit log, CPU time
and memory by the kernel: other load on the machine affects only latencies.
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
RECONCILES = "trimtab_operator_reconcile_seconds_count"
LEADER = "trimtab_operator_leader"
POLL_SECONDS = 0.25
AWAY_SECONDS = 30.0
START_SECONDS = 3.0  # of a leader, for its first lists
HUNG = 30
PHASES = ("idle", "edits", "restart", "away", "hung")


@dataclass
class Process:
    """The operator's process, with its CPU time and memory by the kernel."""

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
        """Start it again if it has ended, as the kubelet does: it exits without its Lease."""
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
        """CPU seconds of all its threads so far. Raises SystemExit if it has ended, as without its Lease."""
        assert self._started is not None
        if self._started.poll() is not None:
            words = (self.folder / "operator.log").read_text().splitlines()[-3:]
            raise SystemExit("\n".join(["the operator ended; last log lines:", *words]))
        fields = Path(f"/proc/{self._started.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def reconciles(self) -> float:
        """Number of reconcile iterations over all resources."""
        return self._metric(RECONCILES)

    @property
    def is_leading(self) -> bool:
        """True if it holds the Lease."""
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
    """Process of the scripted kubelet."""

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
class Timeline:
    """First observation times of each resource, from the driver's own watches (monotonic)."""

    sets: dict[str, float] = field(default_factory=dict)
    """By the StatefulSet's name and the value of its mark, which an edit changes."""
    jobs: dict[str, float] = field(default_factory=dict)
    """By the name of the Job that reads a model, which the first turn of a resource makes."""
    ready: dict[str, float] = field(default_factory=dict)
    """By resource and generation."""

    async def follow_sets(self, client: Client) -> None:
        async for _, found, at in _watch_forever(lambda: client.watch(SETS)):
            mark = (found["spec"]["template"]["metadata"].get("labels") or {}).get("mark", "")
            self.sets.setdefault(f"{found['metadata']['name']}={mark}", at)

    async def follow_jobs(self, client: Client) -> None:
        async for _, found, at in _watch_forever(lambda: client.watch(JOBS)):
            self.jobs.setdefault(found["metadata"]["name"], at)

    async def follow_resources(self, client: Client) -> None:
        async for _, found, at in _watch_forever(lambda: client.watch(RESOURCES)):
            name, generation, status = found["metadata"]["name"], found["metadata"]["generation"], found.get("status")
            conditions = {c["type"]: c["status"] for c in (status or {}).get("conditions") or []}
            if conditions.get("Ready") == "True" and (status or {}).get("observedGeneration") == generation:
                self.ready.setdefault(f"{name}={generation}", at)


async def _watch_forever(watch: Callable[[], Any]) -> Any:
    """Restart a watch whenever it ends: the API server is stopped in one phase."""
    while True:
        with suppress(aiohttp.ClientError, OSError, KeyError, ValueError):
            async for event in watch():
                yield event
        await asyncio.sleep(0.5)


def build_resource(name: str, mode: str) -> dict[str, Any]:
    """Return a resource with one replica on the CPU."""
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
    """One run: its processes, and the results."""

    client: Client
    server: ApiServer
    audit: Audit
    operator: Process
    seen: Timeline
    names: list[str]
    options: argparse.Namespace
    rows: dict[str, str] = field(default_factory=dict)

    def report(self, what: str, found: str) -> None:
        self.rows[what] = found
        print(f"{what}: {found}", flush=True)

    async def run_paced(self, names: Iterable[str], act: Callable[[str], Coroutine[None, None, None]]) -> None:
        """Call a function for each resource, at the configured rate."""
        began, tasks = time.monotonic(), list[asyncio.Task[None]]()
        for number, name in enumerate(names):
            await asyncio.sleep(max(0.0, began + number / self.options.rate - time.monotonic()))
            tasks.append(asyncio.create_task(act(name)))
        await asyncio.gather(*tasks)

    async def until(self, done: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:  # noqa: ASYNC110 - several tasks update the state
            await asyncio.sleep(POLL_SECONDS)
        return done()

    async def create(self) -> None:
        """Create all resources once an operator leads, and wait until they are Ready."""
        await self.until(lambda: self.operator.is_leading, self.options.limit)
        await asyncio.sleep(START_SECONDS)
        at: dict[str, float] = {}

        async def make(name: str) -> None:
            at[name] = time.monotonic()
            status, said = await self.client.call("POST", RESOURCES, build_resource(name, self.options.mode))
            assert status == 201, said

        before = self.operator.cpu_seconds
        await self.run_paced(self.names, make)
        await self.until(lambda: all(f"{name}=1" in self.seen.ready for name in self.names), self.options.limit)
        made = [self.seen.sets[f"{n}-g0="] - at[n] for n in self.names if f"{n}-g0=" in self.seen.sets]
        ready = [self.seen.ready[f"{n}=1"] - at[n] for n in self.names if f"{n}=1" in self.seen.ready]
        first = [self.seen.jobs[f"{n}-facts"] - at[n] for n in self.names if f"{n}-facts" in self.seen.jobs]
        self.report("created → children of the first reconcile", percentiles(first))
        self.report("created → StatefulSet (after the Job that reads the model)", percentiles(made))
        self.report("created → Ready", percentiles(ready))
        self.report("CPU time of the operator, created to Ready", f"{self.operator.cpu_seconds - before:.1f} s")
        self.report_calls("created to Ready", len(self.names))

    def report_calls(self, when: str, per: float, unit: str = "per resource") -> None:
        calls = {what: count for what, count in self.audit.since_last().items() if what[1] != "leases"}
        reads = sum(count for (verb, _), count in calls.items() if verb in READS)
        watches = sum(count for (verb, _), count in calls.items() if verb == "watch")
        writes = sum(calls.values()) - reads - watches
        self.report(
            f"API calls, {when}", f"{reads} reads, {watches} watches, {writes} writes; {reads / per:.2f} {unit}"
        )
        most = Counter(calls).most_common(12)
        print("  " + ", ".join(f"{verb} {of} {count}" for (verb, of), count in most), flush=True)

    async def idle(self) -> None:
        """Measure without any changes."""
        await asyncio.sleep(self.options.settle)
        self.audit.since_last()
        cpu, reconciles, began = self.operator.cpu_seconds, self.operator.reconciles, time.monotonic()
        await asyncio.sleep(self.options.idle)
        passed = time.monotonic() - began
        cpu, reconciles = self.operator.cpu_seconds - cpu, self.operator.reconciles - reconciles
        self.report_calls(f"idle for {passed:.0f} s", len(self.names) * passed / 60, "reads per resource and minute")
        self.report("idle, CPU time", f"{cpu:.1f} s in {passed:.0f} s, of {reconciles:.0f} reconciles")
        if reconciles:
            self.report("idle, CPU time per reconcile", f"{cpu / reconciles * 1000:.1f} ms")
        self.report(
            f"idle, CPU time per sweep of {self.options.tick_seconds:g} s",
            f"{cpu / passed * self.options.tick_seconds:.2f} s",
        )
        self.report("idle, RSS", f"{self.operator.rss_mebibytes:.0f} MiB")

    async def measure_edits(self, names: list[str], mark: str) -> list[float]:
        """Change the template of each; return the seconds until its children show it."""
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

        await self.run_paced(names, edit)
        await self.until(lambda: all(shown(name) is not None for name in names), self.options.limit)
        return [found - at[name] for name in names if (found := shown(name)) is not None]

    async def edits(self) -> None:
        """Edit every resource once."""
        before, reconciles, began = self.operator.cpu_seconds, self.operator.reconciles, time.monotonic()
        took = await self.measure_edits(self.names, "a")
        self.report(f"edits at {self.options.rate:g} a second → children", percentiles(took))
        used, passed = self.operator.cpu_seconds - before, time.monotonic() - began
        self.report("CPU time of the operator during edits", f"{used:.1f} s in {passed:.0f} s")
        await self.until(lambda: all(f"{name}=2" in self.seen.ready for name in self.names), self.options.limit)
        self.report("the first edit → all Ready again", f"{time.monotonic() - began:.1f} s")
        await asyncio.sleep(self.options.settle)
        used, reconciles = self.operator.cpu_seconds - before, self.operator.reconciles - reconciles
        each = f"{used / len(self.names) * 1000:.0f} ms in {reconciles / len(self.names):.1f} reconciles"
        self.report("CPU time per edit, including follow-up reconciles", each)
        self.report_calls("edits", len(self.names))

    async def restart(self) -> None:
        """Edit while no operator runs, start it, and wait until every status shows the edit."""
        self.operator.stop()
        generations: dict[str, int] = {}

        async def edit(name: str) -> None:
            change = {"spec": {"rollout": {"bakeTime": "1s"}}}
            _, said = await self.client.call("PATCH", f"{RESOURCES}/{name}", change)
            generations[name] = said["metadata"]["generation"]

        await self.run_paced(self.names, edit)
        self.audit.since_last()
        began = time.monotonic()
        self.operator.start()
        await self.until(lambda: all(f"{n}={g}" in self.seen.ready for n, g in generations.items()), self.options.limit)
        told = [self.seen.ready[k] - began for n, g in generations.items() if (k := f"{n}={g}") in self.seen.ready]
        self.report("restarted → first correct status", percentiles(told))
        self.report("CPU time of the operator until then", f"{self.operator.cpu_seconds:.1f} s")
        self.report_calls("restart", len(self.names))

    async def away(self) -> None:
        """Stop the API server for a while, and edit as soon as it is back."""
        self.server.pause()
        await asyncio.sleep(AWAY_SECONDS)
        await self.server.resume()
        self.operator.revive()
        took = await self.measure_edits(self.names[:1], "away")
        self.report(f"API server stopped for {AWAY_SECONDS:g} s: restarted → children of an edit", percentiles(took))

    async def hung(self) -> None:
        """Edit one healthy resource while other engines accept connections and never answer."""
        hung = [f"hung-{number}" for number in range(HUNG)]
        for name in hung:
            await self.client.call("POST", RESOURCES, build_resource(name, self.options.mode))
        await self.until(lambda: all(f"{name}-g0=" in self.seen.sets for name in hung), self.options.limit)
        await asyncio.sleep(10.0)
        took = []
        for number in range(self.options.rounds):
            took += await self.measure_edits(self.names[:1], f"h{number}")
            await asyncio.sleep(3.0)
        self.report(f"edits of one resource with {HUNG} resources with hung engines", percentiles(took))


async def run(options: argparse.Namespace, folder: Path) -> Mapping[str, str]:
    """Run the benchmark with logs and data in `folder`."""
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
            seen = Timeline()
            all_of_them = (seen.follow_sets, seen.follow_jobs, seen.follow_resources)
            followers = [asyncio.create_task(follow(client)) for follow in all_of_them]
            operator.start()
            names = [f"m-{number}" for number in range(options.resources)]
            bench = Bench(client, server, Audit(server.audit_log), operator, seen, names, options)
            bench.report("Kubernetes", version["gitVersion"])
            bench.report("resources", f"{options.resources}, tuning {options.mode}, tick {options.tick_seconds:g} s")
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
    """Create the namespace and the CRD."""
    await client.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    crd = yaml.safe_load(CRD.read_text())
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    status, said = await client.call("POST", crds, crd)
    assert status == 201, said
    while (await client.call("GET", RESOURCES))[0] != 200:  # noqa: ASYNC110 - no event signals readiness
        await asyncio.sleep(POLL_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--etcd", type=Path, required=True, help="etcd's binary")
    parser.add_argument("--apiserver", type=Path, required=True, help="kube-apiserver's binary")
    parser.add_argument("--resources", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=50.0, help="resources created or edited per second")
    parser.add_argument("--mode", default="Recommend", choices=["Off", "Recommend", "Auto"], help="tuning.mode")
    parser.add_argument("--tick-seconds", type=float, default=5.0, help="as the chart's tickSeconds")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds to wait before the idle measurement")
    parser.add_argument("--idle", type=float, default=120.0, help="seconds of the idle measurement")
    parser.add_argument("--limit", type=float, default=300.0, help="longest wait of a phase, in seconds")
    parser.add_argument("--rounds", type=int, default=20, help="edits with hung engines")
    parser.add_argument("--phases", nargs="*", default=list(PHASES), choices=PHASES)
    parser.add_argument("--port", type=int, default=26443, help="the first of five ports on loopback")
    parser.add_argument("--keep", action="store_true", help="keep logs and data")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # run the cleanup
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
