"""What only new engines can change: recommended, in the order of the guide. No rule here moves anything.

The guide: "Increase tensor_parallel_size. This shards model weights across GPUs, allowing each GPU to have more memory
available for KV cache. However, increasing this value may cause excessive synchronization overhead." "Increase
pipeline_parallel_size. This distributes model layers across GPUs […]. However, increasing this value may cause latency
penalties."
"""

from __future__ import annotations

from trimtab_operator.tuner.moves import Move, Reason, ReplicaCount, Restart
from trimtab_operator.tuner.observation import Observation
from trimtab_operator.tuner.rules.pressure import is_pressed
from trimtab_operator.tuner.settings import Settings
from trimtab_operator.tuner.situation import Situation
from trimtab_operator.tuner.state import Memory

MISSED_SECONDS = 600.0  # that promises must have been missed before the owner is asked for more
RESTARTED_SECONDS = 600.0  # in which an engine that crashed above its start values has served again
START_ORDER = ("engine.maxModelLen", "tuning.bounds", "engine.cudagraphCaptureSizes", "engine.enforceEager",
               "engine.limitMmPerPrompt")  # fmt: skip
"""What to lower when an engine runs out of memory while it starts, first first."""


def restart_move(
    memory: Memory, observation: Observation, settings: Settings, s: Situation | None, *, now: float
) -> Move | None:
    """What the owner should know: an envelope too large to start, or a deployment that no knob can help."""
    return _start_too_large(memory, observation, now) or _saturated(memory, settings, s, now)


def _start_too_large(memory: Memory, observation: Observation, now: float) -> Move | None:
    """An engine that was killed for want of memory before it ever served: its envelope does not fit. What values above
    the starts have just brought down says nothing of it."""
    victims = [seen for seen in observation.coming if seen.was_oom_killed]
    if not victims or any(now - at < RESTARTED_SECONDS for at in memory.crashes):
        return None
    return Move(Reason.START_TOO_LARGE, Restart(START_ORDER[0]), None, None, {"replicas": len(victims)})


def _saturated(memory: Memory, settings: Settings, s: Situation | None, now: float) -> Move | None:
    """Promises have been missed for long, nothing is on trial, and replicas are the owner's, or at their bound."""
    since = memory.missed_since
    if s is None or since is None or now - since < MISSED_SECONDS or memory.trial is not None:
        return None
    scaling = settings.scaling
    evidence = {"attained": round(s.attained or 0.0, 4), "missed_seconds": round(now - since)}
    if scaling is None:
        return Move(Reason.SATURATED, ReplicaCount(), s.replicas, None, evidence)
    if (memory.scaling.desired or 0) < scaling.max_replicas:
        return None
    target = Restart("parallelism.tensor") if is_pressed(s) else Restart("scaling.maxReplicas")
    return Move(Reason.SATURATED, target, None, None, evidence)
