"""Outcomes of replica decisions for the history: added replicas became ready, or removed ones were needed again.

Only reported: the control law keeps its own account of regretted scale-ins.
"""

from __future__ import annotations

from trimtab_operator.tuner.moves import Decision, Reason, ReplicaCount
from trimtab_operator.tuner.observation import Observation
from trimtab_operator.tuner.state import TunerState

REGRET_SECONDS = 720.0  # replicas that are needed again this soon after a scale-in were removed too early


def with_outcomes(state: TunerState, observation: Observation, *, now: float) -> TunerState:
    """Return the state with the outcome of each applied replica decision, once it is known."""
    carried_out = {(event.at, event.change) for event in state.scaling.events}
    decisions = [entry for entry in state.history if isinstance(entry.move.target, ReplicaCount)]
    for index, decision in enumerate(decisions):
        is_done = (decision.at, _change(decision)) in carried_out
        if is_done and not decision.outcome:
            later = decisions[index + 1] if index + 1 < len(decisions) else None
            state = state.with_outcome(decision.id, _outcome(decision, later, len(observation.ready), now))
    return state


def _change(decision: Decision) -> float:
    return (decision.move.after or 0) - (decision.move.before or 0)


def _outcome(decision: Decision, later: Decision | None, serving: int, now: float) -> str:
    """Return the outcome; "" while it is unknown."""
    seconds = (now if later is None else later.at) - decision.at
    if decision.reason in (Reason.TOO_FEW_REPLICAS, Reason.REQUESTS_HELD):
        if later is None and serving >= (decision.move.after or 0):
            return f"{serving} replicas were ready after {seconds:.0f} s"
        return (
            "" if later is None else f"{serving} replicas were ready when the count changed again after {seconds:.0f} s"
        )
    if decision.reason is Reason.TOO_MANY_REPLICAS:
        if later is not None and later.reason is Reason.TOO_FEW_REPLICAS and seconds < REGRET_SECONDS:
            return f"too early: more replicas were needed again after {seconds:.0f} s"
        return (
            ""
            if later is None and seconds < REGRET_SECONDS
            else f"kept: no more replicas were needed for {seconds:.0f} s"
        )
    return ""
