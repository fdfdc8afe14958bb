"""Engine model: one engine in virtual time, with a model of its step time. The tuner predicts with it, and the
simulator's replicas are made of it.

It schedules like `trimtab_engine.scheduling`, request by request (a property test compares both), but does not simulate
every step: while the same requests decode, their steps are summed in closed form.
"""

from trimtab_operator.tuner.engine_model.blocks import Blocks, KvBlocks
from trimtab_operator.tuner.engine_model.cost import StepCost, StepSums
from trimtab_operator.tuner.engine_model.engine import EngineModel, EngineModelPolicy
from trimtab_operator.tuner.engine_model.gaps import Gaps
from trimtab_operator.tuner.engine_model.sequence import Sequence
from trimtab_operator.tuner.engine_model.waiting import Allowance

__all__ = [
    "Allowance",
    "Blocks",
    "EngineModel",
    "EngineModelPolicy",
    "Gaps",
    "KvBlocks",
    "Sequence",
    "StepCost",
    "StepSums",
]
