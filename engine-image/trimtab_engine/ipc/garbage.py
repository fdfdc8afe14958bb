"""What the collector of garbage need not look at: what start-up made lives as long as the process.

Torch, Triton and a model are two hundred thousand objects, and a look at all of them takes a tenth of a second and
more, during which no step begins. Requests are few objects, and most go without the collector.
"""

import gc


def keep_what_is_there() -> None:
    """Never look at it again. For a process that begins to serve: cycles that are dropped later stay."""
    gc.collect()
    gc.freeze()
