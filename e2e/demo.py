"""`make demo`: install, serve and tune a model on a kind cluster, shown in the terminal.

Two scenes have the same model and load. With headroom on the device, the operator sees preemptions and raises
`gpu_memory_utilization`; without headroom it raises `watermark`. The engine's metrics are drawn as a chart.
The exit code is 0 only if everything was observed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.answer import EXPECTED, QUESTION, ask
from harness.deployment import Deployment, sample
from harness.engine import EngineReading
from harness.install import Installation, require_no_other_release
from harness.kube import CRD_KIND, KubectlError
from harness.picture import Move, Trace
from harness.picture import write as write_picture
from harness.report import set_sink
from harness.service import NoForward
from harness.stage import Stage
from harness.target import CLUSTER_TOOL, REPOSITORY, NoCluster, Target, connect, images_in_cluster
from harness.traffic import Load, LoadReport, load
from harness.tuning import (
    CALM_DEADLINE_SECONDS,
    CONCURRENCY,
    DECISION_SECONDS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SEQS,
    UTILIZATION,
    WATCH_SECONDS,
    WATERMARK,
    calm_probe,
    decision_probe,
    load_options,
    pinned_utilization,
    predictions,
    preemptions_per_1000_tokens,
    recomputed_share,
    start_utilization,
    watch_probe,
)
from harness.watch import watch
from rich.console import Console
from rich.table import Table

NAMESPACE = "trimtab-demo"
EXIT_INTERRUPTED = 130  # as in shells
PICTURE = REPOSITORY / "build" / "demo.svg"
LOG_WIDTH = 140  # columns if the output is not a terminal
FAILURES = (AssertionError, KubectlError, NoForward, NoCluster, RuntimeError, KeyError, OSError)


@dataclass(slots=True)
class Scene:
    """Results of one scene: before the decision, when it was applied, and afterwards."""

    title: str
    decision: dict[str, Any]
    before: EngineReading
    then: EngineReading
    after: EngineReading
    report: LoadReport
    restarted: bool
    trace: Trace
    predicted: dict[str, float]
    """Predicted values by measure."""
    seconds: tuple[float, float]
    """Duration before the decision and after it."""


@dataclass(slots=True)
class Demo:
    """The demo and its results so far."""

    stage: Stage
    target: Target
    installation: Installation
    numbers: dict[str, Any] = field(default_factory=dict)
    scenes: list[Scene] = field(default_factory=list)

    # --- chapters -----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        self.stage.chapter("Install the operator with helm", 25, stage="install")
        self.stage.dim("$ helm " + " ".join(self.installation.helm_arguments()))
        self.installation.install()
        self.target.kube.delete("namespace", NAMESPACE, wait=True)
        self.target.kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})

    def serve(self, name: str, **changes: Any) -> Deployment:
        """Apply the sample and show its load progress until it is Ready."""
        deployment = Deployment(self.target.kube, NAMESPACE, name)
        manifest = sample(name, image=self.installation.images.model, **changes)
        self.stage.dim(f"$ kubectl apply -f config/samples/smollm2-cpu.yaml   # as {name}")
        begin = time.monotonic()
        self.target.kube.apply(manifest, namespace=NAMESPACE)
        with watch(self.target.kube, CRD_KIND, name, NAMESPACE) as watched, self.stage.loading(watched):
            deployment.ready()
        self.stage.line(f"  Ready after {time.monotonic() - begin:.0f} s")
        self.stage.dim(self.target.kube.run("get", "infd", "-n", NAMESPACE).rstrip())
        return deployment

    def answer(self, deployment: Deployment, applied_at: float) -> None:
        self.stage.chapter("Send a request through the Service with the openai client", 5, stage="answer")
        self.stage.line(f"  {QUESTION}")
        answer = ask(deployment, show=self.stage.piece)
        self.stage.line("")
        assert EXPECTED in answer.text, f"the answer does not contain {EXPECTED}: {answer.text!r}"
        assert answer.chunks > 1, "the answer was not streamed"
        self.numbers["answer"] = answer.text
        self.numbers["apply_to_first_token_seconds"] = round(answer.first_token_at - applied_at, 1)
        self.stage.line(f"  streamed in {answer.chunks} chunks")

    def trim(self, title: str, deployment: Deployment, knob: str) -> Scene:
        """Run load until the operator has changed `knob`, and then until preemptions end, or for a fixed time.

        Preemptions only end if more KV memory is available.
        """
        before, restarts = deployment.engine(), deployment.restarts()
        self.stage.line(
            f"  {CONCURRENCY} clients continuously send prompts of {PROMPT_TOKENS} tokens and request {OUTPUT_TOKENS}. "
            f"The KV cache holds {before.kv_tokens:,} tokens, and at most {before.kv_tokens_cap:,}."
        )
        options, trace, begin = load_options(deployment), Trace(title), time.monotonic()
        with load(self.target.kube, NAMESPACE, self.installation.images.operator, options) as running:
            decision = self._until_moved(deployment, knob, before, trace)
            then, decided = deployment.engine(), time.monotonic()
            predicted = predictions(deployment, decision)
            self._explain(decision, before, then, restarted=deployment.restarts() != restarts)
            continue_load = self._until_calm if knob == UTILIZATION else self._watched
            after = continue_load(deployment, trace)
            seconds = decided - begin, time.monotonic() - decided
            self._compare(predicted, then, after)
            trace.moves = [_move(entry) for entry in reversed(deployment.history()) if "to" in entry]
            report = self._stop(running)
        restarted = deployment.restarts() != restarts
        assert not restarted, "a pod or a container was restarted"
        assert report.failed == [], f"requests failed: {report.failed[:3]}"
        assert report.completed > 0, "no request was completed"
        return Scene(title, decision, before, then, after, report, restarted, trace, predicted, seconds)

    def _until_moved(self, deployment: Deployment, knob: str, before: EngineReading, trace: Trace) -> dict[str, Any]:
        with self.stage.meter() as meter:
            probe = decision_probe(deployment, knob, before.values[knob], _both(meter.show, trace))
            return deployment.waiter.until(f"the operator changes {knob}", probe, deadline_seconds=DECISION_SECONDS)

    def _explain(self, decision: dict[str, Any], before: EngineReading, now: EngineReading, *, restarted: bool) -> None:
        assert now.preemptions > before.preemptions, "no preemptions were counted"
        self.stage.line(f"  [bold red]{now.preemptions - before.preemptions:.0f} preemptions[/bold red] were counted.")
        self.stage.quote(f"The operator's decision {decision['id']} ({decision['reason']})", decision["message"])
        self.stage.line(
            f"  Engine: configuration generation {before.config_generation} → {now.config_generation}, "
            f"KV cache {before.kv_tokens:,} → {now.kv_tokens:,} tokens, watermark {before.values[WATERMARK]:g} → "
            f"{now.values[WATERMARK]:g}, max_num_seqs {before.values[SEQS]:.0f} → {now.values[SEQS]:.0f}; "
            f"{'RESTARTED' if restarted else 'nothing was restarted'}."
        )

    def _compare(self, predicted: dict[str, float], then: EngineReading, after: EngineReading) -> None:
        if "recomputed share" in predicted:
            self.stage.line(
                f"  Recomputed share: predicted {predicted['recomputed share']:.1%}, observed "
                f"{recomputed_share(then, after):.1%}."
            )

    def _until_calm(self, deployment: Deployment, trace: Trace) -> EngineReading:
        self.stage.line("  The same load continues:")
        with self.stage.meter() as meter:
            after = deployment.waiter.until(
                "preemptions have ended",
                calm_probe(deployment, _both(meter.show, trace)),
                deadline_seconds=CALM_DEADLINE_SECONDS,
            )
        further = deployment.history()
        if len(further) > 1:
            self.stage.dim("  all decisions, newest first:")
            for entry in further:
                self.stage.dim(f"    {entry['message']}")
        self.stage.line("  [bold green]No more preemptions under the same load.[/bold green]")
        return after

    def _watched(self, deployment: Deployment, trace: Trace) -> EngineReading:
        self.stage.line(f"  The same load continues for {WATCH_SECONDS:.0f} s:")
        with self.stage.meter() as meter:
            show = _both(meter.show, trace)

            def reading() -> EngineReading:
                seen = deployment.engine()
                show(seen)
                return seen

            return deployment.waiter.until(
                "the same load continues", watch_probe(reading), deadline_seconds=2 * WATCH_SECONDS
            )

    def _stop(self, running: Load) -> LoadReport:
        report = running.stop()
        self.stage.line(f"  Client results: {report}")
        return report

    def play(self) -> None:
        self.install()
        self.stage.chapter("Apply a model and wait until it is Ready", 30, stage="model Ready")
        applied_at = time.monotonic()
        first = self.serve("smollm2")
        self.answer(first, applied_at)
        self.stage.chapter("Scene one: load on a small KV cache with headroom on the device", 90, stage="scene one")
        self.scenes.append(self.trim("with headroom", first, UTILIZATION))
        self.stage.chapter(
            "Scene two: the same load without headroom (gpuMemoryUtilization is pinned)", 100, stage="scene two"
        )
        self.target.kube.delete(CRD_KIND, first.name, NAMESPACE, wait=True)
        first.await_deletion()
        second = self.serve("smollm2-pinned", **pinned_utilization(start_utilization()))
        self.scenes.append(self.trim("without headroom", second, WATERMARK))

    # --- the end ------------------------------------------------------------------------------------------------------

    def summary(self) -> None:
        self.stage.chapter("Summary", 0, stage="summary")
        table = Table(title=f"Kubernetes {self.target.version}, SmolLM2-135M in float32 on the CPU")
        for column in ("", *(scene.title for scene in self.scenes)):
            table.add_column(column)
        for name, values in self._rows():
            table.add_row(name, *values)
        self.stage.console.print(table)
        self.stage.line(f"  kubectl apply to first token: {self.numbers['apply_to_first_token_seconds']} s")
        self.stage.line(f"  total: {self.stage.elapsed():.0f} s")

    def picture(self, path: Path) -> None:
        caption = (
            f"SmolLM2-135M on the CPU, Kubernetes {self.target.version}: {CONCURRENCY} clients, no request failed, "
        )
        write_picture([scene.trace for scene in self.scenes], caption + "nothing restarted", path)
        self.stage.line(f"  chart: {path}")

    def _rows(self) -> list[tuple[str, list[str]]]:
        scenes = self.scenes
        return [
            ("decision", [f"{s.decision['knob']} {s.decision['from']} → {s.decision['to']}" for s in scenes]),
            ("KV tokens", [f"{s.before.kv_tokens:,} → {s.after.kv_tokens:,}" for s in scenes]),
            ("max_num_seqs", [f"{s.before.values[SEQS]:.0f} → {s.after.values[SEQS]:.0f}" for s in scenes]),
            ("watermark", [f"{s.before.values[WATERMARK]:g} → {s.after.values[WATERMARK]:g}" for s in scenes]),
            (
                "preemptions per 1,000 tokens",
                [
                    f"{preemptions_per_1000_tokens(s.before, s.then):.1f} → "
                    f"{preemptions_per_1000_tokens(s.then, s.after):.1f}"
                    for s in scenes
                ],
            ),
            ("recomputed share", [_shares(s) for s in scenes]),
            ("tokens per second", [f"{_speed(s, 0):.0f} → {_speed(s, 1):.0f}" for s in scenes]),
            ("requests completed", [str(s.report.completed) for s in scenes]),
            ("requests failed", [str(len(s.report.failed)) for s in scenes]),
            ("restarts", ["yes" if s.restarted else "none" for s in scenes]),
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "server_version": self.target.version,
            "seconds": round(self.stage.elapsed(), 1),
            **self.numbers,
            "scenes": [
                {
                    "title": scene.title,
                    "decision": scene.decision,
                    "kv_tokens": [scene.before.kv_tokens, scene.after.kv_tokens],
                    "max_num_seqs": [scene.before.values[SEQS], scene.after.values[SEQS]],
                    "watermark": [scene.before.values[WATERMARK], scene.after.values[WATERMARK]],
                    "preemptions_per_1000_tokens": [
                        preemptions_per_1000_tokens(scene.before, scene.then),
                        preemptions_per_1000_tokens(scene.then, scene.after),
                    ],
                    "recomputed_share": [
                        recomputed_share(scene.before, scene.then),
                        recomputed_share(scene.then, scene.after),
                    ],
                    "predicted": scene.predicted,
                    "tokens_per_second": [_speed(scene, 0), _speed(scene, 1)],
                    "gpu_memory_utilization": [scene.before.values[UTILIZATION], scene.after.values[UTILIZATION]],
                    "config_generation": [scene.before.config_generation, scene.after.config_generation],
                    "preemptions": scene.after.preemptions - scene.before.preemptions,
                    "completed": scene.report.completed,
                    "failed": len(scene.report.failed),
                    "restarted": scene.restarted,
                    "ttft_seconds": scene.report.ttft_seconds,
                    "latency_seconds": scene.report.latency_seconds,
                }
                for scene in self.scenes
            ],
        }


def _shares(scene: Scene) -> str:
    """Return the recomputed share before and after the decision, and the predicted one."""
    before, after = recomputed_share(scene.before, scene.then), recomputed_share(scene.then, scene.after)
    predicted = scene.predicted.get("recomputed share")
    note = "" if predicted is None else f" (predicted {predicted:.1%})"
    return f"{before:.1%} → {after:.1%}{note}"


def _speed(scene: Scene, part: int) -> float:
    """Return output tokens per second before (0) or after (1) the decision."""
    one, other = ((scene.before, scene.then), (scene.then, scene.after))[part]
    return (other.generation_tokens - one.generation_tokens) / max(1e-9, scene.seconds[part])


def _both(show: Callable[[EngineReading], None], trace: Trace) -> Callable[[EngineReading], None]:
    """Return a function that shows a reading and records it for the chart."""

    def seen(reading: EngineReading) -> None:
        show(reading)
        trace.see(reading, at=time.time())

    return seen


def _move(entry: dict[str, Any]) -> Move:
    """Convert an entry of status.tuning.history for the chart."""
    at = datetime.fromisoformat(entry["time"]).timestamp()
    return Move(at, f"{entry['knob']} {entry['from']} → {entry['to']}")


def clean_up(stage: Stage, target: Target, installation: Installation) -> None:
    """Delete the kind cluster, or with CLUSTER=current everything that was installed into it."""
    stage.chapter("Clean up (KEEP=1 skips this)", 20, stage="clean-up")
    if target.is_own:
        subprocess.run([sys.executable, str(CLUSTER_TOOL), "down"], check=True, timeout=300.0)
        return
    target.kube.delete("inferencedeployments", "--all", NAMESPACE, wait=True)
    target.kube.delete("namespace", NAMESPACE, wait=True)
    installation.uninstall()


def show_next_commands(stage: Stage, target: Target) -> None:
    stage.chapter("Everything keeps running (KEEP=1)", 0, stage="left up")
    if target.is_own:
        stage.line('  eval "$(python3 e2e/cluster env)"')
    for command in (
        f"kubectl -n {NAMESPACE} get infd,pods",
        f"kubectl -n {NAMESPACE} get infd smollm2-pinned -o yaml",
        f"kubectl -n {NAMESPACE} get events --sort-by=.lastTimestamp",
        "kubectl -n trimtab-system logs --selector app.kubernetes.io/component=operator --tail=100",
        f"kubectl -n {NAMESPACE} port-forward svc/smollm2-pinned 8000:8000",
    ):
        stage.line(f"  {command}")
    stage.line(f"  kubectl delete ns {NAMESPACE}; helm uninstall trimtab -n trimtab-system")
    if target.is_own:
        stage.line("  make cluster-down")


def main() -> int:
    parser = argparse.ArgumentParser(description="Install, serve and tune a model on a kind cluster.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE.svg",
        default=Path(os.environ.get("PICTURE") or PICTURE),
        help="chart of KV usage, preemptions and decisions, with its data in FILE.json (default: %(default)s)",
    )
    parser.add_argument("--keep", action="store_true", default=os.environ.get("KEEP", "") not in ("", "0"))
    arguments = parser.parse_args()
    stage = Stage(Console() if sys.stdout.isatty() else Console(width=LOG_WIDTH))
    set_sink(stage.dim)
    stage.chapter("Kubernetes cluster", 10, stage="node")
    try:
        target = connect()
        require_no_other_release(target)
        stage.dim(target.kube.run("get", "nodes", "-o", "wide").rstrip())
        stage.line(f"  {target.describe()}")
        installation = Installation(target.kube, images_in_cluster())
    except FAILURES as error:
        stage.line(f"[bold red]The demo cannot start:[/bold red] {error}")
        return 2
    demo = Demo(stage, target, installation)
    code = 0
    try:
        demo.play()
        demo.summary()
        demo.picture(arguments.picture)
    except FAILURES as error:
        stage.console.print(f"The demo failed: {error}", markup=False, style="bold red")
        code = 1
    except KeyboardInterrupt:
        stage.line("[bold red]Interrupted.[/bold red]")
        code = EXIT_INTERRUPTED
    finally:
        if arguments.json is not None:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(demo.as_json(), indent=2) + "\n")
        if arguments.keep:
            show_next_commands(stage, target)
        else:
            clean_up(stage, target, installation)
        stage.end()
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
