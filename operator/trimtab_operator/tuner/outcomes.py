"""What came of decisions on the replica count: whether those that were added serve, and if one that went was missed.

It is told in the history; nothing is decided by it (the law has its own account of regrets).
"""

from __future__ import annotations

from trimtab_operator.tuner.moves import Decision, Reason, ReplicaCount
from trimtab_operator.tuner.observation import Observation
from trimtab_operator.tuner.scaling.law import REGRET_SECONDS
from trimtab_operator.tuner.state import Memory


def with_outcomes(memory: Memory, observation: Observation, *, now: float) -> Memory:
    """Write down what came of each decision on replicas that was carried out, once that is known."""
    carried_out = {(event.at, event.change) for event in memory.scaling.events}
    decisions = [entry for entry in memory.history if isinstance(entry.move.target, ReplicaCount)]
    for index, decision in enumerate(decisions):
        is_done = (decision.at, _change(decision)) in carried_out
        if is_done and not decision.outcome:
            later = decisions[index + 1] if index + 1 < len(decisions) else None
            memory = memory.with_outcome(decision.id, _outcome(decision, later, len(observation.ready), now))
    return memory


def _change(decision: Decision) -> float:
    return (decision.move.after or 0) - (decision.move.before or 0)


def _outcome(decision: Decision, later: Decision | None, serving: int, now: float) -> str:
    """Empty while nothing can be said yet."""
    seconds = (now if later is None else later.at) - decision.at
    if decision.reason is Reason.TOO_FEW_REPLICAS:
        if later is None and serving >= (decision.move.after or 0):
            return f"{serving} replicas serve, {seconds:.0f} s later"
        return "" if later is None else f"{serving} replicas served when the count changed again, {seconds:.0f} s later"
    if decision.reason is Reason.TOO_MANY_REPLICAS:
        if later is not None and later.reason is Reason.TOO_FEW_REPLICAS and seconds < REGRET_SECONDS:
            return f"regretted: more were needed again {seconds:.0f} s later"
        return "" if later is None and seconds < REGRET_SECONDS else f"kept: no more were needed for {seconds:.0f} s"
    return ""
