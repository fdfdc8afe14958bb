"""Parallel layouts of a model over devices: required pods, validity, memory and cost. Pure; no I/O.

`replica` computes the pods and devices of a spec. `facts` describes models, `gpus` describes devices. `rules` are the
engine's divisibility rules; `stages` and `memory_fit` compute the memory of each rank; `nearest` finds valid
alternatives; `check` combines them.
"""

from trimtab_operator.layout.replica import Layout, layout_of

__all__ = ["Layout", "layout_of"]
