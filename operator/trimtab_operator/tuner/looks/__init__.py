"""Looks: what one replica says of itself at one moment, as values.

`look` has the types, `series` and `requests` decode what engines answer into them, `codec` writes them as JSON. The
operator's scrape, a recorded range and the simulator all hand the tuner these values, so that all share one decoder.
"""

from trimtab_operator.tuner.looks.look import (
    Config,
    Counters,
    Finished,
    Gauges,
    Histogram,
    Ledger,
    Look,
    Phase,
    RequestNews,
    Sample,
    Unfinished,
    Work,
)

__all__ = [
    "Config",
    "Counters",
    "Finished",
    "Gauges",
    "Histogram",
    "Ledger",
    "Look",
    "Phase",
    "RequestNews",
    "Sample",
    "Unfinished",
    "Work",
]
