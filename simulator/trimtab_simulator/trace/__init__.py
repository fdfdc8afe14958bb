"""Load: trace files as arrivals, and transformations before a replay."""
