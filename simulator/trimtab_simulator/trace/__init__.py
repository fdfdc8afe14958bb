"""Load: files of real traces read into arrivals, and what may be done to them before a replay."""
