"""The load: how long requests are, how many come, and how that changes. Learned from what arrives, not what finishes.

`lengths` has pairs of prompt and answer, `demand` arrivals, `draws` numbers that look random and are always the same.
"""

from trimtab_operator.tuner.load.demand import Demand, Growth
from trimtab_operator.tuner.load.lengths import Lengths, Pair

__all__ = ["Demand", "Growth", "Lengths", "Pair"]
