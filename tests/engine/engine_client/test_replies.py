"""Merging of several cores' replies."""

from typing import Any

from trimtab_engine.engine_client.replies import merge_replies, merge_states
from trimtab_engine.messages.admin import (
    AdminReply,
    DrainCore,
    EngineState,
    GetLayout,
    GetMemory,
    GetRequests,
    PatchConfig,
    Sleep,
)


def replies(*bodies: dict[str, Any], status: int = 200) -> list[AdminReply]:
    return [AdminReply(f"c{index}", status, body) for index, body in enumerate(bodies)]


def a_layout(*ranks: int, data: int = 0) -> dict[str, Any]:
    return {"world_size": len(ranks), "ranks": [{"rank": rank, "data": data, "pid": 10 + rank} for rank in ranks]}


def test_single_reply_is_unchanged() -> None:
    assert merge_replies(GetLayout(), replies(a_layout(0, 1))).body == a_layout(0, 1)


def test_independent_layouts_are_numbered_consecutively() -> None:
    body = merge_replies(GetLayout(), replies(a_layout(0, 1), a_layout(0, 1))).body
    assert body["world_size"] == 4
    assert [(row["rank"], row["data"]) for row in body["ranks"]] == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_layouts_of_one_world_keep_their_ranks() -> None:
    body = merge_replies(GetLayout(), replies(a_layout(0, 1), a_layout(2, 3, data=1))).body
    assert [(row["rank"], row["data"]) for row in body["ranks"]] == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_drain_replies_sum_work_and_take_longest_eta() -> None:
    one = {"remaining_requests": 1, "remaining_tokens": 10, "eta_seconds": 2.0}
    two = {"remaining_requests": 2, "remaining_tokens": 5, "eta_seconds": 1.0}
    merged = merge_replies(DrainCore(1.0), replies(one, two)).body
    assert merged == {"remaining_requests": 3, "remaining_tokens": 15, "eta_seconds": 2.0}


def test_unfinished_requests_of_all_cores_are_merged() -> None:
    body = merge_replies(
        GetRequests(), replies({"unfinished": [[1.0, 5, 0, 2]]}, {"unfinished": [[2.0, 6, 0, 3]]})
    ).body
    assert body == {"unfinished": [[1.0, 5, 0, 2], [2.0, 6, 0, 3]]}


def test_each_cores_ledger_is_shown() -> None:
    one, two = (
        {
            "device_bytes": size,
            "total": {
                "ranks": 2,
                "device_bytes": 2 * size,
                "driver_used_bytes": 1,
                "kinds": {"weights": 3, "free": size},
            },
            "ranks": [{"rank": 0, "device_bytes": size}, {"rank": 1, "device_bytes": size}],
        }
        for size in (5, 7)
    )
    merged = merge_replies(GetMemory(), replies(one, two)).body
    assert (merged["device_bytes"], merged["data_parallel"]) == (5, [one, two])
    kinds = {"weights": 6, "free": 12}
    assert merged["total"] == {"ranks": 4, "device_bytes": 24, "driver_used_bytes": 2, "kinds": kinds}
    assert [(row["rank"], row["device_bytes"]) for row in merged["ranks"]] == [(0, 5), (1, 5), (2, 7), (3, 7)]


def test_a_core_that_refuses_speaks_for_all() -> None:
    both = [AdminReply("a", 200, {}), AdminReply("b", 422, {"field": "x"})]
    assert merge_replies(PatchConfig({}), both) is both[1]


def test_the_states_of_several_cores_add_up() -> None:
    first = EngineState(time=3.0, num_running=2, num_waiting=1, max_num_seqs=4, max_num_queued_reqs=9)
    second = EngineState(
        time=2.0, num_running=4, num_waiting=3, num_waiting_late=2, max_num_seqs=4, max_num_queued_reqs=9
    )
    merged = merge_states([first, second])
    assert (merged.num_running, merged.num_waiting, merged.num_waiting_late, merged.max_num_seqs) == (6, 4, 2, 8)
    assert (merged.time, merged.max_num_queued_reqs) == (2.0, 9)


def test_several_cores_sleep_when_all_do() -> None:
    awake = {"is_paused": True, "is_sleeping": False, "sleep_level": None, "remaining_requests": 2}
    asleep = {"is_paused": True, "is_sleeping": True, "sleep_level": 1, "remaining_requests": 3}
    body = merge_replies(Sleep(1, "keep"), replies(asleep, awake)).body
    assert (body["is_paused"], body["is_sleeping"], body["remaining_requests"]) == (True, False, 5)
