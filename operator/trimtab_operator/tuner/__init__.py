"""The tuner: a pure function from what the engines report to what they should run.

`tick(state, readings, settings, now)` is all that the rest of the operator calls.
"""

from trimtab_operator.tuner.preemptions.observation import (
    EngineConfig,
    EngineLoad,
    FieldRange,
    GroupReading,
    Knob,
    Value,
    Values,
)
from trimtab_operator.tuner.preemptions.state import Bounds, Decision, Mode, Pace, Reason, Settings, TunerState
from trimtab_operator.tuner.preemptions.tick import EnginePatch, TickResult, Verdict, tick

__all__ = [
    "Bounds",
    "Decision",
    "EngineConfig",
    "EngineLoad",
    "EnginePatch",
    "FieldRange",
    "GroupReading",
    "Knob",
    "Mode",
    "Pace",
    "Reason",
    "Settings",
    "TickResult",
    "TunerState",
    "Value",
    "Values",
    "Verdict",
    "tick",
]
