"""A change that does not come up is taken back; one that does stays. Replicas come to rest at what works."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_builders import MODEL_FACTS
from operator_builders import a_deployment as deployment_of
from operator_cluster import BROKEN, TICK_SECONDS, TOKEN, FakeCluster
from trimtab_operator.builders.admin_token import token_hash
from trimtab_operator.builders.stateful_set import rendered
from trimtab_operator.observed.actions import Apply
from trimtab_operator.observed.groups import Observed
from trimtab_operator.planning.plan import Turn
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.rollout.rollback import (
    REFUSED_STARTS,
    UNWRITTEN_SECONDS,
    FailedChange,
    RolloutState,
    budget_seconds,
    change_of,
    form_of,
    from_text,
    plan_rollout_state,
    proven_deployment,
    stored_rollout,
    to_text,
)

KEY = "a token"
START_SECONDS = 20.0  # of an engine that comes up
QUICK = {"startTimeout": "2m", "drainTimeout": "10s", "maxSurge": 0, "bakeTime": "0s"}
"""In place, where it is harder (test_surge.py has the other way), and with nothing to wait for (test_bake.py)."""
BAD = (BROKEN,)


def a_runtime(*args: str) -> dict[str, Any]:
    return {"device": "cpu", "image": "engine:1", "args": list(args)}


def a_deployment(*, args: tuple[str, ...] = (), replicas: int = 2, **spec: Any) -> InferenceDeployment:
    return deployment_of(**{"runtime": a_runtime(*args), "replicas": replicas, "rollout": QUICK, **spec})


def render(deployment: InferenceDeployment) -> str:
    return rendered(deployment, admin_token_sha256=token_hash(TOKEN)).revision


class World(FakeCluster):
    """A cluster in which engines take START_SECONDS to come up; remembers what the operator found last."""

    def __init__(self, *, args: tuple[str, ...] = (), replicas: int = 2, nodes: int = 99, **spec: Any) -> None:
        spec = {"runtime": a_runtime(*args), "replicas": replicas, "rollout": QUICK, **spec}
        super().__init__(start_seconds=START_SECONDS, nodes=nodes, **spec)
        self.most_down = 0
        self.failed: FailedChange | None = None

    def tick(self) -> Turn:
        decided = super().tick()
        self.failed = decided.findings.failed_change
        self.most_down = max(self.most_down, sum(not group.is_ready for group in self.groups))
        return decided

    def run(self, ticks: int = 70) -> None:
        """Long enough for a roll, a spent budget and a roll back."""
        for _ in range(ticks):
            self.tick()

    @property
    def state(self) -> RolloutState:
        return self.memory.rollout or RolloutState()


def settled(replicas: int = 2) -> World:
    world = World(replicas=replicas)
    world.settle()
    assert world.state.proven == form_of(world.deployment)
    world.most_down = 0
    return world


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_change_that_does_not_come_up_is_taken_back_and_reaches_no_further_replica(replicas: int) -> None:
    world = settled(replicas)
    before = world.revisions
    world.edit(runtime=a_runtime(*BAD))
    bad = render(world.deployment)
    most = 0
    for _ in range(100):
        world.tick()
        most = max(most, world.revisions.count(bad))
    assert most == 1
    assert world.revisions == before
    assert all(group.is_ready for group in world.groups)
    assert world.failed is not None
    assert "m-g0 did not become Ready within 2m" in world.failed.message
    assert world.failed.returns_to == before[0]
    assert world.most_down == 1


@pytest.mark.parametrize(("gigabytes", "is_given_up"), [(1, True), (141, False)])
def test_a_large_model_gets_the_time_that_reading_it_takes(gigabytes: int, is_given_up: bool) -> None:
    parts = {**MODEL_FACTS["weights_by_part"], "dense_mlp": gigabytes * 10**9}
    facts = {**MODEL_FACTS, "weights_by_part": parts, "weights_bytes": sum(parts.values())}
    cluster = FakeCluster(knows_the_model=False, rollout={"drainTimeout": "10s", "bakeTime": "0s", "maxSurge": 0})
    cluster.model_words = (0, json.dumps(facts))
    cluster.settle()
    cluster.start_seconds = 40 * 60.0
    cluster.edit(runtime=a_runtime("--seed=1"))
    for _ in range(42):
        cluster.tick()
        cluster.now += 60.0
    ready = cluster.condition("Ready")
    assert (ready["reason"] == "RolledBack") is is_given_up
    assert (ready["status"] == "True") is not is_given_up


def test_a_layout_that_does_not_come_up_is_taken_back_and_no_group_is_ever_of_two_revisions() -> None:
    world = settled()
    world.edit(runtime=a_runtime(*BAD), parallelism={"pipeline": 2, "gpusPerNode": 1})
    for _ in range(70):
        world.tick()
        assert all(group.revision for group in world.groups), "the sets of a group differ"
    assert world.failed is not None
    assert [group.num_pods for group in world.groups] == [1, 1]
    assert all(group.is_ready for group in world.groups)
    world.edit(runtime=a_runtime())
    world.run()
    assert [group.num_pods for group in world.groups] == [2, 2]
    assert all(group.is_ready for group in world.groups)
    assert world.state.proven == form_of(world.deployment)


def test_a_larger_group_for_which_there_are_too_few_nodes_is_taken_back_and_serves_again_at_once() -> None:
    """It gave its pods back meanwhile, and waits for longer each time; the group that worked waits for nothing."""
    world = World(replicas=1, parallelism={"pipeline": 2, "gpusPerNode": 1}, nodes=2)
    world.run()
    assert all(group.is_ready for group in world.groups)
    patient = {"startTimeout": "5m", "drainTimeout": "10s", "maxSurge": 0, "bakeTime": "0s"}
    world.edit(rollout=patient, parallelism={"pipeline": 3, "gpusPerNode": 1})
    gave_back = 0
    while world.failed is None:
        world.tick()
        gave_back += sum(group.num_pods == 0 for group in world.groups)
    assert gave_back > 0
    assert "m-g0 did not become Ready within 5m" in world.failed.message
    for _ in range(int(START_SECONDS / TICK_SECONDS) + 2):
        world.tick()
    assert [(group.num_pods, group.is_ready) for group in world.groups] == [(2, True)]


def test_it_is_tried_again_only_when_the_spec_changes() -> None:
    world = settled()
    world.edit(runtime=a_runtime(*BAD))
    world.run()
    good = world.revisions
    world.edit(replicas=3)  # an autoscaler's write is no change of the spec in this sense
    world.run()
    assert world.revisions == [good[0]] * 3
    world.edit(rollout={"startTimeout": "3m", "drainTimeout": "10s"})
    world.tick()
    world.tick()
    assert render(world.deployment) in world.revisions
    world.run()
    assert world.revisions == [good[0]] * 3


def test_a_good_change_after_a_bad_one_goes_through() -> None:
    world = settled()
    world.edit(runtime=a_runtime(*BAD))
    world.run()
    world.edit(runtime=a_runtime("--seed=1"))
    world.run()
    assert world.revisions == [render(world.deployment)] * 2
    assert world.failed is None
    assert (world.state.proven, world.state.attempt, world.state.taken_back) == (form_of(world.deployment), None, None)


def test_a_first_revision_has_nothing_to_return_to_and_says_so() -> None:
    world = World(args=BAD)
    world.run()
    assert world.failed is not None
    assert world.failed.returns_to is None
    assert world.revisions == [render(world.deployment)] * 2


def test_a_restarted_operator_neither_forgets_the_clock_nor_what_worked() -> None:
    world = settled(1)
    world.edit(runtime=a_runtime(*BAD))
    for _ in range(4):
        world.tick()
    began = world.now
    while world.state.taken_back is None:
        world.restart_operator()
        world.tick()
    assert world.now - began < budget_seconds(world.deployment) + 2 * TICK_SECONDS
    world.restart_operator()
    world.run()
    assert all(group.is_ready for group in world.groups)


def test_an_engine_that_is_ready_but_cannot_be_asked_is_not_taken_back_nor_spread() -> None:
    world = settled(3)
    world.edit(runtime=a_runtime("--seed=1"))
    new = render(world.deployment)
    world.is_answering = False
    world.run()
    assert world.revisions.count(new) == 1
    assert world.state.taken_back is None
    world.is_answering = True
    world.run()
    assert world.revisions == [new] * 3


def test_replicas_that_fail_at_a_proven_revision_are_not_taken_back() -> None:
    world = settled()
    world.unready.update(world.pods)
    world.is_answering = False
    world.now += 1e6
    world.run(3)
    assert world.failed is None
    assert world.revisions == [render(world.deployment)] * 2


def test_while_the_spec_may_not_start_the_proven_form_is_kept_up_at_todays_count() -> None:
    world = settled()
    before = world.revisions[0]
    world.model_words = (1, "no such file")  # of the model that is asked for now
    world.edit(model={"uri": "file:///models/other"}, replicas=5)
    world.run()
    assert world.revisions == [before] * 5
    assert all(group.is_ready for group in world.groups)


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
    world.edit(runtime=a_runtime(*BAD))
    world.tick()
    world.tick()
    world.pods["m-g0-0"]["status"] = ended(exit_code, times)
    failed = world.decide().findings.failed_change
    assert (failed is not None) is is_taken_back
    if failed is not None:
        assert "max_model_len is too long (exit code 2)" in failed.message


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
    assert plan_rollout_state(world.deployment, Observed(), RolloutState(), key=KEY, now=world.now) == ()
    (first,) = plan_rollout_state(world.deployment, Observed(), world.state, key=KEY, now=world.now)
    assert isinstance(first, Apply)
    stored = Observed(config_maps=(first.manifest,))
    assert plan_rollout_state(world.deployment, stored, world.state, key=KEY, now=world.now) == ()


def test_counts_and_tuning_modes_are_no_changes_but_caps_and_images_are() -> None:
    base = a_deployment()
    same = [a_deployment(replicas=9), a_deployment(engine={"schedulingPolicy": "priority"})]
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
    replicas = 2
    for number, event in enumerate(events):
        if event == "tick":
            world.tick()
        elif event == "wait":
            world.now += 30.0
        elif event == "restart":
            world.restart_operator()
        elif event == "scale":
            replicas = 1 + number % 3
            world.edit(replicas=replicas)
        else:
            world.edit(runtime=a_runtime(*{"bad": BAD, "good": (), "other": (f"--seed={number}",)}[event]))
    world.edit(runtime=a_runtime(*(*(BAD if ends_bad else ()), "--last")))
    world.run()
    assert len(world.groups) == replicas
    assert all(group.is_ready for group in world.groups)
    assert len(set(world.revisions)) == 1
    assert (world.failed is not None) is ends_bad
    assert world.decide().is_idle


def test_a_change_that_is_tried_for_less_than_a_minute_is_not_written_down() -> None:
    world = World(replicas=1)
    world.settle()
    known = world.objects["ConfigMap", "m-rollout"]["data"]
    world.edit(runtime=a_runtime(*BAD))
    for _ in range(int(UNWRITTEN_SECONDS / TICK_SECONDS)):
        world.tick()
        assert world.objects["ConfigMap", "m-rollout"]["data"] == known
    for _ in range(3):
        world.tick()
    assert world.objects["ConfigMap", "m-rollout"]["data"] != known


def test_an_operator_that_never_lives_for_a_minute_takes_a_bad_change_back_in_time() -> None:
    world = World(replicas=1)
    world.settle()
    world.edit(runtime=a_runtime(*BAD))
    began = world.now
    while world.failed is None:
        world.restart_operator()
        world.tick()
        assert world.now - began < budget_seconds(world.deployment) + 6 * TICK_SECONDS


def test_nor_does_an_earlier_attempt_keep_it_from_that() -> None:
    world = World(replicas=1)
    world.settle()
    world.edit(runtime=a_runtime(*BAD))
    while stored_rollout(world.deployment, world.children(), key=TOKEN).attempt is None:
        world.tick()
    world.edit(rollout={**QUICK, "startTimeout": "3m"})  # another change, with the pods of the one before
    began = world.now
    while world.failed is None:
        world.restart_operator()
        world.tick()
        assert world.now - began < budget_seconds(world.deployment) + 6 * TICK_SECONDS
