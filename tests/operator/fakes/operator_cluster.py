"""One cluster in memory, and one resource in it: API server, controllers, nodes and engines, in virtual time.

Tests drive it in two ways. `turn()` looks, decides and acts without any I/O, as the loop does. Or the loop itself works
on it: it has the verbs of `edge.cluster.Cluster`, and `FakeEngines` those of `edge.engines.Engines`. What is applied
exists; `controllers()` lets StatefulSets, scheduler, kubelets and Jobs take one step.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, cast

import aiohttp
from operator_builders import MODEL_FACTS, NOW, a_resource
from trimtab_operator.builders.admin_token import Tokens, admin_token
from trimtab_operator.builders.config_map import facts_config_map
from trimtab_operator.engines.admin_client import Patched
from trimtab_operator.engines.poller import EnginePoller, OnAnswer
from trimtab_operator.engines.router_client import RouterPoller
from trimtab_operator.kube.client import Cluster
from trimtab_operator.kube.nodes import Nodes
from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.actions import Action, Apply, LiveValues, Patch, event_of
from trimtab_operator.observed.engines import EngineObservation, EngineTarget, MetricsSettings, ReportedScheduling
from trimtab_operator.observed.groups import (
    Group,
    ObservedChildren,
    groups_of,
    is_pod_ready,
    is_terminating,
    ordinal_of,
)
from trimtab_operator.observed.router import RouterReport, RouterTarget, router_targets
from trimtab_operator.planning.gpu_budget import GpuClaim
from trimtab_operator.planning.model_facts import FACTS_KEY, SUBJECT_KEY, sign_facts, subject_of
from trimtab_operator.planning.plan import ReconcilePlan, plan_reconcile
from trimtab_operator.planning.router import is_router_child
from trimtab_operator.planning.snapshot import ClusterSnapshot, parse_resource, plan_extra_reads
from trimtab_operator.planning.state import ReconcilerState
from trimtab_operator.reconcile.executor import Executor
from trimtab_operator.reconcile.health import Heartbeats, OperatorMetrics
from trimtab_operator.reconcile.observer import ClusterObserver, Key
from trimtab_operator.reconcile.reconciler import ReconcileLoop, Reconciler
from trimtab_operator.reconcile.work_queue import WorkQueue
from trimtab_operator.report.status import build_status
from trimtab_operator.resource.installation import Installation
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.resource.time import parse_time, timestamp
from trimtab_operator.tuner.parameters import FieldRange, Parameter, Value, typed
from trimtab_operator.tuner.samples import Config, Counters, Finished, Gauges, Ledger, RequestUpdates, Sample

TICK_SECONDS = 5.0
SECRET = b"s"
BROKEN = "--broken"  # engines with this argument never become Ready
NO_DEMAND = RouterReport(0.0, 0, 0, 0)
KEY = Key("n", "m", "u-m")
TOKEN = admin_token(SECRET, KEY.uid)
DEFAULTS: Mapping[Parameter, Value] = {
    Parameter.GPU_MEMORY_UTILIZATION: 0.9,
    Parameter.MAX_NUM_SEQS: 128,
    Parameter.MAX_NUM_BATCHED_TOKENS: 2048,
    Parameter.WATERMARK: 0.0,
}
"""Start values of an engine on the CPU without flags."""
FIXED_CACHE_FLAGS = ("--kv-cache-memory-bytes=", "--num-gpu-blocks-override=")
TIMES = {"ttft_target": 0.0, "ttft_target_per_prompt_token": 0.0}


class Killed(BaseException):
    """The operator's process is gone; nothing of it catches this."""


@dataclass
class FakeEngine:
    """What runs in the leader's pod of one group."""

    values: dict[Parameter, Value] = field(default_factory=lambda: dict(DEFAULTS))
    caps: dict[Parameter, Value] = field(default_factory=lambda: dict(DEFAULTS))
    has_fixed_cache: bool = False
    policy: str = "fcfs"
    """The order of its queue."""
    policies: tuple[str, ...] = ("fcfs", "priority", "deadline")
    times: dict[str, float] = field(default_factory=lambda: dict(TIMES))
    """What `deadline` goes by; an engine that does not know it has none."""
    refuses: frozenset[str] = frozenset()
    """Live fields that it lets nobody set."""
    generation: int = 1
    running: float = 0.0
    """Requests that it serves."""
    finished: list[Finished] = field(default_factory=list)
    """Requests that ended, to be told by the next look."""

    @classmethod
    def of_args(cls, args: Iterable[str], *, is_older: bool = False) -> FakeEngine:
        """An engine with the start values and caps of its command line; an older one does not know `deadline`."""
        flags = dict(flag.partition("=")[::2] for flag in args)
        engine = cls(policies=("fcfs", "priority"), times={}) if is_older else cls()
        for parameter in set(Parameter) - {Parameter.WATERMARK}:
            flag = "--" + parameter.value.replace("_", "-")
            engine.values[parameter] = typed(parameter, float(flags.get(flag, DEFAULTS[parameter])))
            engine.caps[parameter] = typed(parameter, float(flags.get(f"{flag}-cap", engine.values[parameter])))
        engine.has_fixed_cache = any(f"{flag}=".startswith(FIXED_CACHE_FLAGS) for flag in flags)
        assert all(engine.values[parameter] <= engine.caps[parameter] for parameter in engine.caps), "start above cap"
        return engine

    def fields(self) -> dict[Parameter, FieldRange]:
        """The range in which each parameter could be set alone, now."""
        seqs, tokens = self.values[Parameter.MAX_NUM_SEQS], self.values[Parameter.MAX_NUM_BATCHED_TOKENS]
        utilization_cap, caps = self.caps[Parameter.GPU_MEMORY_UTILIZATION], self.caps
        return {
            Parameter.GPU_MEMORY_UTILIZATION: FieldRange(not self.has_fixed_cache, 0.1, utilization_cap),
            Parameter.MAX_NUM_SEQS: FieldRange(True, 1, min(tokens, caps[Parameter.MAX_NUM_SEQS])),
            Parameter.MAX_NUM_BATCHED_TOKENS: FieldRange(True, seqs, caps[Parameter.MAX_NUM_BATCHED_TOKENS]),
            Parameter.WATERMARK: FieldRange(True, 0.0, 0.9),
        }

    def patch(self, fields: LiveValues) -> None:
        """Set live fields, all of which it knows."""
        for name, value in fields.items():
            if name == "scheduling_policy":
                assert value in self.policies
                self.policy = str(value)
            elif name in self.times:
                self.times[name] = float(value)
            else:
                assert not isinstance(value, str)
                self.values[Parameter(name)] = value
                assert name == Parameter.WATERMARK or value <= self.caps[Parameter(name)], f"{name} is above its cap"
        assert self.values[Parameter.MAX_NUM_SEQS] <= self.values[Parameter.MAX_NUM_BATCHED_TOKENS]
        assert self.policy != "deadline" or self.times["ttft_target"] > 0, "a deadline without a target"
        self.generation += 1


class FakeCluster:
    """A cluster with one resource. `nodes` take one pod each; a pod is Ready `start_seconds` after it was placed."""

    def __init__(
        self, *, knows_the_model: bool = True, start_seconds: float = 0.0, nodes: int = 99, **spec: Any
    ) -> None:
        self.now = NOW
        self.body: dict[str, Any] | None = a_resource(**spec)
        self.default_image = "engine:1"
        """The operator's, for resources that name none."""
        self.secret = SECRET
        """What the operator derives admin tokens from, and what it did before."""
        self.former_secret: bytes | None = None
        self.start_seconds = start_seconds
        self.drain_seconds = 0.0
        """How long a deleted pod stays, unless it is deleted without grace."""
        self.nodes = nodes
        self.unschedulable_message = "0/1 nodes are available: 1 Insufficient cpu."
        """What the scheduler says of a pod for which no node is left."""
        self.quota = 9999
        """How many pods the API server creates."""
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.engines: dict[str, FakeEngine] = {}
        """By the uid of the leader's pod."""
        self.serves: set[str] = set()
        """The kinds that can be done without and that this cluster has, such as PodDisruptionBudget."""
        self.installation = Installation()
        self.gpu_claims: tuple[GpuClaim, ...] | None = ()
        """What other resources ask for and hold of the GPU budget."""
        self.is_answering = True
        """Whether engines answer at all."""
        self.silent: set[str] = set()
        """Names of pods whose engines do not answer."""
        self.can_start: Callable[[FakeEngine], bool] = _always_starts  # a function, as clusters are pickled
        """Whether an engine with these start values starts, or crashes at each start."""
        self.crashing: set[str] = set()
        """The uids of pods whose engines crash at each start."""
        self.older_images: set[str] = set()
        """Images whose engines know no deadlines."""
        self.unready: set[str] = set()
        """Names of pods that take no requests, whatever their engines are."""
        self.restarts: dict[str, int] = {}
        """How often the engine in a pod, by its uid, has ended and begun again."""
        self.taken: set[str] = set()
        """ClusterIPs that others have."""
        self.model_words: tuple[int, str] = (0, json.dumps(MODEL_FACTS))
        """How a Job that reads the model ends: exit code and words."""
        self.creation_failures: list[dict[str, Any]] = []
        """Events of StatefulSets whose pods were not created."""
        self.demand: dict[str, RouterReport] = {}
        """What router pods report, by name; the others have no requests."""
        self.events: list[str] = []
        self.failures: list[Exception] = []
        """Raised by the next reads of the children."""
        self.lives: int | None = None
        """The operator is killed once it has written so often; None: never."""
        self.writes = 0
        self.state = ReconcilerState()
        self._born: dict[str, float] = {}
        self._made = 0
        if knows_the_model:
            self.learn_the_model()

    # --- the user -----------------------------------------------------------------------------------------------------

    @property
    def deployment(self) -> InferenceDeployment:
        """The resource as the operator reads it."""
        assert self.body is not None
        return parse_resource(
            self.body, default_image=self.default_image, allowed_privileges=self.installation.allowed_privileges
        )[0]

    def edit(self, **spec: Any) -> None:
        """Write another spec: these parts of it in the place of the present ones; None removes one."""
        assert self.body is not None
        merged = {**self.body["spec"], **spec}
        self.body["spec"] = {name: value for name, value in merged.items() if value is not None}
        self.body["metadata"]["generation"] += 1

    def learn_the_model(self) -> None:
        """Put what is known of the model where the operator keeps it."""
        data = {SUBJECT_KEY: subject_of(self.deployment), FACTS_KEY: json.dumps(MODEL_FACTS)}
        token = admin_token(self.secret, self.deployment.uid)
        self._store(facts_config_map(self.deployment, sign_facts(data, key=token)))

    # --- what there is ------------------------------------------------------------------------------------------------

    def children(self) -> ObservedChildren:
        """The children as the API server gives them. Not copied: whoever looks at them changes nothing."""

        def of(kind: str) -> tuple[dict[str, Any], ...]:
            return tuple(m for (k, _), m in sorted(self.objects.items()) if k == kind)

        every = [pod for _, pod in sorted(self.pods.items())]
        pods = tuple(pod for pod in every if not is_router_child(pod))
        return ObservedChildren(
            of("Service"),
            of("StatefulSet"),
            of("ConfigMap"),
            pods,
            of("Job"),
            of("ServiceAccount"),
            of("Secret"),
            {kind: of(kind) for kind in sorted(self.serves)},
            router_pods=tuple(pod for pod in every if is_router_child(pod)),
        )

    @property
    def groups(self) -> tuple[Group, ...]:
        return groups_of(self.children())

    @property
    def revisions(self) -> list[str]:
        return [group.revision for group in self.groups]

    @property
    def status(self) -> dict[str, Any]:
        assert self.body is not None
        found: dict[str, Any] = self.body["status"]
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        """One condition of the status."""
        return next(dict(c) for c in self.status["conditions"] if c["type"] == kind)

    def engine(self, ordinal: int) -> FakeEngine:
        """The engine of a replica of one pod."""
        return self.engines[self.pods[f"m-g{ordinal}-0"]["metadata"]["uid"]]

    # --- looking and acting without I/O -------------------------------------------------------------------------------

    def look(self, state: ReconcilerState | None = None) -> ClusterSnapshot:
        """What one look sees now."""
        state, deployment, children = state or self.state, self.deployment, self.children()
        asked = plan_extra_reads(deployment, children, state, now=self.now)
        parse_errors = parse_resource(self.body or {}, default_image=self.default_image)[1]
        former = None if self.former_secret is None else admin_token(self.former_secret, KEY.uid)
        engines = {target.group: self.said(target) for target in asked.engines}
        refused = tuple(self.creation_failures) if asked.failed_creations else None
        nodes = self._nodes() if asked.nodes_fresh_seconds is not None else ()
        return ClusterSnapshot(
            self.now,
            deployment,
            admin_token(self.secret, KEY.uid),
            children,
            engines,
            parse_errors,
            nodes,
            failed_creations=refused,
            tick_seconds=TICK_SECONDS,
            former_token=former,
            installation=self.installation,
            gpu_claims=self.gpu_claims,
            routers=self.router_reports(),
        )

    def router_reports(self) -> dict[str, RouterReport]:
        """Present report of each running router pod that answers."""
        running = router_targets(self.children().router_pods)
        return {
            target.instance: replace(self.demand.get(target.pod, NO_DEMAND), at=self.now)
            for target in running
            if target.pod not in self.silent
        }

    def decide(self, state: ReconcilerState | None = None) -> ReconcilePlan:
        """What the operator would do now, by this memory or by its own."""
        return plan_reconcile(self.look(state), state or self.state)

    def plan_reconcile(self, decided: ReconcilePlan | None = None) -> ReconcilePlan:
        """Let the operator take one turn: look, decide, act; or act by what was `decided` just now."""
        decided = decided or self.decide()
        self.do(decided.urgent_deletes)
        self.do(decided.state_writes)
        self.state = decided.state
        self.do(decided.children)
        self.state = replace(decided.state, repeated_applies=decided.repeated_applies)
        for order in decided.patches:
            self.patch(order)
        self.events += [decision.reason.value for decision in decided.decisions]
        self.events += [note.reason for note in decided.events]
        self.events += [note.reason for action in decided.children if (note := event_of(action)) is not None]
        status = build_status(self.deployment, decided.status_inputs, now=_moment(self.now))
        self.write_status(status)
        return decided

    def tick(self) -> ReconcilePlan:
        """Take one turn, and let the cluster follow it for TICK_SECONDS."""
        decided = self.plan_reconcile()
        self.now += TICK_SECONDS
        self.controllers()
        return decided

    def settle(self, ticks: int = 100) -> None:
        """Take turns until nothing is left to do and nothing moves."""
        for _ in range(ticks):
            before = json.dumps(self.status, sort_keys=True)
            is_idle = self.tick().is_idle
            is_reading = any(kind == "Job" for kind, _ in self.objects)
            is_moving = is_reading or self.condition("Progressing")["status"] == "True"
            if is_idle and not is_moving and json.dumps(self.status, sort_keys=True) == before:
                return
        raise AssertionError("the operator does not come to rest")

    def restart_operator(self) -> None:
        """A new process remembers only what is written in the cluster."""
        self.state, self.lives = ReconcilerState(), None

    # --- writes -------------------------------------------------------------------------------------------------------

    def do(self, actions: Iterable[Action]) -> None:
        """Carry actions out."""
        for action in actions:
            if isinstance(action, Apply):
                self.apply_now(action)
            elif action.budget is None or self.lets_go(action.name):
                self.delete_now(action.kind, action.name, action.uid, action.grace_seconds)

    def apply_now(self, action: Apply) -> None:
        manifest = dict(action.manifest)
        key = (manifest["kind"], manifest["metadata"]["name"])
        assert action.is_new == (key not in self.objects), f"{key} is new: {action.is_new}"
        if manifest["kind"] == "Service" and manifest["spec"].get("clusterIP") in self.taken:
            assert action.fallback is not None, "a Service that cannot be had"
            manifest = dict(action.fallback)
        self._store(manifest)
        self._written()

    def _store(self, manifest: Manifest) -> None:
        """As server-side apply does: what the API server adds stays."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        present = self.objects.get((kind, name))
        self._made += present is None
        stored = copy.deepcopy(dict(manifest))
        added = {"uid": f"o-{self._made}", "creationTimestamp": self._time()}
        kept = added if present is None else {key: present["metadata"][key] for key in added}
        stored["metadata"] |= kept
        if kind == "StatefulSet":
            is_same = present is not None and present["spec"] == stored["spec"]
            before_it = 0 if present is None else present["metadata"]["generation"]
            stored["metadata"]["generation"] = before_it + (not is_same)
            stored["status"] = {} if present is None else present["status"]
        if kind == "Service":
            before = None if present is None else present["spec"]["clusterIP"]
            wanted = stored["spec"].get("clusterIP")
            assert before is None or wanted in (None, before), "a ClusterIP cannot be changed"
            stored["spec"]["clusterIP"] = before or wanted or f"10.0.{self._made // 250}.{self._made % 250}"
        self.objects[kind, name] = stored

    def delete_now(self, kind: str, name: str, uid: str, grace_seconds: int | None = None) -> None:
        store: dict[Any, dict[str, Any]] = self.pods if kind == "Pod" else self.objects
        key = name if kind == "Pod" else (kind, name)
        if key in store:
            assert store[key]["metadata"].get("uid", "") == uid, f"{key} is another one now"
            if kind == "Pod" and self.drain_seconds and grace_seconds != 0:
                self._drain(store[key])
            else:
                del store[key]
        self._written()

    def _drain(self, pod: dict[str, Any]) -> None:
        """Let a pod end within its grace period."""
        ends = {"deletionTimestamp": timestamp(_moment(self.now + self.drain_seconds))}
        pod["metadata"] = {**ends, "deletionGracePeriodSeconds": int(self.drain_seconds), **pod["metadata"]}

    def lets_go(self, name: str) -> bool:
        """Whether the PodDisruptionBudget lets a pod be evicted now, by the API server's rules: a pod that is not Ready
        always with AlwaysAllow, and otherwise while as many are healthy as wanted, if any are wanted.
        """
        budget = self.objects["PodDisruptionBudget", "m"]["spec"]
        sets = [made for (kind, _), made in self.objects.items() if kind == "StatefulSet"]
        wanted = sum(stateful_set["spec"]["replicas"] for stateful_set in sets)
        healthy = sum(ordinal_of(pod) is not None and is_pod_ready(pod) for pod in self.pods.values())
        least_healthy = int(wanted) - int(budget["maxUnavailable"])
        if not is_pod_ready(self.pods[name]):
            always = budget.get("unhealthyPodEvictionPolicy") == "AlwaysAllow"
            return always or healthy >= least_healthy > 0 or healthy > least_healthy
        return healthy > least_healthy

    def patch(self, order: Patch) -> None:
        """Set live fields of an engine, if it is of the generation that was seen."""
        engine = self.engines[order.target.instance]
        assert order.if_match == engine.generation
        fields = order.fallback if engine.refuses & order.fields.keys() else order.fields
        if fields is None:
            return
        engine.patch(fields)
        self._written()

    def write_status(self, status: Mapping[str, Any]) -> None:
        assert self.body is not None
        if status != self.body["status"]:
            self.body["status"] = dict(status)
            self._written()

    def _written(self) -> None:
        self.writes += 1
        if self.lives is not None:
            self.lives -= 1
            if self.lives <= 0:
                raise Killed

    # --- controllers --------------------------------------------------------------------------------------------------

    def controllers(self) -> None:
        """StatefulSets, scheduler, kubelets, Jobs and garbage collection take one step."""
        wanted = self._wanted_pods()
        for name, pod in list(self.pods.items()):
            if name not in wanted and self.drain_seconds:
                self._drain(pod)
            ends = parse_time(pod["metadata"].get("deletionTimestamp"))
            has_ended = ends is not None and ends.timestamp() <= self.now
            if has_ended or (name not in wanted and not self.drain_seconds):
                del self.pods[name]
        for name, (owner, template) in wanted.items():
            present = self.pods.get(name)
            is_kept = owner["kind"] == "StatefulSet" or (present and _is_made_from(present, owner, template))
            is_refused = present is None and len(self.pods) >= self.quota
            is_ending = present is not None and is_terminating(present) and not self.drain_seconds
            if (present is None or is_ending or not is_kept) and not is_refused:
                self._make_pod(name, owner, template)
        self._schedule()
        self.kubelets()

    def _wanted_pods(self) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
        """By name, the pods of StatefulSets and Jobs, their owner and template."""
        found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        for (kind, name), manifest in sorted(self.objects.items()):
            template: dict[str, Any] = (manifest.get("spec") or {}).get("template") or {}
            if kind == "StatefulSet":
                manifest["status"] = {"observedGeneration": manifest["metadata"]["generation"]}
                for number in range(manifest["spec"]["replicas"]):
                    found[f"{name}-{number}"] = (manifest, template)
            elif kind == "Job":
                found[f"{name}-x"] = (manifest, template)
            elif kind == "Deployment":
                for number in range(manifest["spec"]["replicas"]):
                    found[f"{name}-5d9-{number}"] = (manifest, template)
        return found

    def _make_pod(self, name: str, owner: dict[str, Any], template: dict[str, Any]) -> None:
        if ("ServiceAccount", template["spec"].get("serviceAccountName")) not in self.objects:
            return  # the API server admits no pod whose account is not there
        self._made += 1
        uid = f"p-{self._made}"
        is_replicated = owner["kind"] == "Deployment"
        metadata = {
            "name": name,
            "namespace": "n",
            "uid": uid,
            "creationTimestamp": self._time(),
            "labels": dict(template["metadata"]["labels"]),
            "ownerReferences": [
                {
                    "kind": "ReplicaSet" if is_replicated else owner["kind"],
                    "name": owner["metadata"]["name"] + ("-5d9" if is_replicated else ""),
                    "uid": owner["metadata"]["uid"],
                    "controller": True,
                }
            ],
        }
        self.pods[name] = {"metadata": metadata, "spec": copy.deepcopy(template["spec"]), "status": {}}
        self._born[name] = self.now
        main = template["spec"]["containers"][0]
        self.engines[uid] = FakeEngine.of_args(main.get("args", ()), is_older=main.get("image") in self.older_images)
        if not self.can_start(self.engines[uid]):
            self.crashing.add(uid)

    def _schedule(self) -> None:
        placed = sum("nodeName" in pod["spec"] for pod in self.pods.values())
        for pod in self.pods.values():
            if "nodeName" in pod["spec"]:
                continue
            condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": self._time()}
            if placed < self.nodes:
                pod["spec"]["nodeName"] = "one"
                placed += 1
            else:
                known = [c for c in pod["status"].get("conditions", []) if c["status"] == "False"]
                condition = (
                    known[0] if known else condition | {"status": "False", "message": self.unschedulable_message}
                )
            pod["status"]["conditions"] = [condition]

    def kubelets(self) -> None:
        """Pods become Ready together with the rest of their group, in their time."""
        for name, pod in self.pods.items():
            if name.endswith("-facts-x"):
                code, words = self.model_words
                pod["status"]["containerStatuses"] = [{"state": {"terminated": {"exitCode": code, "message": words}}}]
                continue
            fellows = self._fellows(pod)
            is_up = all(map(self._has_started, fellows)) and len(set(map(_shared_flags, fellows))) <= 1
            ready = {"type": "Ready", "status": str(is_up and name not in self.unready)}
            scheduled = [c for c in pod["status"].get("conditions", []) if c["type"] == "PodScheduled"]
            ends = self.restarts.get(pod["metadata"]["uid"], 0)
            running = [{"name": "main", "restartCount": ends, "started": is_up, "state": {"running": {}}}]
            if ends:
                running[0]["lastState"] = {"terminated": {"exitCode": 1, "message": "out of luck"}}
            if pod["metadata"]["uid"] in self.crashing:
                waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
                ended = {"terminated": {"exitCode": 2, "message": "it does not fit"}}
                running = [{"name": "main", "restartCount": 3, "started": False, "state": waiting, "lastState": ended}]
            placed = "nodeName" in pod["spec"]
            pod["status"] = {"conditions": [*scheduled, ready]}
            pod["status"] |= {"podIP": "10.1.0.1", "containerStatuses": running} if placed else {}

    def _fellows(self, pod: dict[str, Any]) -> list[dict[str, Any]]:
        """The pods that run one engine: as many as the group's StatefulSets ask for, or it does not start."""
        owner = pod["metadata"]["ownerReferences"][0]["name"]
        leader = owner.removesuffix("-w")
        sets = [self.objects.get(("StatefulSet", name)) for name in (leader, f"{leader}-w")]
        names = [
            f"{found['metadata']['name']}-{number}"
            for found in sets
            if found is not None
            for number in range(found["spec"]["replicas"])
        ]
        return [self.pods.get(name, {}) for name in names]

    def _has_started(self, pod: dict[str, Any]) -> bool:
        if not pod or pod["metadata"]["uid"] in self.crashing:
            return False
        if "nodeName" not in pod["spec"] or BROKEN in pod["spec"]["containers"][0]["args"]:
            return False
        return self.now - self._born[pod["metadata"]["name"]] >= self.start_seconds

    def set_ready(self, name: str, ready: bool = True) -> None:
        """Let a pod take requests, or none, whatever its engine is."""
        (self.unready.discard if ready else self.unready.add)(name)
        self.kubelets()

    def _nodes(self) -> tuple[Manifest, ...]:
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": timestamp(_moment(NOW))}
        return ({"metadata": {"name": "one"}, "status": {"conditions": [ready]}},)

    def _time(self) -> str:
        return timestamp(_moment(self.now))

    # --- engines ------------------------------------------------------------------------------------------------------

    def said(self, target: EngineTarget) -> EngineObservation:
        """What an engine says now; one that does not answer, or that nobody can reach, says nothing."""
        engine = self.engines.get(target.instance)
        if target.address is None or engine is None or not self.is_answering or target.pod in self.silent:
            return EngineObservation(target.ready, "no answer")
        config = Config(engine.generation, dict(engine.values), engine.fields(), 1024)
        queue = ReportedScheduling(engine.policy, engine.policies, dict(engine.times))
        if not target.ready:
            return EngineObservation(False, "not ready", config=config, queue=queue, load=("weights", 40))
        news = RequestUpdates(tuple(engine.finished), ())
        engine.finished.clear()
        return EngineObservation(
            True,
            sample=Sample(
                self.now,
                Counters(0.0, 0.0, 0.0, {}),
                requests=news,
                gauges=Gauges(engine.running, 0.0, 0.0, engine.generation),
            ),
            config=config,
            ledger=Ledger(1_572_864_000, 151, 16, 737_280),
            applied={**{knob.value: value for knob, value in engine.values.items()}, **engine.times},
            queue=queue,
            layout=self._layout(target) if target.needs_layout else None,
        )

    def _layout(self, target: EngineTarget) -> Degrees:
        """As the flags of the engine's pod ask for."""
        pod = next(pod for pod in self.pods.values() if pod["metadata"]["uid"] == target.instance)
        flags = dict(flag.removeprefix("--").partition("=")[::2] for flag in pod["spec"]["containers"][0]["args"])
        tensor, pipeline, data = (int(flags.get(f"{kind}-parallel-size", 1)) for kind in ("tensor", "pipeline", "data"))
        expert = "enable-expert-parallel" in flags
        return Degrees(tensor=tensor, pipeline=pipeline, data=data, expert=expert, world_size=tensor * pipeline * data)

    # --- the verbs of edge.cluster.Cluster ----------------------------------------------------------------------------

    async def get(self, _kind: str, _namespace: str | None, _name: str) -> dict[str, Any] | None:
        return self.body and dict(self.body)

    async def list_children(self, _deployment: InferenceDeployment) -> ObservedChildren:
        if self.failures:
            raise self.failures.pop(0)
        return self.children()

    async def list(
        self, kind: str, _namespace: str | None, *, selector: str | None = None, fields: str | None = None
    ) -> list[Manifest]:
        if kind == "Event":
            reason = str(fields).removeprefix("reason=")
            return [event for event in self.creation_failures if event.get("reason", "FailedCreate") == reason]
        if kind == "Node":
            return list(self._nodes())
        children = self.children()
        return list({"StatefulSet": children.stateful_sets, "Pod": children.pods}[kind])

    async def are_current(self, _manifests: Iterable[Manifest]) -> bool:
        return True  # whoever looks at them looks at the objects themselves

    async def apply(self, manifest: Manifest, _owner: InferenceDeployment, *, is_new: bool) -> None:
        self.apply_now(Apply(manifest, is_new, "", manifest))

    async def delete(
        self, kind: str, _namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> None:
        self.delete_now(kind, name, uid, grace_seconds)

    async def evict(self, _namespace: str, name: str, *, uid: str, budget: str) -> bool:
        assert ("PodDisruptionBudget", budget) in self.objects
        if not self.lets_go(name):
            return False
        self.delete_now("Pod", name, uid)
        return True

    async def apply_status(self, _deployment: InferenceDeployment, status: Mapping[str, Any]) -> Mapping[str, Any]:
        self.write_status(status)
        return self.status

    async def event(
        self, _deployment: InferenceDeployment, *, kind: str, reason: str, message: str, now: datetime, key: str
    ) -> None:
        self.events.append(reason)
        self._written()


class FakeEnginePoller:
    """The engines of a FakeCluster, with the methods of `EnginePoller`."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.allowed_stale: list[bool] = []
        """Of each look, whether last words were believed."""

    async def poll(
        self,
        targets: Iterable[EngineTarget],
        _tokens: Tokens,
        _asked: MetricsSettings | None = None,
        *,
        allow_stale_engine_status: bool = False,
    ) -> dict[str, EngineObservation]:
        self.allowed_stale.append(allow_stale_engine_status)
        return {target.group: self.cluster.said(target) for target in targets}

    async def patch(self, orders: Iterable[Patch], _tokens: Tokens, on_answer: OnAnswer) -> None:
        for order in orders:
            self.cluster.patch(order)
            await on_answer(order, Patched(id="c", generation=2, desired={}, applied_at_step=1))

    def close(self) -> None:
        """There is nothing under way."""


class FakeRouterPoller:
    """The router pods of a FakeCluster, with the methods of `RouterPoller`."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def follow(
        self, _targets: Iterable[RouterTarget], _tokens: Tokens, *, has_replica: bool
    ) -> dict[str, RouterReport]:
        del has_replica
        return self.cluster.router_reports()

    def close(self) -> None:
        """There is nothing to cancel."""


def a_reconciler(cluster: FakeCluster, http: aiohttp.ClientSession | None = None) -> Reconciler:
    """The loops' shared part, at work on this cluster."""
    door = cast("Cluster", cluster)
    observer = ClusterObserver(
        door,
        Nodes(door, lambda: cluster.now),
        cluster.secret,
        cluster.default_image,
        15.0,
        lambda: cluster.now,
        installation=cluster.installation,
    )
    executor = Executor(door, OperatorMetrics(), observer.clock)
    unused = cast("aiohttp.ClientSession", http)
    return Reconciler(observer, executor, unused, Heartbeats(max_age_seconds=60.0), WorkQueue())


def a_loop(cluster: FakeCluster, engines: Any = None) -> ReconcileLoop:
    """A loop that has just begun, and that knows nothing."""
    engines = FakeEnginePoller(cluster) if engines is None else engines
    return ReconcileLoop(KEY, cast("EnginePoller", engines), make_routers(cluster))


def make_routers(cluster: FakeCluster) -> RouterPoller:
    """Return the poller of the cluster's router pods."""
    return cast("RouterPoller", FakeRouterPoller(cluster))


def _is_made_from(pod: dict[str, Any], owner: dict[str, Any], template: dict[str, Any]) -> bool:
    """Whether a Job's pod is this Job's. Those of StatefulSets stay until they are deleted."""
    spec = {name: value for name, value in pod["spec"].items() if name != "nodeName"}
    return bool(spec == template["spec"] and pod["metadata"]["ownerReferences"][0]["uid"] == owner["metadata"]["uid"])


def _always_starts(_engine: FakeEngine) -> bool:
    return True


def _shared_flags(pod: dict[str, Any]) -> frozenset[str]:
    """The flags that all pods of one engine must agree on, or it does not start."""
    args: list[str] = pod["spec"]["containers"][0].get("args", [])
    return frozenset(arg for arg in args if not arg.startswith("--node-rank"))


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
