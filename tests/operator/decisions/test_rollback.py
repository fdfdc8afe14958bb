"""A change that does not come up is taken back; one that does stays. Replicas come to rest at what works."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trimtab_operator.builders.labels import REVISION_LABEL
from trimtab_operator.builders.stateful_set import Held, pod_template, revision_of
from trimtab_operator.decisions.actions import Apply
from trimtab_operator.decisions.placement import age_of, held_groups, holds, is_partly_placed
from trimtab_operator.decisions.plan import plan
from trimtab_operator.decisions.rollback import (
    REFUSED_STARTS,
    Course,
    RolloutState,
    budget_seconds,
    change_of,
    course_of,
    form_of,
    from_text,
    plan_rollout_state,
    proven_deployment,
    to_text,
)
from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.groups import Group, Observed, groups_of
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.resource.time import timestamp

KEY = "a token"
HASH = "b" * 64
TICK_SECONDS = 5.0
BAD = "--broken"  # engines with this argument never become Ready
START_SECONDS = 20.0  # of an engine that does


def a_deployment(
    *, args: tuple[str, ...] = (), replicas: int = 2, generation: int = 1, **spec: Any
) -> InferenceDeployment:
    base = {
        "model": {"uri": "file:///models/m"},
        "runtime": {"device": "cpu", "image": "engine:1", "args": list(args)},
        "replicas": replicas,
        "rollout": {"startTimeout": "2m", "drainTimeout": "10s"},
        **spec,
    }
    metadata = {"name": "m", "namespace": "n", "uid": "u", "generation": generation}
    return InferenceDeployment.parse({"metadata": metadata, "spec": base})


def render(deployment: InferenceDeployment) -> str:
    return revision_of(pod_template(deployment, admin_token_sha256=HASH))


@dataclass
class World:
    """A cluster with a StatefulSet controller: pods follow their template and become Ready unless it is broken, or not
    all of them find one of the `nodes`, each of which takes one pod."""

    deployment: InferenceDeployment
    now: float = 1000.0
    state: RolloutState = field(default_factory=RolloutState)
    stateful_sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    services: dict[str, dict[str, Any]] = field(default_factory=dict)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    born: dict[str, float] = field(default_factory=dict)
    is_answering: bool = True
    most_down: int = 0
    course: Course | None = None
    nodes: int = 99

    @property
    def observed(self) -> Observed:
        return Observed(
            tuple(self.services.values()), tuple(self.stateful_sets.values()), pods=tuple(self.pods.values())
        )

    @property
    def groups(self) -> tuple[Group, ...]:
        return groups_of(self.observed)

    def layouts(self) -> dict[str, Degrees]:
        if not self.is_answering:
            return {}
        return {g.name: Degrees.wanted(self.deployment.spec) for g in self.groups if g.is_ready}

    def tick(self) -> Course:
        self.course = course_of(
            self.state, self.deployment, self.groups, self.layouts(), may_start=True, render=render, now=self.now
        )
        self.state = self.course.state
        assert self.course.target is not None
        target = self.course.target
        held = self._held(f"{self.deployment.generation}-{render(target)}")
        for action in plan(target, self.observed, admin_token_sha256=HASH, held=held, unproven=self.course.unproven):
            if isinstance(action, Apply) and action.manifest["kind"] == "StatefulSet":
                self.stateful_sets[action.manifest["metadata"]["name"]] = copy.deepcopy(dict(action.manifest))
            elif isinstance(action, Apply):
                service = copy.deepcopy(dict(action.manifest))
                service["spec"]["clusterIP"] = "10.0.0.1"
                self.services[service["metadata"]["name"]] = service
            elif action.kind == "StatefulSet":
                del self.stateful_sets[action.name]
                self.pods = {pod: found for pod, found in self.pods.items() if pod.rsplit("-", 1)[0] != action.name}
            else:
                del self.services[action.name]
        self._run_pods()
        self.now += TICK_SECONDS
        self.most_down = max(self.most_down, sum(not group.is_ready for group in self.groups))
        return self.course

    def _held(self, asked: str) -> dict[int, Held]:
        now = datetime.fromtimestamp(self.now, UTC)
        rivals = [age_of(group) for group in self.groups if is_partly_placed(group)]
        return held_groups(self.groups, holds(self.groups, rivals, now, asked=asked), now)

    def _run_pods(self) -> None:
        wanted = [(s, f"{name}-{n}") for name, s in self.stateful_sets.items() for n in range(s["spec"]["replicas"])]
        for stateful_set, pod in wanted:
            template = stateful_set["spec"]["template"]
            revision = template["metadata"]["labels"][REVISION_LABEL]
            present = self.pods.get(pod)
            if present is None or present["metadata"]["labels"][REVISION_LABEL] != revision:
                self.pods[pod] = {"metadata": {"name": pod, "uid": f"{pod}{self.now}", **template["metadata"]}}
                self.born[pod] = self.now
        self.pods = {pod: self.pods[pod] for _, pod in wanted}
        for number, (stateful_set, pod) in enumerate(wanted):
            since = timestamp(datetime.fromtimestamp(self.born[pod], UTC))
            scheduled = {"type": "PodScheduled", "status": str(number < self.nodes), "lastTransitionTime": since}
            is_broken = BAD in stateful_set["spec"]["template"]["spec"]["containers"][0]["args"]
            is_up = not is_broken and len(wanted) <= self.nodes and self.now - self.born[pod] >= START_SECONDS
            ready = {"type": "Ready", "status": str(is_up)}
            self.pods[pod] |= {"spec": {"nodeName": "one"} if number < self.nodes else {}}
            self.pods[pod]["status"] = {"conditions": [scheduled, ready]}

    def settle(self) -> None:
        """Long enough for a roll, a spent budget and a roll back."""
        for _ in range(70):
            self.tick()

    def edit(self, **changes: Any) -> None:
        self.deployment = a_deployment(generation=self.deployment.generation + 1, **changes)

    def revisions(self) -> list[str]:
        return [group.revision for group in self.groups]


def settled(replicas: int = 2) -> World:
    world = World(a_deployment(replicas=replicas))
    world.settle()
    assert world.state.proven == form_of(world.deployment)
    world.most_down = 0
    return world


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_change_that_does_not_come_up_is_taken_back_and_reaches_no_further_replica(replicas: int) -> None:
    world = settled(replicas)
    before = world.revisions()
    world.edit(args=(BAD,), replicas=replicas)
    bad = render(world.deployment)
    most = 0
    for _ in range(100):
        world.tick()
        most = max(most, world.revisions().count(bad))
    assert most == 1
    assert world.revisions() == before
    assert all(group.is_ready for group in world.groups)
    assert world.course is not None
    assert world.course.failed is not None
    assert "m-g0 did not become Ready within 2m" in world.course.failed.message
    assert world.course.failed.returns_to == before[0]
    assert world.most_down == 1


def test_a_layout_that_does_not_come_up_is_taken_back_and_no_group_is_ever_of_two_revisions() -> None:
    world = settled()
    layout = {"parallelism": {"tensor": 2, "gpusPerNode": 1}}
    world.edit(args=(BAD,), **layout)
    for _ in range(70):
        world.tick()
        assert all(group.revision for group in world.groups), "the sets of a group differ"
    assert world.course is not None
    assert world.course.failed is not None
    assert [group.num_pods for group in world.groups] == [1, 1]
    assert all(group.is_ready for group in world.groups)
    world.edit(args=(), **layout)
    world.settle()
    assert [group.num_pods for group in world.groups] == [2, 2]
    assert all(group.is_ready for group in world.groups)
    assert world.state.proven == form_of(world.deployment)


def test_a_larger_group_for_which_there_are_too_few_nodes_is_taken_back_and_serves_again_at_once() -> None:
    """It gave its pods back meanwhile, and waits for longer each time; the group that worked waits for nothing."""
    world = World(a_deployment(replicas=1, parallelism={"tensor": 2, "gpusPerNode": 1}), nodes=2)
    world.settle()
    assert all(group.is_ready for group in world.groups)
    patient = {"startTimeout": "5m", "drainTimeout": "10s"}
    world.edit(replicas=1, rollout=patient, parallelism={"tensor": 3, "gpusPerNode": 1})
    gave_back = 0
    while world.course is None or world.course.failed is None:
        world.tick()
        gave_back += sum(group.num_pods == 0 for group in world.groups)
    assert gave_back > 0
    assert "m-g0 did not become Ready within 5m" in world.course.failed.message
    for _ in range(int(START_SECONDS / TICK_SECONDS) + 2):
        world.tick()
    assert [(group.num_pods, group.is_ready) for group in world.groups] == [(2, True)]


def test_it_is_tried_again_only_when_the_spec_changes() -> None:
    world = settled()
    world.edit(args=(BAD,))
    world.settle()
    good = world.revisions()
    world.edit(args=(BAD,), replicas=3)  # an autoscaler's write is no change of the spec in this sense
    world.settle()
    assert world.revisions() == [good[0]] * 3
    world.edit(args=(BAD,), replicas=3, rollout={"startTimeout": "3m", "drainTimeout": "10s"})
    world.tick()
    world.tick()
    assert render(world.deployment) in world.revisions()
    world.settle()
    assert world.revisions() == [good[0]] * 3


def test_a_good_change_after_a_bad_one_goes_through() -> None:
    world = settled()
    world.edit(args=(BAD,))
    world.settle()
    world.edit(args=("--seed=1",))
    world.settle()
    assert world.revisions() == [render(world.deployment)] * 2
    assert world.course is not None
    assert world.course.failed is None
    assert world.state == RolloutState(form_of(world.deployment))


def test_a_first_revision_has_nothing_to_return_to_and_says_so() -> None:
    world = World(a_deployment(args=(BAD,)))
    world.settle()
    assert world.course is not None
    assert world.course.failed is not None
    assert world.course.failed.returns_to is None
    assert world.revisions() == [render(world.deployment)] * 2


def test_a_restarted_operator_neither_forgets_the_clock_nor_what_worked() -> None:
    world = settled(1)
    world.edit(args=(BAD,), replicas=1)
    for _ in range(4):
        world.tick()
    began = world.now
    while world.state.taken_back is None:
        world.state = from_text(to_text(world.state, key=KEY), key=KEY)
        world.tick()
    assert world.now - began < budget_seconds(world.deployment) + 2 * TICK_SECONDS
    world.state = from_text(to_text(world.state, key=KEY), key=KEY)
    world.settle()
    assert all(group.is_ready for group in world.groups)


def test_an_engine_that_is_ready_but_cannot_be_asked_is_not_taken_back_nor_spread() -> None:
    world = settled(3)
    world.edit(args=("--seed=1",), replicas=3)
    new = render(world.deployment)
    world.is_answering = False
    world.settle()
    assert world.revisions().count(new) == 1
    assert world.state.taken_back is None
    world.is_answering = True
    world.settle()
    assert world.revisions() == [new] * 3


def test_replicas_that_fail_at_a_proven_revision_are_not_taken_back() -> None:
    world = settled()
    for pod in world.pods.values():
        pod["status"] = {}
    world.is_answering = False
    course = course_of(
        world.state, world.deployment, world.groups, {}, may_start=True, render=render, now=world.now + 1e6
    )
    assert course.failed is None
    assert course.target == world.deployment


def test_while_the_spec_may_not_start_the_proven_form_is_kept_up_at_todays_count() -> None:
    world = settled()
    deployment = a_deployment(args=("--seed=1",), replicas=5)
    course = course_of(world.state, deployment, world.groups, {}, may_start=False, render=render, now=world.now)
    assert course.target is not None
    assert course.target.replicas == 5
    assert render(course.target) == world.revisions()[0]
    new = course_of(RolloutState(), deployment, (), {}, may_start=False, render=render, now=world.now)
    assert new.target is None


# --- refused outright -------------------------------------------------------------------------------------------------


def ended(exit_code: int, times: int) -> dict[str, Any]:
    last = {"terminated": {"exitCode": exit_code, "message": "trimtab-engine: max_model_len is too long"}}
    container = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": last, "restartCount": times}
    return {"containerStatuses": [container]}


@pytest.mark.parametrize(
    ("exit_code", "times", "is_taken_back"),
    [
        (2, REFUSED_STARTS, True),  # the engine says that it cannot be: waiting helps nobody
        (2, REFUSED_STARTS - 1, False),
        (1, 50, False),  # a crash may be the node's fault: the budget decides
        (137, 50, False),
    ],
)
def test_what_the_engine_refuses_is_taken_back_at_once_in_its_own_words(
    exit_code: int, times: int, is_taken_back: bool
) -> None:
    world = settled(1)
    world.edit(args=(BAD,), replicas=1)
    world.tick()
    world.tick()
    world.pods["m-g0-0"]["status"] = ended(exit_code, times)
    course = course_of(world.state, world.deployment, world.groups, {}, may_start=True, render=render, now=world.now)
    assert (course.failed is not None) is is_taken_back
    if course.failed is not None:
        assert "max_model_len is too long (exit code 2)" in course.failed.message


# --- what is remembered -----------------------------------------------------------------------------------------------


def test_the_proven_form_is_the_spec_that_was_written() -> None:
    overlay = {"spec": {"containers": [{"name": "main", "resources": {"limits": {"memory": "2Gi"}}}]}}
    deployment = a_deployment(template=overlay, engine={"gpuMemoryUtilization": "0.50"})
    found = proven_deployment(a_deployment(replicas=7), form_of(deployment))
    assert found is not None
    assert render(found) == render(deployment)
    assert found.replicas == 7


def test_a_proven_form_that_is_refused_today_is_not_returned_to() -> None:
    form = form_of(a_deployment(runtime={"device": "cpu", "image": "e", "kind": "vllm"}))
    assert proven_deployment(a_deployment(), form) is None


@pytest.mark.parametrize("text", [None, "", "{", "[]", "[" * 100_000, '{"signature": "x", "state": "{}"}'])
def test_what_is_damaged_is_not_remembered(text: str | None) -> None:
    assert from_text(text, key=KEY) == RolloutState()


def test_who_may_write_config_maps_does_not_choose_what_runs() -> None:
    text = to_text(settled().state, key=KEY)
    assert from_text(text, key=KEY) != RolloutState()
    assert from_text(text.replace("engine:1", "evil:1"), key=KEY) == RolloutState()
    assert from_text(text, key="another token") == RolloutState()


def test_nothing_is_written_while_there_is_nothing_to_remember_and_nothing_twice() -> None:
    world = settled()
    assert plan_rollout_state(world.deployment, Observed(), RolloutState(), key=KEY) == ()
    (first,) = plan_rollout_state(world.deployment, Observed(), world.state, key=KEY)
    assert isinstance(first, Apply)
    stored = Observed(config_maps=(first.manifest,))
    assert plan_rollout_state(world.deployment, stored, world.state, key=KEY) == ()


def test_counts_and_tuning_modes_are_no_changes_but_caps_and_images_are() -> None:
    base = a_deployment()
    same = [a_deployment(replicas=9)]
    other = [
        a_deployment(args=("--seed=1",)),
        a_deployment(runtime={"device": "cpu", "image": "engine:2"}),
        a_deployment(engine={"gpuMemoryUtilization": "0.5"}),
        a_deployment(rollout={"startTimeout": "9m", "drainTimeout": "10s"}),
    ]
    name = change_of(base, render(base))
    assert all(change_of(found, render(found)) == name for found in same)
    assert all(change_of(found, render(found)) != name for found in other)


# --- any history ------------------------------------------------------------------------------------------------------

EVENTS = st.sampled_from(["tick", "tick", "tick", "bad", "good", "other", "scale", "restart", "wait"])


@given(st.lists(EVENTS, max_size=40), st.booleans())
@settings(max_examples=25, deadline=None)
def test_whatever_is_edited_replicas_come_to_rest_at_something_that_works(events: list[str], ends_bad: bool) -> None:
    world = settled()
    args: tuple[str, ...] = ()
    replicas = 2
    for number, event in enumerate(events):
        if event == "tick":
            world.tick()
        elif event == "wait":
            world.now += 30.0
        elif event == "restart":
            world.state = from_text(to_text(world.state, key=KEY), key=KEY)
        elif event == "scale":
            replicas = 1 + number % 3
            world.edit(args=args, replicas=replicas)
        else:
            args = {"bad": (BAD,), "good": (), "other": (f"--seed={number}",)}[event]
            world.edit(args=args, replicas=replicas)
    args = (BAD, "--last") if ends_bad else ("--last",)
    world.edit(args=args, replicas=replicas)
    world.settle()
    assert len(world.groups) == replicas
    assert all(group.is_ready for group in world.groups)
    assert len(set(world.revisions())) == 1
    assert world.course is not None
    assert (world.course.failed is not None) is ends_bad
    state = world.state
    assert world.tick().state == state
