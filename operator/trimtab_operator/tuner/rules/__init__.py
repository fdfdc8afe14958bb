"""The rules, one file per family: each a named function from a situation to the move it wants, or None.

`HOT` reads top to bottom in order of priority; the first that has something to move wins. Every rule that moves a knob
one way has a twin that moves it back.
"""

from trimtab_operator.tuner.rules.budget import better_budget
from trimtab_operator.tuner.rules.kv import grow_kv, shrink_kv
from trimtab_operator.tuner.rules.sequence_slots import fewer_seats, more_seats
from trimtab_operator.tuner.rules.watermark import lower_watermark, raise_watermark

HOT = (grow_kv, raise_watermark, better_budget, fewer_seats, more_seats, lower_watermark, shrink_kv)

__all__ = ["HOT"]
