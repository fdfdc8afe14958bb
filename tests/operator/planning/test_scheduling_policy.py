"""The order of the engines' queue: told while they serve, by the owner's promises, and taken back when nobody asks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from operator_builders import a_deployment
from operator_cluster import TOKEN, FakeCluster, FakeEngine
from trimtab_operator.builders.config_map import tuning_config_map
from trimtab_operator.observed.engines import QueueSeen
from trimtab_operator.planning.scheduling_policy import (
    AskedBy,
    QueueOrder,
    QueuePolicy,
    QueueTurn,
    asked_order,
    duration,
    meaning_of,
    queue_status,
    queue_turn,
    serves_by_deadline,
    taken_order,
)
from trimtab_operator.planning.tuning import remembered_text
from trimtab_operator.resource.spec import PAUSED
from trimtab_operator.tuner.knobs import Knob
from trimtab_operator.tuner.state import Memory as TunerMemory
from trimtab_operator.validation.rules import refusals

PROMISE = {"ttft": {"target": "2s", "perPromptToken": "125us"}}
AUTO = {"mode": "Auto"}
ALL = ("fcfs", "priority", "deadline")
TIMES = {"ttft_target": 0.0, "ttft_target_per_prompt_token": 0.0}
FIRST_COME = QueueSeen("fcfs", ALL, TIMES)
IN_TIME = QueueSeen("deadline", ALL, {"ttft_target": 2.0, "ttft_target_per_prompt_token": 0.000125})
OLDER = QueueSeen("fcfs", ("fcfs", "priority"), {})
BY_PROMISE = QueueOrder(QueuePolicy.DEADLINE, AskedBy.OBJECTIVES, 2.0, 0.000125)
TOLD_IN_TIME = {
    "scheduling_policy": "deadline",
    "ttft_target": 2.0,
    "ttft_target_per_prompt_token": 0.000125,
}


def asking(before: QueueTurn | None = None, **spec: Any) -> Any:
    status = {} if before is None else {"tuning": {"queueOrder": queue_status(before)}}
    return a_deployment(status=status, **spec)


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        ({"objectives": PROMISE, "tuning": AUTO}, BY_PROMISE),
        ({"objectives": {"ttft": {"target": "500ms"}}, "tuning": AUTO},
         QueueOrder(QueuePolicy.DEADLINE, AskedBy.OBJECTIVES, 0.5)),
        ({"objectives": {"itl": {"target": "50ms"}}, "tuning": AUTO}, None),
        ({"tuning": AUTO}, None),
        ({"objectives": PROMISE}, None),
        ({"objectives": PROMISE, "tuning": {"mode": "Off"}}, None),
        ({"objectives": PROMISE, "tuning": AUTO, "engine": {"schedulingPolicy": "fcfs"}},
         QueueOrder(QueuePolicy.FCFS, AskedBy.SPEC)),
        ({"engine": {"schedulingPolicy": "priority"}, "tuning": {"mode": "Off"}},
         QueueOrder(QueuePolicy.PRIORITY, AskedBy.SPEC)),
        ({"engine": {"schedulingPolicy": "deadline"}, "objectives": PROMISE, "tuning": {"mode": "Recommend"}},
         QueueOrder(QueuePolicy.DEADLINE, AskedBy.SPEC, 2.0, 0.000125)),
    ],
)  # fmt: skip
def test_the_owners_word_comes_first_and_then_the_promise_of_a_first_token(
    spec: dict[str, Any], asked: QueueOrder | None
) -> None:
    assert asked_order(a_deployment(**spec).spec) == asked


def test_a_promise_of_more_than_a_day_is_told_as_a_day() -> None:
    asked = asked_order(a_deployment(objectives={"ttft": {"target": "99h"}}, tuning=AUTO).spec)
    assert asked is not None
    assert asked.ttft_target == 86_400.0


@pytest.mark.parametrize("flag", ["--scheduling-policy=priority", "--scheduling_policy", "--ttft-target=1"])
def test_an_owner_who_starts_engines_with_an_order_keeps_it(flag: str) -> None:
    runtime = {"device": "cpu", "image": "engine:1", "args": [flag]}
    assert asked_order(a_deployment(runtime=runtime, objectives=PROMISE, tuning=AUTO).spec) is None


# --- one turn ---------------------------------------------------------------------------------------------------------


def test_each_engine_that_differs_is_told_and_the_change_is_told_once() -> None:
    deployment = asking(objectives=PROMISE, tuning=AUTO)
    found = queue_turn(deployment, {"a": FIRST_COME, "b": IN_TIME, "c": None})
    assert (found.told, found.taken) == (BY_PROMISE, BY_PROMISE)
    assert found.patches == {"a": TOLD_IN_TIME}
    (note,) = found.notes
    assert (note.type, note.reason) == ("Normal", "QueueOrderChanged")
    assert note.message == (
        "Queue order fcfs -> deadline: requests that can still have their first token within 2 s "
        "(+125 us per prompt token) go first."
    )
    later = queue_turn(asking(found, objectives=PROMISE, tuning=AUTO), {"a": IN_TIME, "b": IN_TIME, "c": FIRST_COME})
    assert later.patches == {"c": TOLD_IN_TIME}
    assert later.notes == ()


def test_another_target_is_another_change() -> None:
    before = queue_turn(asking(objectives=PROMISE, tuning=AUTO), {"a": IN_TIME})
    after = queue_turn(asking(before, objectives={"ttft": {"target": "500ms"}}, tuning=AUTO), {"a": IN_TIME})
    assert after.patches["a"] == TOLD_IN_TIME | {"ttft_target": 0.5, "ttft_target_per_prompt_token": 0.0}
    assert [note.message for note in after.notes] == [
        "Queue order deadline, with other times: requests that can still have their first token within 500 ms go first."
    ]


def test_times_without_a_deadline_are_left_as_they_are() -> None:
    said = QueueSeen("priority", ALL, {"ttft_target": 9.0, "ttft_target_per_prompt_token": 0.0})
    found = queue_turn(asking(engine={"schedulingPolicy": "fcfs"}), {"a": said, "b": FIRST_COME})
    assert found.patches == {"a": {"scheduling_policy": "fcfs"}}


def test_where_nobody_asks_for_an_order_what_others_set_stays() -> None:
    assert queue_turn(asking(tuning=AUTO), {"a": IN_TIME}) == QueueTurn()


def test_an_older_engine_is_left_alone_and_named() -> None:
    found = queue_turn(asking(objectives=PROMISE, tuning=AUTO), {"a": OLDER, "b": FIRST_COME, "c": None})
    assert found.patches.keys() == {"b"}
    assert queue_status(found)["message"] == (
        "a does not know the queue order deadline: an older engine serves on as it began; set spec.runtime.image to a "
        "newer one"
    )


def test_where_all_engines_are_older_nothing_was_told() -> None:
    found = queue_turn(asking(objectives=PROMISE, tuning=AUTO), {"a": OLDER, "b": OLDER})
    assert (found.told, found.taken, found.patches, found.notes) == (None, None, {}, ())
    assert queue_status(found).keys() == {"message"}
    assert taken_order({"tuning": {"queueOrder": queue_status(found)}}) is None


def test_what_stands_in_the_status_is_what_engines_say_and_not_what_they_are_told() -> None:
    told = queue_turn(asking(objectives=PROMISE, tuning=AUTO), {"a": FIRST_COME, "b": FIRST_COME})
    assert (told.told, queue_status(told)) == (BY_PROMISE, {})
    some = queue_turn(asking(told, objectives=PROMISE, tuning=AUTO), {"a": IN_TIME, "b": FIRST_COME}, told.told)
    assert some.notes == ()
    assert queue_status(some) == {
        "policy": "deadline",
        "askedBy": "Objectives",
        "ttftTarget": "2s",
        "perPromptToken": "125us",
        "message": "b has not taken the queue order deadline yet",
    }
    every = queue_turn(asking(some, objectives=PROMISE, tuning=AUTO), {"a": IN_TIME, "b": IN_TIME}, some.told)
    assert "message" not in queue_status(every)


def test_the_status_says_no_order_that_an_older_image_does_not_know() -> None:
    before = queue_turn(asking(objectives=PROMISE, tuning=AUTO), {"a": IN_TIME})
    coming = queue_turn(asking(before, objectives=PROMISE, tuning=AUTO), {"a": None}, before.told)
    assert coming.taken == BY_PROMISE
    older = queue_turn(asking(coming, objectives=PROMISE, tuning=AUTO), {"a": OLDER}, coming.told)
    assert (older.told, older.taken) == (None, None)
    assert queue_status(older).keys() == {"message"}
    newer = queue_turn(asking(older, objectives=PROMISE, tuning=AUTO), {"a": FIRST_COME}, older.told)
    assert len(newer.notes) == 1


def test_a_promise_that_is_taken_back_takes_the_order_back_on_every_engine_that_is_heard_again() -> None:
    before = queue_turn(asking(objectives=PROMISE, tuning=AUTO), {"a": IN_TIME, "b": IN_TIME})
    back = queue_turn(asking(before, tuning=AUTO), {"a": IN_TIME, "b": None}, before.told)
    assert back.patches == {"a": {"scheduling_policy": "fcfs"}}
    assert [note.message for note in back.notes] == [
        "Queue order deadline -> fcfs: requests go in the order in which they came."
    ]
    waiting = queue_turn(asking(back, tuning=AUTO), {"a": FIRST_COME, "b": None}, back.told)
    assert (waiting.taken, waiting.patches) == (BY_PROMISE, {})
    assert queue_status(waiting)["message"] == "b has not taken the queue order fcfs yet"
    heard = queue_turn(asking(waiting, tuning=AUTO), {"a": FIRST_COME, "b": IN_TIME}, waiting.told)
    assert heard.patches == {"b": {"scheduling_policy": "fcfs"}}
    assert heard.notes == ()
    assert queue_turn(asking(heard, tuning=AUTO), {"a": FIRST_COME, "b": FIRST_COME}, heard.told) == QueueTurn()


def test_an_order_that_was_told_and_not_confirmed_is_taken_back_too() -> None:
    told = queue_turn(asking(objectives=PROMISE, tuning=AUTO), {"a": FIRST_COME})
    back = queue_turn(asking(told, tuning=AUTO), {"a": IN_TIME}, told.told)
    assert back.patches == {"a": {"scheduling_policy": "fcfs"}}


@pytest.mark.parametrize("silent", [False, True])
def test_an_order_that_was_told_after_another_was_taken_is_taken_back_with_it(silent: bool) -> None:
    """The last look before the edit still saw the order before: an engine may have either."""
    by_priority = QueueSeen("priority", ALL, TIMES)
    first = queue_turn(asking(engine={"schedulingPolicy": "priority"}), {"a": by_priority, "b": by_priority})
    told = queue_turn(asking(first, objectives=PROMISE, tuning=AUTO), {"a": by_priority, "b": by_priority}, first.told)
    assert told.patches.keys() == {"a", "b"}
    back = queue_turn(asking(told, tuning=AUTO), {"a": IN_TIME, "b": None if silent else by_priority}, told.told)
    assert back.patches.keys() == ({"a"} if silent else {"a", "b"})
    heard = queue_turn(asking(back, tuning=AUTO), {"a": IN_TIME, "b": by_priority}, back.told)  # none came through
    assert heard.patches == {name: {"scheduling_policy": "fcfs"} for name in ("a", "b")}
    assert queue_turn(asking(heard, tuning=AUTO), {"a": FIRST_COME, "b": FIRST_COME}, heard.told) == QueueTurn()


def test_what_somebody_sets_by_hand_while_another_engine_is_not_heard_stays() -> None:
    before = queue_turn(asking(objectives=PROMISE, tuning=AUTO), {"a": IN_TIME, "b": IN_TIME})
    back = queue_turn(asking(before, tuning=AUTO), {"a": IN_TIME, "b": None}, before.told)
    by_hand = QueueSeen("priority", ALL, TIMES)
    for told in (back.told, None):  # by this operator, and by the next one
        after = queue_turn(asking(back, tuning=AUTO), {"a": by_hand, "b": None}, told)
        assert after.patches == {}
        heard = queue_turn(asking(after, tuning=AUTO), {"a": by_hand, "b": IN_TIME}, after.told)
        assert heard.patches.keys() == {"b"}
        assert queue_turn(asking(heard, tuning=AUTO), {"a": by_hand, "b": FIRST_COME}, heard.told) == QueueTurn()


def test_predictions_go_by_the_order_that_most_engines_have() -> None:
    asked = asked_order(a_deployment(objectives=PROMISE, tuning=AUTO).spec)
    assert serves_by_deadline({"a": None}, asked)
    assert not serves_by_deadline({"a": None}, None)
    assert not serves_by_deadline({"a": OLDER, "b": IN_TIME}, asked)
    assert serves_by_deadline({"a": OLDER, "b": IN_TIME, "c": IN_TIME, "d": None}, None)


@pytest.mark.parametrize("mode", ["Off", "Recommend"])
def test_where_nothing_is_tuned_any_more_the_order_of_a_promise_stays(mode: str) -> None:
    before = queue_turn(asking(objectives=PROMISE, tuning=AUTO), {"a": IN_TIME})
    after = queue_turn(asking(before, objectives=PROMISE, tuning={"mode": mode}), {"a": IN_TIME})
    assert after == QueueTurn(BY_PROMISE, BY_PROMISE)
    again = queue_turn(asking(after, tuning=AUTO), {"a": IN_TIME})
    assert again.patches == {"a": {"scheduling_policy": "fcfs"}}


@pytest.mark.parametrize("mode", ["Off", "Recommend", "Auto"])
def test_an_order_that_was_written_and_is_removed_is_taken_back_in_every_mode(mode: str) -> None:
    tuning = {"mode": mode}
    before = queue_turn(asking(engine={"schedulingPolicy": "priority"}, tuning=tuning), {"a": FIRST_COME})
    assert before.patches == {"a": {"scheduling_policy": "priority"}}
    after = queue_turn(asking(before, tuning=tuning), {"a": QueueSeen("priority", ALL, TIMES)}, before.told)
    assert after.patches == {"a": {"scheduling_policy": "fcfs"}}


@pytest.mark.parametrize(
    "order",
    [
        None,
        {},
        "deadline",
        {"policy": "deadline"},
        {"policy": "lifo", "askedBy": "Spec"},
        {"policy": "fcfs", "askedBy": "Spec", "ttftTarget": 3},
    ],
)
def test_a_status_that_says_no_order_is_nothing_taken(order: Any) -> None:
    assert taken_order({"tuning": {"queueOrder": order}}) is None
    assert taken_order({}) is None


@pytest.mark.parametrize("seconds", [2.0, 0.5, 0.000125, 90.0, 0.001, 1.5])
def test_what_was_taken_is_read_back_from_the_status(seconds: float) -> None:
    told = QueueOrder(QueuePolicy.DEADLINE, AskedBy.SPEC, seconds, 0.000125)
    assert taken_order({"tuning": {"queueOrder": queue_status(QueueTurn(taken=told))}}) == told


def test_times_stand_as_a_spec_has_them() -> None:
    assert [duration(seconds) for seconds in (2.0, 90.0, 0.5, 0.000125)] == ["2s", "90s", "500ms", "125us"]
    assert meaning_of(QueueOrder(QueuePolicy.PRIORITY, AskedBy.SPEC)).startswith("requests with the lowest number")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objectives", [None, {"itl": {"target": "50ms"}}])
def test_a_deadline_needs_a_promise_of_the_first_token(objectives: dict[str, Any] | None) -> None:
    (refusal,) = refusals(a_deployment(engine={"schedulingPolicy": "deadline"}, objectives=objectives))
    assert refusal.field == "spec.engine.schedulingPolicy"
    assert "set spec.objectives.ttft.target" in str(refusal)
    assert not refusals(a_deployment(engine={"schedulingPolicy": "deadline"}, objectives=PROMISE))


def test_an_order_is_said_once() -> None:
    runtime = {"device": "cpu", "image": "engine:1", "args": ["--max-num-queued-reqs=9", "--scheduling-policy=fcfs"]}
    (refusal,) = refusals(a_deployment(runtime=runtime, engine={"schedulingPolicy": "priority"}))
    assert refusal.field == "spec.runtime.args[1]"
    assert not refusals(a_deployment(runtime=runtime))


# --- in a cluster -----------------------------------------------------------------------------------------------------


def a_cluster(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(**{"replicas": 2, "objectives": PROMISE, "tuning": AUTO, **spec})
    cluster.settle()
    return cluster


def orders(cluster: FakeCluster) -> list[str]:
    leaders = [pod["metadata"]["uid"] for _, pod in sorted(cluster.pods.items())]
    return [cluster.engines[uid].policy for uid in leaders]


def test_engines_with_a_promise_serve_by_their_deadlines_and_it_is_seen() -> None:
    cluster = a_cluster()
    assert orders(cluster) == ["deadline", "deadline"]
    assert cluster.engine(0).times == {"ttft_target": 2.0, "ttft_target_per_prompt_token": 0.000125}
    assert cluster.events.count("QueueOrderChanged") == 1
    assert cluster.status["tuning"]["queueOrder"] == {
        "policy": "deadline",
        "askedBy": "Objectives",
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
def test_no_edit_of_the_order_or_the_promise_changes_a_pod(change: dict[str, Any]) -> None:
    cluster = a_cluster()
    pods, sets = copy.deepcopy(cluster.pods), {key: copy.deepcopy(found) for key, found in cluster.objects.items()
                                               if key[0] == "StatefulSet"}  # fmt: skip
    cluster.edit(**change)
    cluster.settle()
    assert cluster.pods == pods
    assert {key: found for key, found in cluster.objects.items() if key[0] == "StatefulSet"} == sets
    asked = asked_order(cluster.deployment.spec)
    assert orders(cluster) == [QueuePolicy.FCFS if asked is None else asked.policy] * 2
    assert ("queueOrder" in cluster.status["tuning"]) == (asked is not None)


def test_an_order_beside_other_fields_of_the_engine_asks_pods_for_nothing_either() -> None:
    cluster = a_cluster(engine={"maxNumSeqs": 16})
    before = cluster.revisions
    cluster.edit(engine={"maxNumSeqs": 16, "schedulingPolicy": "fcfs"})
    cluster.settle()
    assert cluster.revisions == before
    assert orders(cluster) == ["fcfs", "fcfs"]


def test_an_operator_that_learns_of_deadlines_tells_engines_that_run_and_rolls_none() -> None:
    cluster = a_cluster()
    for engine in cluster.engines.values():  # as the operator before left them
        engine.policy, engine.generation = "fcfs", 1
    cluster.status["tuning"].pop("queueOrder")
    pods = copy.deepcopy(cluster.pods)
    cluster.restart_operator()
    cluster.settle()
    assert cluster.pods == pods
    assert orders(cluster) == ["deadline", "deadline"]


def test_an_engine_that_began_anew_is_told_again_and_nothing_is_announced() -> None:
    cluster = a_cluster()
    uid = cluster.pods["m-g1-0"]["metadata"]["uid"]
    cluster.engines[uid] = FakeEngine()
    announced = cluster.events.count("QueueOrderChanged")
    cluster.settle()
    assert orders(cluster) == ["deadline", "deadline"]
    assert cluster.events.count("QueueOrderChanged") == announced


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


def test_a_tuned_value_comes_before_the_order_and_the_order_after_it() -> None:
    cluster = FakeCluster(objectives=PROMISE, tuning=AUTO)
    kept = remembered_text(TunerMemory(applied={Knob.MAX_NUM_SEQS: 16}), key=TOKEN)
    cluster.objects["ConfigMap", "m-tuning"] = tuning_config_map(cluster.deployment, kept)
    cluster.objects["ConfigMap", "m-tuning"]["metadata"] |= {"uid": "o-0", "creationTimestamp": "2026-01-01T12:00:00Z"}
    told = [dict(order.fields) for _ in range(6) for order in cluster.tick().patches]
    assert told == [{"max_num_seqs": 16}, TOLD_IN_TIME]


def test_an_engine_that_refuses_a_tuned_value_gets_the_order_all_the_same() -> None:
    cluster = FakeCluster(objectives=PROMISE, tuning=AUTO)
    kept = remembered_text(TunerMemory(applied={Knob.MAX_NUM_SEQS: 16}), key=TOKEN)
    cluster.objects["ConfigMap", "m-tuning"] = tuning_config_map(cluster.deployment, kept)
    cluster.objects["ConfigMap", "m-tuning"]["metadata"] |= {"uid": "o-0", "creationTimestamp": "2026-01-01T12:00:00Z"}
    for _ in range(6):
        cluster.tick()
        for engine in cluster.engines.values():
            engine.refuses = frozenset({"max_num_seqs"})
    assert orders(cluster) == ["deadline"]
    assert cluster.status["tuning"]["queueOrder"]["policy"] == "deadline"


def test_predictions_go_by_what_engines_say_that_they_serve_by() -> None:
    def predicts_by_deadline(cluster: FakeCluster) -> bool:
        tuned = cluster.decide().findings.tuning
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
    assert cluster.status["tuning"]["queueOrder"].keys() == {"message"}


def test_while_it_is_paused_engines_keep_their_order() -> None:
    cluster = a_cluster()
    assert cluster.body is not None
    cluster.body["metadata"]["annotations"] = {PAUSED: "true"}
    cluster.edit(objectives=None)
    cluster.settle()
    assert orders(cluster) == ["deadline", "deadline"]
    cluster.body["metadata"]["annotations"] = {}
    cluster.settle()
    assert orders(cluster) == ["fcfs", "fcfs"]
    assert "queueOrder" not in cluster.status["tuning"]


def test_replicas_of_an_older_image_serve_on_and_a_newer_image_is_told() -> None:
    cluster = FakeCluster(replicas=1, objectives=PROMISE, tuning=AUTO)
    cluster.older_images.add("engine:1")
    cluster.settle()
    assert orders(cluster) == ["fcfs"]
    assert "QueueOrderChanged" not in cluster.events
    assert cluster.status["tuning"]["queueOrder"]["message"].startswith("m-g0 does not know the queue order deadline")
    cluster.edit(runtime={"device": "cpu", "image": "engine:2"})
    cluster.settle()
    assert orders(cluster) == ["deadline"]
    assert "message" not in cluster.status["tuning"]["queueOrder"]
    assert cluster.events.count("QueueOrderChanged") == 1


@pytest.mark.parametrize("mode", ["Off", "Recommend"])
def test_where_nothing_is_tuned_a_promise_changes_no_order_and_a_written_one_does(mode: str) -> None:
    cluster = a_cluster(tuning={"mode": mode})
    assert orders(cluster) == ["fcfs", "fcfs"]
    cluster.edit(engine={"schedulingPolicy": "deadline"})
    cluster.settle()
    assert orders(cluster) == ["deadline", "deadline"]
