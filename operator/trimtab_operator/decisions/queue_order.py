"""The order of the engines' queue: what the owner asks for, and what brings each engine to it. Pure.

It is told to engines while they serve and never rendered, so that no edit of it, nor of the promises, restarts one
(docs/decisions/queue-order-is-told.md). What they were told last stands in `status.tuning.queueOrder`: by that it is
known that there is something to take back once nobody asks for it any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from trimtab_operator.decisions.actions import LiveValues, Note
from trimtab_operator.decisions.promises import objectives_of
from trimtab_operator.observed.engines import QueueSeen
from trimtab_operator.resource.quantity import parse_seconds
from trimtab_operator.resource.spec import InferenceDeployment, Spec
from trimtab_operator.tuner.objectives import Ttft

FLAGS = ("--scheduling-policy", "--ttft-target", "--ttft-target-per-prompt-token")
"""An owner who starts engines with one of these says himself what their queue is."""
POLICY = "scheduling_policy"
TARGET = "ttft_target"
PER_PROMPT_TOKEN = "ttft_target_per_prompt_token"  # noqa: S105 - the name of a live field
MAX_TARGET_SECONDS = 86_400.0  # docs/live-configuration.md: engines refuse more, and nobody waits as long
SAME_TIME = 1e-6  # relative: closer ones are one time written twice
IN_THE_ORDER_THEY_CAME = "requests go in the order in which they came"


class QueuePolicy(StrEnum):
    """A value of the engine's `scheduling_policy`."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    DEADLINE = "deadline"


class AskedBy(StrEnum):
    """Which part of the spec an order comes from."""

    SPEC = "Spec"  # spec.engine.schedulingPolicy
    OBJECTIVES = "Objectives"  # spec.objectives.ttft, where that is left out and tuning is Auto


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """An order, with the times by which `deadline` tells who is late (seconds)."""

    policy: QueuePolicy
    asked_by: AskedBy
    ttft_target: float = 0.0
    ttft_target_per_prompt_token: float = 0.0

    @property
    def values(self) -> LiveValues:
        """As live fields of the engine. Without `deadline` the times have no effect, and stay as they are."""
        if self.policy is not QueuePolicy.DEADLINE:
            return {POLICY: self.policy.value}
        return {
            POLICY: self.policy.value,
            TARGET: self.ttft_target,
            PER_PROMPT_TOKEN: self.ttft_target_per_prompt_token,
        }


@dataclass(frozen=True, slots=True)
class QueueTurn:
    """What one turn makes of the queues. `told`: what engines have been told when it is done; None: nothing that would
    have to be taken back. `patches` by replica. `strangers`: replicas whose engine does not know what is asked for."""

    told: QueueOrder | None = None
    patches: Mapping[str, LiveValues] = field(default_factory=dict)
    strangers: tuple[str, ...] = ()
    asked: QueueOrder | None = None
    notes: tuple[Note, ...] = ()


def queue_turn(deployment: InferenceDeployment, seen: Mapping[str, QueueSeen | None]) -> QueueTurn:
    """Bring every engine that answers to the order that is asked for. `seen`: what the engine of each replica says of
    its queue; None where it does not answer: it is told when it does."""
    told = told_order(deployment.status)
    asked = asked_order(deployment.spec)
    if asked is None:
        if told is None or _is_forgotten(deployment.spec, told, seen):
            return QueueTurn()
        if _is_kept(deployment.spec, told):
            return QueueTurn(told)
        asked = QueueOrder(QueuePolicy.FCFS, told.asked_by)
    heard = {name: said for name, said in sorted(seen.items()) if said is not None}
    knowing = {name: said for name, said in heard.items() if _knows(said, asked)}
    patches = {name: asked.values for name, said in knowing.items() if not _runs(said, asked)}
    is_every_engines = asked.policy is QueuePolicy.FCFS
    strangers = () if is_every_engines else tuple(name for name in heard if name not in knowing)
    if not knowing:
        return QueueTurn(told, strangers=strangers, asked=asked)
    is_news = bool(patches) and (told is None or not _is_same(told, asked))
    notes = tuple(_news(deployment, heard[min(patches)], asked)) if is_news else ()
    return QueueTurn(asked, patches, strangers, asked, notes)


def asked_order(spec: Spec) -> QueueOrder | None:
    """What the spec asks for; None: nothing, and engines have the order that they started with."""
    ttft = objectives_of(spec.objectives).ttft
    written = spec.engine.scheduling_policy
    if written is None:
        if ttft is None or spec.tuning.mode != "Auto" or any(queue_flags(spec)):
            return None
        return _by_deadline(ttft, AskedBy.OBJECTIVES)
    if written != "deadline":
        return QueueOrder(QueuePolicy(written), AskedBy.SPEC)
    return None if ttft is None else _by_deadline(ttft, AskedBy.SPEC)  # without: refused by decisions/validation.py


def _by_deadline(ttft: Ttft, asked_by: AskedBy) -> QueueOrder:
    target = min(ttft.seconds, MAX_TARGET_SECONDS)
    return QueueOrder(QueuePolicy.DEADLINE, asked_by, target, ttft.seconds_per_prompt_token)


def queue_flags(spec: Spec) -> Iterator[tuple[int, str]]:
    """The flags of `spec.runtime.args` that say what the queue's order is when engines start, by their place there."""
    for index, argument in enumerate(spec.runtime.args):
        flag = argument.split("=", 1)[0].replace("_", "-")
        if flag in FLAGS:
            yield index, flag


def _is_forgotten(spec: Spec, told: QueueOrder, seen: Mapping[str, QueueSeen | None]) -> bool:
    """Whether nothing is left to take back: every engine has been heard to be back, or will start with another order
    anyway."""
    if any(queue_flags(spec)):
        return True
    is_back = all(said is not None and said.policy in (None, QueuePolicy.FCFS) for said in seen.values())
    return is_back and told.policy is QueuePolicy.FCFS


def _is_kept(spec: Spec, told: QueueOrder) -> bool:
    """Whether an order that the promises brought stays as it is, because nothing is tuned any more."""
    return told.asked_by is AskedBy.OBJECTIVES and spec.tuning.mode != "Auto"


# --- one engine -------------------------------------------------------------------------------------------------------


def _knows(said: QueueSeen, asked: QueueOrder) -> bool:
    """Whether the engine's configuration lists the order, and all that it goes by."""
    return asked.policy in said.policies and all(name in said.times for name in asked.values if name != POLICY)


def _runs(said: QueueSeen, asked: QueueOrder) -> bool:
    times = ((value, said.times[name]) for name, value in asked.values.items() if name != POLICY)
    return said.policy == asked.policy and all(_is_same_time(float(wanted), now) for wanted, now in times)


def _is_same(one: QueueOrder, other: QueueOrder) -> bool:
    """Whether engines are told the same by both."""
    return (
        one.policy is other.policy
        and _is_same_time(one.ttft_target, other.ttft_target)
        and _is_same_time(one.ttft_target_per_prompt_token, other.ttft_target_per_prompt_token)
    )


def _is_same_time(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SAME_TIME, abs_tol=SAME_TIME * SAME_TIME)


# --- words ------------------------------------------------------------------------------------------------------------


def _news(deployment: InferenceDeployment, before: QueueSeen, asked: QueueOrder) -> Iterator[Note]:
    is_same_policy = before.policy == asked.policy
    moved = f"{asked.policy}, with other times" if is_same_policy else f"{before.policy} -> {asked.policy}"
    message = f"Queue order {moved}: {meaning_of(asked)}."
    yield Note("Normal", "QueueOrderChanged", message, str(deployment.generation))


def meaning_of(order: QueueOrder) -> str:
    """Who goes first, as a clause."""
    if order.policy is QueuePolicy.FCFS:
        return IN_THE_ORDER_THEY_CAME
    if order.policy is QueuePolicy.PRIORITY:
        return "requests with the lowest number as their priority go first"
    more = order.ttft_target_per_prompt_token
    allowance = f" (+{_spaced(more)} per prompt token)" if more else ""
    return f"requests that can still have their first token within {_spaced(order.ttft_target)}{allowance} go first"


def strangers_words(found: QueueTurn) -> str | None:
    """Who does not follow what is asked for, and why; None: nobody."""
    if not found.strangers or found.asked is None:
        return None
    verb = "does" if len(found.strangers) == 1 else "do"
    return (
        f"{', '.join(found.strangers)} {verb} not know the queue order {found.asked.policy}: an older engine serves on "
        "as it began; set spec.runtime.image to a newer one"
    )


def duration(seconds: float) -> str:
    """2.0 → `2s`, 0.5 → `500ms`, 0.000125 → `125us`: as a spec has it."""
    microseconds = round(seconds * 1e6)
    for unit, size in (("s", 1_000_000), ("ms", 1000)):
        if microseconds % size == 0:
            return f"{microseconds // size}{unit}"
    return f"{microseconds}us"


def _spaced(seconds: float) -> str:
    text = duration(seconds)
    digits = text.rstrip("mus")
    return f"{digits} {text.removeprefix(digits)}"


# --- what was told, in status -----------------------------------------------------------------------------------------


def queue_status(found: QueueTurn) -> dict[str, str]:
    """`status.tuning.queueOrder`: what engines were told last, and who does not follow; empty where there is nothing to
    say."""
    entry: dict[str, str] = {}
    if found.told is not None:
        entry |= {"policy": found.told.policy.value, "askedBy": found.told.asked_by.value}
        if found.told.policy is QueuePolicy.DEADLINE:
            entry["ttftTarget"] = duration(found.told.ttft_target)
            if found.told.ttft_target_per_prompt_token:
                entry["perPromptToken"] = duration(found.told.ttft_target_per_prompt_token)
    words = strangers_words(found)
    return entry if words is None else {**entry, "message": words}


def told_order(status: Mapping[str, Any]) -> QueueOrder | None:
    """What `queue_status` wrote; None where nothing was told, or it cannot be read."""
    entry = (status.get("tuning") or {}).get("queueOrder") or {}
    try:
        return QueueOrder(
            QueuePolicy(entry["policy"]),
            AskedBy(entry["askedBy"]),
            parse_seconds(entry.get("ttftTarget", "0s")),
            parse_seconds(entry.get("perPromptToken", "0s")),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
