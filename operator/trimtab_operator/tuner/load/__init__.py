"""The load: how long requests are, how many come, and how that changes. Learned from what arrives, not what finishes.

`lengths` has pairs of prompt and answer, `demand` arrivals, `season` those of each time of the day, `forecast` what
these foretell, `clients` whether those who send them wait for answers, `arrivals` the order in which rows are kept,
`draws` numbers that look random and are always the same.
"""

from trimtab_operator.tuner.load.clients import Clients
from trimtab_operator.tuner.load.demand import Demand, Growth
from trimtab_operator.tuner.load.forecast import Forecast
from trimtab_operator.tuner.load.lengths import Lengths, Pair

__all__ = ["Clients", "Demand", "Forecast", "Growth", "Lengths", "Pair"]
