"""Model of the load: request lengths, arrival rates and their changes, learned from arrivals rather than from finished
requests.

`lengths` has prompt and output lengths, `demand` arrival rates, `season` rates by time of day, `forecast` predicted
rates, `clients` detects closed-loop clients, `sharing` learns how much of the cached prompts requests share, `arrivals`
keeps rows in order, `draws` has deterministic pseudo-random numbers.
"""

from trimtab_operator.tuner.load.clients import Clients
from trimtab_operator.tuner.load.demand import Demand, Growth
from trimtab_operator.tuner.load.forecast import Forecast
from trimtab_operator.tuner.load.lengths import Lengths, Pair
from trimtab_operator.tuner.load.sharing import Sharing

__all__ = ["Clients", "Demand", "Forecast", "Growth", "Lengths", "Pair", "Sharing"]
