"""Snapshots of replicas as values: metrics, configuration, memory ledger and requests.

`sample` has the types, `series` and `requests` parse engine responses, `prometheus` builds queries and parses their
results, `codec` writes snapshots as JSON. The operator's scrape, Prometheus, recordings and the simulator share these
types and one parser.
"""

from trimtab_operator.tuner.samples.sample import (
    Config,
    Counters,
    Finished,
    Gauges,
    Histogram,
    Ledger,
    Phase,
    ReplicaSnapshot,
    RequestUpdates,
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
    "Phase",
    "ReplicaSnapshot",
    "RequestUpdates",
    "Sample",
    "Source",
    "Unfinished",
    "Work",
]
