"""Recommendations for changes that need new engines, in the guide's order. No rule here changes anything.

vLLM's guide: "Increase tensor_parallel_size. This shards model weights across GPUs, allowing each GPU to have more
memory available for KV cache. However, increasing this value may cause excessive synchronization overhead." "Increase
pipeline_parallel_size. This distributes model layers across GPUs […]. However, increasing this value may cause latency
penalties."
"""

from __future__ import annotations

from trimtab_operator.tuner.moves import Move, Reason, ReplicaCount, Restart
from trimtab_operator.tuner.observation import Observation
from trimtab_operator.tuner.rules.pressure import is_pressed
from trimtab_operator.tuner.settings import Settings
from trimtab_operator.tuner.situation import Situation
from trimtab_operator.tuner.state import TunerState

VIOLATED_SECONDS = 600.0  # of violated objectives before more resources are recommended
RESTARTED_SECONDS = 600.0  # within which a crashed engine serves again
START_ORDER = ("engine.maxModelLen", "tuning.bounds", "engine.cudagraphCaptureSizes", "engine.enforceEager",
               "engine.limitMmPerPrompt")  # fmt: skip
"""Parameters to lower when an engine runs out of memory during start-up, in this order."""


def restart_move(
    state: TunerState, observation: Observation, settings: Settings, s: Situation | None, *, now: float
) -> Move | None:
    """Return the recommendation: limits too large to start, or a deployment that no live parameter can help."""
    return _startup_out_of_memory(state, observation, now) or _saturated(state, settings, s, now)


def _startup_out_of_memory(state: TunerState, observation: Observation, now: float) -> Move | None:
    """Recommend lower limits after an engine was OOM-killed before it ever served. Roll-backs of raised values are
    excluded.
    """
    victims = [seen for seen in observation.starting if seen.was_oom_killed]
    if not victims or any(now - at < RESTARTED_SECONDS for at in state.crashes):
        return None
    return Move(Reason.STARTUP_OUT_OF_MEMORY, Restart(START_ORDER[0]), None, None, {"replicas": len(victims)})


def _saturated(state: TunerState, settings: Settings, s: Situation | None, now: float) -> Move | None:
    """Recommend more resources: objectives violated for long, no trial in progress, and replicas fixed or at their
    bound.
    """
    since = state.violated_since
    if s is None or since is None or now - since < VIOLATED_SECONDS or state.trial is not None:
        return None
    scaling = settings.scaling
    evidence = {"attained": round(s.attained or 0.0, 4), "violated_seconds": round(now - since)}
    if scaling is None:
        return Move(Reason.SATURATED, ReplicaCount(), s.replicas, None, evidence)
    if (state.scaling.desired or 0) < scaling.max_replicas:
        return None
    target = Restart("parallelism.tensor") if is_pressed(s) else Restart("scaling.maxReplicas")
    return Move(Reason.SATURATED, target, None, None, evidence)
