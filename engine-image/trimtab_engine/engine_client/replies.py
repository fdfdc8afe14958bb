"""Merging of the engine cores' replies to one admin call. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from trimtab_engine.messages.admin import (
    AdminReply,
    Call,
    DrainCore,
    EngineState,
    GetLayout,
    GetLifecycle,
    GetMemory,
    GetRequests,
    Pause,
    Resume,
    Sleep,
    WakeUp,
)


def merge_replies(call: Call, replies: list[AdminReply]) -> AdminReply:
    """Return the engine's reply as a whole. A rejection by one core is the reply."""
    first = replies[0]
    refused = next((reply for reply in replies if reply.status != 200), None)
    if len(replies) == 1 or refused is not None:
        return refused or first
    bodies = [reply.body for reply in replies]
    body = dict(first.body)
    match call:
        case GetLayout():
            body = _merge_layouts(bodies)
        case DrainCore():
            for name in body.keys() - {"eta_seconds", "deadline_seconds"}:
                body[name] = sum(each[name] for each in bodies)
            body["eta_seconds"] = max(each["eta_seconds"] for each in bodies)
        case Pause() | Resume() | Sleep() | WakeUp() | GetLifecycle():
            body["remaining_requests"] = sum(each["remaining_requests"] for each in bodies)
            for name in ("is_paused", "is_sleeping"):
                body[name] = all(each[name] for each in bodies)
        case GetRequests():
            body["unfinished"] = [row for each in bodies for row in each["unfinished"]]
        case GetMemory():
            body |= _merge_ledgers(bodies)
    return AdminReply(first.call_id, first.status, body)


def _merge_layouts(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge layouts. Ranks of independent cores are numbered consecutively by core; those of one world already are."""
    rows: list[dict[str, Any]] = []
    for index, body in enumerate(bodies):
        own = body["ranks"]
        offset = 0 if len({row["data"] for each in bodies for row in each["ranks"]}) > 1 else index * len(own)
        rows += [{**row, "rank": row["rank"] + offset, "data": index} for row in own]
    rows.sort(key=lambda row: row["rank"])
    return {**bodies[0], "world_size": len(rows), "ranks": rows}


def _merge_ledgers(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge ledgers. Each core has its own device or share of one. Ranks are numbered as in a layout of independent
    cores.
    """
    rows: list[dict[str, Any]] = []
    for body in bodies:
        own = body.get("ranks", [])
        offset = len(rows) if {row["rank"] for row in own} & {row["rank"] for row in rows} else 0
        rows += [{**row, "rank": row["rank"] + offset} for row in own]
    totals = [body["total"] for body in bodies if "total" in body]
    total: dict[str, Any] = {"kinds": {}}
    for each in totals:
        for name in ("ranks", "device_bytes", "driver_used_bytes"):
            total[name] = total.get(name, 0) + each[name]
        for kind, size in each["kinds"].items():
            total["kinds"][kind] = total["kinds"].get(kind, 0) + size
    return {"data_parallel": bodies, "total": total, "ranks": sorted(rows, key=lambda row: row["rank"])}


def merge_states(states: Sequence[EngineState]) -> EngineState:
    """Merge the states of all cores: counts and sequence slots are summed, the oldest inbox time counts, adapters are
    those of all cores, and the configuration is equal in all.
    """
    return msgspec.structs.replace(
        states[0],
        time=min(state.time for state in states),
        num_running=sum(state.num_running for state in states),
        num_waiting=sum(state.num_waiting for state in states),
        num_waiting_late=sum(state.num_waiting_late for state in states),
        max_num_seqs=sum(state.max_num_seqs for state in states),
        adapters=tuple(card for card in states[0].adapters if all(card in state.adapters for state in states)),
    )
