"""The order of the engines' queue: what the owner asks for, and what brings each engine to it. Pure.

It is told to engines while they serve and never rendered, so that no edit of it, nor of the promises, restarts one
(ADR-0055). What they say that they serve by stands in `status.tuning.queueOrder`: by that
it is known that there is something to take back once nobody asks for it any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from trimtab_operator.observed.actions import LiveValues, Note
from trimtab_operator.observed.engines import QueueSeen
from trimtab_operator.planning.objectives import objectives_of
from trimtab_operator.resource.quantity import parse_seconds
from trimtab_operator.resource.spec import InferenceDeployment, Spec
from trimtab_operator.tuner.objectives import Ttft
from trimtab_operator.validation.queue_flags import queue_flags

POLICY = "scheduling_policy"
TARGET = "ttft_target"
PER_PROMPT_TOKEN = "ttft_target_per_prompt_token"  # noqa: S105 - the name of a live field
MAX_TARGET_SECONDS = 86_400.0  # docs/concepts/live-configuration.md: engines refuse more, and nobody waits as long
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
    """What one turn makes of the queues. `patches` by replica.

    `told`: what engines have been told when it is done; None: nothing that would have to be taken back, and what they
    are told next is news. `taken`: what they say that they serve by, or said when they were heard last; it stands in
    the status. `strangers`: replicas whose engine does not know what is asked for; `behind`: those that have not taken
    it, though it was told.
    """

    told: QueueOrder | None = None
    taken: QueueOrder | None = None
    patches: Mapping[str, LiveValues] = field(default_factory=dict)
    strangers: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    asked: QueueOrder | None = None
    notes: tuple[Note, ...] = ()


def queue_turn(
    deployment: InferenceDeployment, seen: Mapping[str, QueueSeen | None], told: QueueOrder | None = None
) -> QueueTurn:
    """Bring every engine that answers to the order that is asked for. `seen`: what the engine of each replica says of
    its queue; None where it does not answer: it is told when it does. `told`: what this loop told them last."""
    taken = taken_order(deployment.status)
    told = told or taken
    asked = asked_order(deployment.spec)
    if asked is None:
        return _back(deployment, seen, taken, told)
    heard = {name: said for name, said in sorted(seen.items()) if said is not None}
    knowing = {name: said for name, said in heard.items() if _knows(said, asked)}
    patches = {name: asked.values for name, said in knowing.items() if not _runs(said, asked)}
    is_every_engines = asked.policy is QueuePolicy.FCFS
    is_told = told is not None and _is_same(told, asked)
    return QueueTurn(
        told=asked if knowing else _still(told, seen),
        taken=asked if len(patches) < len(knowing) else _still(taken, seen),
        patches=patches,
        strangers=() if is_every_engines else tuple(name for name in heard if name not in knowing),
        behind=tuple(patches) if is_told else (),
        asked=asked,
        notes=() if is_told or not patches else tuple(_news(deployment, heard[min(patches)], asked)),
    )


def _back(
    deployment: InferenceDeployment,
    seen: Mapping[str, QueueSeen | None],
    taken: QueueOrder | None,
    told: QueueOrder | None,
) -> QueueTurn:
    """Take an order back that nobody asks for any more: what engines took, and what they were told since and may have
    taken by now. An engine that has another one is left alone: somebody set it by hand."""
    orders = tuple(_still_there((told, taken), seen))
    if not orders or any(queue_flags(deployment.spec)):
        return QueueTurn()
    heard = {name: said for name, said in sorted(seen.items()) if said is not None}
    runs = next((order for order in orders if any(_may_run(said, order) for said in heard.values())), orders[-1])
    is_tuned = deployment.spec.tuning.mode == "Auto"
    ending = tuple(order for order in orders if is_tuned or order.asked_by is not AskedBy.OBJECTIVES)
    if not ending:
        return QueueTurn(orders[0], runs)  # as nothing is tuned any more, it stays as it is
    asked = QueueOrder(QueuePolicy.FCFS, ending[0].asked_by)
    patches = {name: asked.values for name, said in heard.items() if any(_may_run(said, order) for order in ending)}
    is_news = bool(patches) and (told is None or told.policy is not QueuePolicy.FCFS)
    notes = tuple(_news(deployment, heard[min(patches)], asked)) if is_news else ()
    behind = tuple(name for name in sorted(seen) if name in patches or name not in heard)
    other = next((order for order in orders if order is not runs), asked)  # the status has room for one
    return QueueTurn(other, runs, patches, behind=behind, asked=asked, notes=notes)


def _still_there(orders: Iterable[QueueOrder | None], seen: Mapping[str, QueueSeen | None]) -> Iterator[QueueOrder]:
    """Those of the orders, one for each policy, by which an engine serves, or may, and that are not its own."""
    policies = {QueuePolicy.FCFS}
    for order in orders:
        if order is not None and order.policy not in policies and _still(order, seen) is not None:
            policies.add(order.policy)
            yield order


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
    return None if ttft is None else _by_deadline(ttft, AskedBy.SPEC)  # without: refused by validation/rules.py


def _by_deadline(ttft: Ttft, asked_by: AskedBy) -> QueueOrder:
    target = min(ttft.seconds, MAX_TARGET_SECONDS)
    return QueueOrder(QueuePolicy.DEADLINE, asked_by, target, ttft.seconds_per_prompt_token)


def serves_by_deadline(seen: Mapping[str, QueueSeen | None], asked: QueueOrder | None) -> bool:
    """Whether most engines say that they serve by deadlines; as long as nobody is heard, whether they are to."""
    heard = [said.policy for said in seen.values() if said is not None]
    if not heard:
        return asked is not None and asked.policy is QueuePolicy.DEADLINE
    return 2 * heard.count(QueuePolicy.DEADLINE) > len(heard)


# --- one engine -------------------------------------------------------------------------------------------------------


def _knows(said: QueueSeen, asked: QueueOrder) -> bool:
    """Whether the engine's configuration lists the order, and all that it goes by."""
    return asked.policy in said.policies and all(name in said.times for name in asked.values if name != POLICY)


def _runs(said: QueueSeen, asked: QueueOrder) -> bool:
    times = ((value, said.times[name]) for name, value in asked.values.items() if name != POLICY)
    return said.policy == asked.policy and all(_is_same_time(float(wanted), now) for wanted, now in times)


def _still(order: QueueOrder | None, seen: Mapping[str, QueueSeen | None]) -> QueueOrder | None:
    """The order, as long as an engine serves by it, or may, as it is not heard."""
    return order if order is not None and any(s is None or _may_run(s, order) for s in seen.values()) else None


def _may_run(said: QueueSeen, order: QueueOrder) -> bool:
    """Whether an engine has an order, with whatever times: it may have been told of it before they were edited."""
    return said.policy == order.policy


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


def exceptions_words(found: QueueTurn) -> str | None:
    """Who does not follow what is asked for, and why; None: nobody."""
    if found.asked is None:
        return None
    policy, said = found.asked.policy, []
    if found.strangers:
        verb = "does" if len(found.strangers) == 1 else "do"
        said.append(
            f"{', '.join(found.strangers)} {verb} not know the queue order {policy}: an older engine serves on as it "
            "began; set spec.runtime.image to a newer one"
        )
    if found.behind:
        verb = "has" if len(found.behind) == 1 else "have"
        said.append(f"{', '.join(found.behind)} {verb} not taken the queue order {policy} yet")
    return "; ".join(said) or None


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


# --- what was taken, in status ----------------------------------------------------------------------------------------


def queue_status(found: QueueTurn) -> dict[str, str]:
    """`status.tuning.queueOrder`: what engines serve by, and who does not follow; empty: there is nothing to say."""
    entry: dict[str, str] = {}
    taken = found.taken
    if taken is not None:
        entry |= {"policy": taken.policy.value, "askedBy": taken.asked_by.value}
        if taken.policy is QueuePolicy.DEADLINE:
            entry["ttftTarget"] = duration(taken.ttft_target)
            if taken.ttft_target_per_prompt_token:
                entry["perPromptToken"] = duration(taken.ttft_target_per_prompt_token)
    words = exceptions_words(found)
    return entry if words is None else {**entry, "message": words}


def taken_order(status: Mapping[str, Any]) -> QueueOrder | None:
    """What `queue_status` wrote; None where nothing was taken, or it cannot be read."""
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
