"""Looks: what one replica says of itself at one moment, as values.

`look` has the types, `series` and `requests` decode what engines answer into them, `prometheus` says what Prometheus is
asked and makes pages of its answers, `codec` writes looks as JSON. The operator's scrape, Prometheus, a recorded range
and the simulator all hand the tuner these values, so that all share one decoder.
"""

from trimtab_operator.tuner.samples.sample import (
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
    Source,
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
    "Source",
    "Unfinished",
    "Work",
]
