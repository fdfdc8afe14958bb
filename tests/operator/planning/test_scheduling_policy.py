"""Scheduling policy of engines: patched live, derived from objectives, and reset when unset."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from operator_builders import a_deployment
from operator_cluster import TOKEN, FakeCluster, FakeEngine
from trimtab_operator.builders.config_map import tuning_config_map
from trimtab_operator.observed.engines import ReportedScheduling
from trimtab_operator.planning.scheduling_policy import (
    SchedulingPlan,
    SchedulingPolicy,
    SchedulingSetting,
    SchedulingSource,
    describe_policy,
    duration,
    is_deadline_active,
    plan_scheduling,
    scheduling_status,
    stored_scheduling,
    wanted_scheduling,
)
from trimtab_operator.planning.tuning import dump_tuner_state
from trimtab_operator.resource.spec import PAUSED
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.state import TunerState
from trimtab_operator.validation.rules import validation_errors

PROMISE = {"ttft": {"target": "2s", "perPromptToken": "125us"}}
AUTO = {"mode": "Auto"}
ALL = ("fcfs", "priority", "deadline")
TIMES = {"ttft_target": 0.0, "ttft_target_per_prompt_token": 0.0}
FIRST_COME = ReportedScheduling("fcfs", ALL, TIMES)
IN_TIME = ReportedScheduling("deadline", ALL, {"ttft_target": 2.0, "ttft_target_per_prompt_token": 0.000125})
OLDER = ReportedScheduling("fcfs", ("fcfs", "priority"), {})
BY_PROMISE = SchedulingSetting(SchedulingPolicy.DEADLINE, SchedulingSource.OBJECTIVES, 2.0, 0.000125)
TOLD_IN_TIME = {
    "scheduling_policy": "deadline",
    "ttft_target": 2.0,
    "ttft_target_per_prompt_token": 0.000125,
}


def make_deployment(before: SchedulingPlan | None = None, **spec: Any) -> Any:
    status = {} if before is None else {"tuning": {"schedulingPolicy": scheduling_status(before)}}
    return a_deployment(status=status, **spec)


# --- wanted policy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ({"objectives": PROMISE, "tuning": AUTO}, BY_PROMISE),
        ({"objectives": {"ttft": {"target": "500ms"}}, "tuning": AUTO},
         SchedulingSetting(SchedulingPolicy.DEADLINE, SchedulingSource.OBJECTIVES, 0.5)),
        ({"objectives": {"itl": {"target": "50ms"}}, "tuning": AUTO}, None),
        ({"tuning": AUTO}, None),
        ({"objectives": PROMISE}, None),
        ({"objectives": PROMISE, "tuning": {"mode": "Off"}}, None),
        ({"objectives": PROMISE, "tuning": AUTO, "engine": {"schedulingPolicy": "fcfs"}},
         SchedulingSetting(SchedulingPolicy.FCFS, SchedulingSource.SPEC)),
        ({"engine": {"schedulingPolicy": "priority"}, "tuning": {"mode": "Off"}},
         SchedulingSetting(SchedulingPolicy.PRIORITY, SchedulingSource.SPEC)),
        ({"engine": {"schedulingPolicy": "deadline"}, "objectives": PROMISE, "tuning": {"mode": "Recommend"}},
         SchedulingSetting(SchedulingPolicy.DEADLINE, SchedulingSource.SPEC, 2.0, 0.000125)),
    ],
)  # fmt: skip
def test_spec_policy_precedes_ttft_objective(spec: dict[str, Any], wanted: SchedulingSetting | None) -> None:
    assert wanted_scheduling(a_deployment(**spec).spec) == wanted


def test_target_above_one_day_is_capped() -> None:
    wanted = wanted_scheduling(a_deployment(objectives={"ttft": {"target": "99h"}}, tuning=AUTO).spec)
    assert wanted is not None
    assert wanted.ttft_target == 86_400.0


@pytest.mark.parametrize("flag", ["--scheduling-policy=priority", "--scheduling_policy", "--ttft-target=1"])
def test_policy_flags_in_args_are_kept(flag: str) -> None:
    runtime = {"device": "cpu", "image": "engine:1", "args": [flag]}
    assert wanted_scheduling(a_deployment(runtime=runtime, objectives=PROMISE, tuning=AUTO).spec) is None


# --- single plan ------------------------------------------------------------------------------------------------------


def test_differing_engines_are_patched_and_reported_once() -> None:
    deployment = make_deployment(objectives=PROMISE, tuning=AUTO)
    found = plan_scheduling(deployment, {"a": FIRST_COME, "b": IN_TIME, "c": None})
    assert (found.sent, found.active) == (BY_PROMISE, BY_PROMISE)
    assert found.patches == {"a": TOLD_IN_TIME}
    (note,) = found.events
    assert (note.type, note.reason) == ("Normal", "SchedulingPolicyChanged")
    assert note.message == (
        "scheduling policy fcfs -> deadline: requests that can still meet a TTFT of 2 s (+125 us per prompt token) "
        "run first"
    )
    later = plan_scheduling(
        make_deployment(found, objectives=PROMISE, tuning=AUTO), {"a": IN_TIME, "b": IN_TIME, "c": FIRST_COME}
    )
    assert later.patches == {"c": TOLD_IN_TIME}
    assert later.events == ()


def test_new_target_is_a_change() -> None:
    before = plan_scheduling(make_deployment(objectives=PROMISE, tuning=AUTO), {"a": IN_TIME})
    after = plan_scheduling(
        make_deployment(before, objectives={"ttft": {"target": "500ms"}}, tuning=AUTO), {"a": IN_TIME}
    )
    assert after.patches["a"] == TOLD_IN_TIME | {"ttft_target": 0.5, "ttft_target_per_prompt_token": 0.0}
    assert [note.message for note in after.events] == [
        "scheduling policy deadline, with other targets: requests that can still meet a TTFT of 500 ms run first"
    ]


def test_targets_are_unchanged_without_deadline() -> None:
    said = ReportedScheduling("priority", ALL, {"ttft_target": 9.0, "ttft_target_per_prompt_token": 0.0})
    found = plan_scheduling(make_deployment(engine={"schedulingPolicy": "fcfs"}), {"a": said, "b": FIRST_COME})
    assert found.patches == {"a": {"scheduling_policy": "fcfs"}}


def test_unset_policy_keeps_engine_policy() -> None:
    assert plan_scheduling(make_deployment(tuning=AUTO), {"a": IN_TIME}) == SchedulingPlan()


def test_older_engine_is_skipped_and_named() -> None:
    found = plan_scheduling(make_deployment(objectives=PROMISE, tuning=AUTO), {"a": OLDER, "b": FIRST_COME, "c": None})
    assert found.patches.keys() == {"b"}
    assert scheduling_status(found)["message"] == (
        "a does not support the scheduling policy deadline and keeps its own; set spec.runtime.image to a newer engine"
    )


def test_unsupporting_engines_are_not_patched() -> None:
    found = plan_scheduling(make_deployment(objectives=PROMISE, tuning=AUTO), {"a": OLDER, "b": OLDER})
    assert (found.sent, found.active, found.patches, found.events) == (None, None, {}, ())
    assert scheduling_status(found).keys() == {"message"}
    assert stored_scheduling({"tuning": {"schedulingPolicy": scheduling_status(found)}}) is None


def test_status_has_reported_not_sent_policy() -> None:
    sent = plan_scheduling(make_deployment(objectives=PROMISE, tuning=AUTO), {"a": FIRST_COME, "b": FIRST_COME})
    assert (sent.sent, scheduling_status(sent)) == (BY_PROMISE, {})
    some = plan_scheduling(
        make_deployment(sent, objectives=PROMISE, tuning=AUTO), {"a": IN_TIME, "b": FIRST_COME}, sent.sent
    )
    assert some.events == ()
    assert scheduling_status(some) == {
        "policy": "deadline",
        "source": "Objectives",
        "ttftTarget": "2s",
        "perPromptToken": "125us",
        "message": "b has not applied the scheduling policy deadline yet",
    }
    every = plan_scheduling(
        make_deployment(some, objectives=PROMISE, tuning=AUTO), {"a": IN_TIME, "b": IN_TIME}, some.sent
    )
    assert "message" not in scheduling_status(every)


def test_status_omits_policy_unsupported_by_older_image() -> None:
    before = plan_scheduling(make_deployment(objectives=PROMISE, tuning=AUTO), {"a": IN_TIME})
    coming = plan_scheduling(make_deployment(before, objectives=PROMISE, tuning=AUTO), {"a": None}, before.sent)
    assert coming.active == BY_PROMISE
    older = plan_scheduling(make_deployment(coming, objectives=PROMISE, tuning=AUTO), {"a": OLDER}, coming.sent)
    assert (older.sent, older.active) == (None, None)
    assert scheduling_status(older).keys() == {"message"}
    newer = plan_scheduling(make_deployment(older, objectives=PROMISE, tuning=AUTO), {"a": FIRST_COME}, older.sent)
    assert len(newer.events) == 1


def test_removed_objective_resets_every_engine() -> None:
    before = plan_scheduling(make_deployment(objectives=PROMISE, tuning=AUTO), {"a": IN_TIME, "b": IN_TIME})
    back = plan_scheduling(make_deployment(before, tuning=AUTO), {"a": IN_TIME, "b": None}, before.sent)
    assert back.patches == {"a": {"scheduling_policy": "fcfs"}}
    assert [note.message for note in back.events] == [
        "scheduling policy deadline -> fcfs: requests are scheduled in order of arrival"
    ]
    waiting = plan_scheduling(make_deployment(back, tuning=AUTO), {"a": FIRST_COME, "b": None}, back.sent)
    assert (waiting.active, waiting.patches) == (BY_PROMISE, {})
    assert scheduling_status(waiting)["message"] == "b has not applied the scheduling policy fcfs yet"
    heard = plan_scheduling(make_deployment(waiting, tuning=AUTO), {"a": FIRST_COME, "b": IN_TIME}, waiting.sent)
    assert heard.patches == {"b": {"scheduling_policy": "fcfs"}}
    assert heard.events == ()
    assert (
        plan_scheduling(make_deployment(heard, tuning=AUTO), {"a": FIRST_COME, "b": FIRST_COME}, heard.sent)
        == SchedulingPlan()
    )


def test_unconfirmed_policy_is_reset() -> None:
    sent = plan_scheduling(make_deployment(objectives=PROMISE, tuning=AUTO), {"a": FIRST_COME})
    back = plan_scheduling(make_deployment(sent, tuning=AUTO), {"a": IN_TIME}, sent.sent)
    assert back.patches == {"a": {"scheduling_policy": "fcfs"}}


@pytest.mark.parametrize("silent", [False, True])
def test_sent_and_active_policies_are_both_reset(silent: bool) -> None:
    """The last observation before the edit had the previous policy, so an engine may have either."""
    by_priority = ReportedScheduling("priority", ALL, TIMES)
    first = plan_scheduling(
        make_deployment(engine={"schedulingPolicy": "priority"}), {"a": by_priority, "b": by_priority}
    )
    sent = plan_scheduling(
        make_deployment(first, objectives=PROMISE, tuning=AUTO), {"a": by_priority, "b": by_priority}, first.sent
    )
    assert sent.patches.keys() == {"a", "b"}
    back = plan_scheduling(
        make_deployment(sent, tuning=AUTO), {"a": IN_TIME, "b": None if silent else by_priority}, sent.sent
    )
    assert back.patches.keys() == ({"a"} if silent else {"a", "b"})
    heard = plan_scheduling(
        make_deployment(back, tuning=AUTO), {"a": IN_TIME, "b": by_priority}, back.sent
    )  # none was applied
    assert heard.patches == {name: {"scheduling_policy": "fcfs"} for name in ("a", "b")}
    assert (
        plan_scheduling(make_deployment(heard, tuning=AUTO), {"a": FIRST_COME, "b": FIRST_COME}, heard.sent)
        == SchedulingPlan()
    )


def test_manual_policy_is_kept_during_reset() -> None:
    before = plan_scheduling(make_deployment(objectives=PROMISE, tuning=AUTO), {"a": IN_TIME, "b": IN_TIME})
    back = plan_scheduling(make_deployment(before, tuning=AUTO), {"a": IN_TIME, "b": None}, before.sent)
    by_hand = ReportedScheduling("priority", ALL, TIMES)
    for sent in (back.sent, None):  # by this operator, and by the next one
        after = plan_scheduling(make_deployment(back, tuning=AUTO), {"a": by_hand, "b": None}, sent)
        assert after.patches == {}
        heard = plan_scheduling(make_deployment(after, tuning=AUTO), {"a": by_hand, "b": IN_TIME}, after.sent)
        assert heard.patches.keys() == {"b"}
        assert (
            plan_scheduling(make_deployment(heard, tuning=AUTO), {"a": by_hand, "b": FIRST_COME}, heard.sent)
            == SchedulingPlan()
        )


def test_predictions_go_by_the_order_that_most_engines_have() -> None:
    wanted = wanted_scheduling(a_deployment(objectives=PROMISE, tuning=AUTO).spec)
    assert is_deadline_active({"a": None}, wanted)
    assert not is_deadline_active({"a": None}, None)
    assert not is_deadline_active({"a": OLDER, "b": IN_TIME}, wanted)
    assert is_deadline_active({"a": OLDER, "b": IN_TIME, "c": IN_TIME, "d": None}, None)


@pytest.mark.parametrize("mode", ["Off", "Recommend"])
def test_tuning_off_keeps_objective_policy(mode: str) -> None:
    before = plan_scheduling(make_deployment(objectives=PROMISE, tuning=AUTO), {"a": IN_TIME})
    after = plan_scheduling(make_deployment(before, objectives=PROMISE, tuning={"mode": mode}), {"a": IN_TIME})
    assert after == SchedulingPlan(BY_PROMISE, BY_PROMISE)
    again = plan_scheduling(make_deployment(after, tuning=AUTO), {"a": IN_TIME})
    assert again.patches == {"a": {"scheduling_policy": "fcfs"}}


@pytest.mark.parametrize("mode", ["Off", "Recommend", "Auto"])
def test_removed_spec_policy_is_reset_in_every_mode(mode: str) -> None:
    tuning = {"mode": mode}
    before = plan_scheduling(make_deployment(engine={"schedulingPolicy": "priority"}, tuning=tuning), {"a": FIRST_COME})
    assert before.patches == {"a": {"scheduling_policy": "priority"}}
    after = plan_scheduling(
        make_deployment(before, tuning=tuning), {"a": ReportedScheduling("priority", ALL, TIMES)}, before.sent
    )
    assert after.patches == {"a": {"scheduling_policy": "fcfs"}}


@pytest.mark.parametrize(
    "order",
    [
        None,
        {},
        "deadline",
        {"policy": "deadline"},
        {"policy": "lifo", "source": "Spec"},
        {"policy": "fcfs", "source": "Spec", "ttftTarget": 3},
    ],
)
def test_invalid_status_policy_is_ignored(order: Any) -> None:
    assert stored_scheduling({"tuning": {"schedulingPolicy": order}}) is None
    assert stored_scheduling({}) is None


@pytest.mark.parametrize("seconds", [2.0, 0.5, 0.000125, 90.0, 0.001, 1.5])
def test_status_policy_round_trips(seconds: float) -> None:
    sent = SchedulingSetting(SchedulingPolicy.DEADLINE, SchedulingSource.SPEC, seconds, 0.000125)
    assert stored_scheduling({"tuning": {"schedulingPolicy": scheduling_status(SchedulingPlan(active=sent))}}) == sent


def test_durations_are_formatted_like_the_spec() -> None:
    assert [duration(seconds) for seconds in (2.0, 90.0, 0.5, 0.000125)] == ["2s", "90s", "500ms", "125us"]
    assert describe_policy(SchedulingSetting(SchedulingPolicy.PRIORITY, SchedulingSource.SPEC)).startswith(
        "requests with the lowest priority value"
    )


# --- validation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objectives", [None, {"itl": {"target": "50ms"}}])
def test_deadline_needs_a_ttft_objective(objectives: dict[str, Any] | None) -> None:
    (error,) = validation_errors(a_deployment(engine={"schedulingPolicy": "deadline"}, objectives=objectives))
    assert error.field == "spec.engine.schedulingPolicy"
    assert "set spec.objectives.ttft.target" in str(error)
    assert not validation_errors(a_deployment(engine={"schedulingPolicy": "deadline"}, objectives=PROMISE))


def test_policy_in_field_and_flags_is_rejected() -> None:
    runtime = {"device": "cpu", "image": "engine:1", "args": ["--max-num-queued-reqs=9", "--scheduling-policy=fcfs"]}
    (error,) = validation_errors(a_deployment(runtime=runtime, engine={"schedulingPolicy": "priority"}))
    assert error.field == "spec.runtime.args[1]"
    assert not validation_errors(a_deployment(runtime=runtime))


# --- whole cluster ----------------------------------------------------------------------------------------------------


def a_cluster(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(**{"replicas": 2, "objectives": PROMISE, "tuning": AUTO, **spec})
    cluster.settle()
    return cluster


def orders(cluster: FakeCluster) -> list[str]:
    leaders = [pod["metadata"]["uid"] for _, pod in sorted(cluster.pods.items())]
    return [cluster.engines[uid].policy for uid in leaders]


def test_ttft_objective_sets_and_reports_deadline() -> None:
    cluster = a_cluster()
    assert orders(cluster) == ["deadline", "deadline"]
    assert cluster.engine(0).times == {"ttft_target": 2.0, "ttft_target_per_prompt_token": 0.000125}
    assert cluster.events.count("SchedulingPolicyChanged") == 1
    assert cluster.status["tuning"]["schedulingPolicy"] == {
        "policy": "deadline",
        "source": "Objectives",
        "ttftTarget": "2s",
        "perPromptToken": "125us",
    }
    assert cluster.status["engine"]["effective"]["schedulingPolicy"] == "deadline"
    assert cluster.status["engine"]["effective"]["ttftTarget"] == "2"


CHANGES: tuple[dict[str, Any], ...] = (
    {"engine": {"schedulingPolicy": "fcfs"}},
    {"engine": {"schedulingPolicy": "priority"}},
    {"engine": {"schedulingPolicy": "deadline"}},
    {"objectives": {"ttft": {"target": "1s"}}},
    {"objectives": None},
)


@pytest.mark.parametrize("change", CHANGES)
def test_policy_and_objective_edits_change_no_pod(change: dict[str, Any]) -> None:
    cluster = a_cluster()
    pods, sets = copy.deepcopy(cluster.pods), {key: copy.deepcopy(found) for key, found in cluster.objects.items()
                                               if key[0] == "StatefulSet"}  # fmt: skip
    cluster.edit(**change)
    cluster.settle()
    assert cluster.pods == pods
    assert {key: found for key, found in cluster.objects.items() if key[0] == "StatefulSet"} == sets
    wanted = wanted_scheduling(cluster.deployment.spec)
    assert orders(cluster) == [SchedulingPolicy.FCFS if wanted is None else wanted.policy] * 2
    assert ("schedulingPolicy" in cluster.status["tuning"]) == (wanted is not None)


def test_policy_edit_with_other_fields_keeps_pods() -> None:
    cluster = a_cluster(engine={"maxNumSeqs": 16})
    before = cluster.revisions
    cluster.edit(engine={"maxNumSeqs": 16, "schedulingPolicy": "fcfs"})
    cluster.settle()
    assert cluster.revisions == before
    assert orders(cluster) == ["fcfs", "fcfs"]


def test_new_operator_sets_deadline_without_rollout() -> None:
    cluster = a_cluster()
    for engine in cluster.engines.values():  # as the operator before left them
        engine.policy, engine.generation = "fcfs", 1
    cluster.status["tuning"].pop("schedulingPolicy")
    pods = copy.deepcopy(cluster.pods)
    cluster.restart_operator()
    cluster.settle()
    assert cluster.pods == pods
    assert orders(cluster) == ["deadline", "deadline"]


def test_restarted_engine_is_patched_without_event() -> None:
    cluster = a_cluster()
    uid = cluster.pods["m-g1-0"]["metadata"]["uid"]
    cluster.engines[uid] = FakeEngine()
    announced = cluster.events.count("SchedulingPolicyChanged")
    cluster.settle()
    assert orders(cluster) == ["deadline", "deadline"]
    assert cluster.events.count("SchedulingPolicyChanged") == announced


def test_a_dead_replica_holds_nothing() -> None:
    cluster = a_cluster()
    cluster.silent.add("m-g0-0")
    cluster.edit(engine={"schedulingPolicy": "priority"})
    for _ in range(3):
        cluster.tick()
    assert orders(cluster) == ["deadline", "priority"]
    cluster.silent.clear()
    cluster.settle()
    assert orders(cluster) == ["priority", "priority"]


def test_tuned_values_are_patched_before_policy() -> None:
    cluster = FakeCluster(objectives=PROMISE, tuning=AUTO)
    kept = dump_tuner_state(TunerState(applied={Parameter.MAX_NUM_SEQS: 16}), key=TOKEN)
    cluster.objects["ConfigMap", "m-tuning"] = tuning_config_map(cluster.deployment, kept)
    cluster.objects["ConfigMap", "m-tuning"]["metadata"] |= {"uid": "o-0", "creationTimestamp": "2026-01-01T12:00:00Z"}
    sent = [dict(order.fields) for _ in range(6) for order in cluster.tick().patches]
    assert sent == [{"max_num_seqs": 16}, TOLD_IN_TIME]


def test_rejected_tuned_value_does_not_block_policy() -> None:
    cluster = FakeCluster(objectives=PROMISE, tuning=AUTO)
    kept = dump_tuner_state(TunerState(applied={Parameter.MAX_NUM_SEQS: 16}), key=TOKEN)
    cluster.objects["ConfigMap", "m-tuning"] = tuning_config_map(cluster.deployment, kept)
    cluster.objects["ConfigMap", "m-tuning"]["metadata"] |= {"uid": "o-0", "creationTimestamp": "2026-01-01T12:00:00Z"}
    for _ in range(6):
        cluster.tick()
        for engine in cluster.engines.values():
            engine.refuses = frozenset({"max_num_seqs"})
    assert orders(cluster) == ["deadline"]
    assert cluster.status["tuning"]["schedulingPolicy"]["policy"] == "deadline"


def test_predictions_use_reported_policy() -> None:
    def predicts_by_deadline(cluster: FakeCluster) -> bool:
        tuned = cluster.decide().status_inputs.tuning
        assert tuned is not None
        return tuned.objectives.order_queues

    cluster = FakeCluster(objectives=PROMISE, tuning=AUTO)
    cluster.older_images.add("engine:1")
    cluster.settle()
    assert not predicts_by_deadline(cluster)
    cluster.edit(runtime={"device": "cpu", "image": "engine:2"})
    cluster.settle()
    assert predicts_by_deadline(cluster)
    cluster.edit(runtime={"device": "cpu", "image": "engine:1"})
    cluster.settle()
    assert not predicts_by_deadline(cluster)
    assert cluster.status["tuning"]["schedulingPolicy"].keys() == {"message"}


def test_paused_resource_keeps_policy() -> None:
    cluster = a_cluster()
    assert cluster.body is not None
    cluster.body["metadata"]["annotations"] = {PAUSED: "true"}
    cluster.edit(objectives=None)
    cluster.settle()
    assert orders(cluster) == ["deadline", "deadline"]
    cluster.body["metadata"]["annotations"] = {}
    cluster.settle()
    assert orders(cluster) == ["fcfs", "fcfs"]
    assert "schedulingPolicy" not in cluster.status["tuning"]


def test_older_image_keeps_policy_newer_is_patched() -> None:
    cluster = FakeCluster(replicas=1, objectives=PROMISE, tuning=AUTO)
    cluster.older_images.add("engine:1")
    cluster.settle()
    assert orders(cluster) == ["fcfs"]
    assert "SchedulingPolicyChanged" not in cluster.events
    assert cluster.status["tuning"]["schedulingPolicy"]["message"].startswith(
        "m-g0 does not support the scheduling policy deadline"
    )
    cluster.edit(runtime={"device": "cpu", "image": "engine:2"})
    cluster.settle()
    assert orders(cluster) == ["deadline"]
    assert "message" not in cluster.status["tuning"]["schedulingPolicy"]
    assert cluster.events.count("SchedulingPolicyChanged") == 1


@pytest.mark.parametrize("mode", ["Off", "Recommend"])
def test_tuning_off_applies_spec_policy_only(mode: str) -> None:
    cluster = a_cluster(tuning={"mode": mode})
    assert orders(cluster) == ["fcfs", "fcfs"]
    cluster.edit(engine={"schedulingPolicy": "deadline"})
    cluster.settle()
    assert orders(cluster) == ["deadline", "deadline"]
