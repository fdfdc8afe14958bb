"""The tuner: a pure function from what the engines report to what they should run.

`decide.decide(looks, memory, settings, now)` is all that the rest of the operator calls; docs/guides/tuning.md has
the law.
"""
