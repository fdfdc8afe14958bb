"""The twin: one engine in virtual time, under a model of its step time. The tuner predicts with it, and the simulator's
replicas are made of it.

It schedules as `trimtab_engine.scheduling` does, request by request (a property test holds the two together), but does
not take every step: while the same requests decode, their steps are summed in closed form.
"""

from trimtab_operator.tuner.engine_model.blocks import Blocks, KvBlocks
from trimtab_operator.tuner.engine_model.cost import StepCost, StepSums
from trimtab_operator.tuner.engine_model.engine import TwinEngine, TwinPolicy
from trimtab_operator.tuner.engine_model.gaps import Gaps
from trimtab_operator.tuner.engine_model.sequence import Sequence
from trimtab_operator.tuner.engine_model.waiting import Allowance

__all__ = ["Allowance", "Blocks", "Gaps", "KvBlocks", "Sequence", "StepCost", "StepSums", "TwinEngine", "TwinPolicy"]
