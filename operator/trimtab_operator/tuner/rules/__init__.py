"""Rules, one file per family: each maps a situation to the change that it wants, or None.

`LIVE_RULES` is in order of priority; the first rule that wants a change wins. Every rule has a counterpart in the other
direction.
"""

from trimtab_operator.tuner.rules.budget import choose_token_budget
from trimtab_operator.tuner.rules.kv import grow_kv, shrink_kv
from trimtab_operator.tuner.rules.sequence_slots import lower_max_num_seqs, raise_max_num_seqs
from trimtab_operator.tuner.rules.watermark import lower_watermark, raise_watermark

LIVE_RULES = (
    grow_kv,
    raise_watermark,
    choose_token_budget,
    lower_max_num_seqs,
    raise_max_num_seqs,
    lower_watermark,
    shrink_kv,
)

__all__ = ["LIVE_RULES"]
